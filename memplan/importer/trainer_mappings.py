"""Mappings of trainers' files as they lie in ``configs/trainers/``: one file each, read when it is asked for."""

from collections.abc import Mapping
from dataclasses import field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from memplan.documents.frozen_values import dataclass
from memplan.documents.loading import parse_document
from memplan.documents.opening import files_in, read_text
from memplan.documents.schemas import build
from memplan.errors import unknown_name
from memplan.importer.sources.given_keys import NO_LINE, GivenKeys

HEAD_ENDS = "\nrules:"
"""Where what tells a trainer's file ends in a mapping's own file."""

OTHER = "other"
"""The role of what no trainer reads; it is asked about where no trainer has the keys."""

Condition = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class OtherFile:
    """Files that have a trainer's keys and are no training job."""

    when: Condition  # What tells them
    kind: str  # What they are
    unless: Condition = field(default_factory=dict)  # What tells others


@dataclass(frozen=True, slots=True)
class OldKey:
    """A key's other name, most often an old one."""

    now: str  # What it is called now
    until: str = ""  # The last version that took the old name; nothing where that is still taken
    first: bool = False  # Whether it counts where both are given


@dataclass(frozen=True, slots=True)
class Reference:
    """A key that names a file of a launcher."""

    key: str
    trainer: str  # Whose file it is
    # Names that stand for files of the trainer's own package -> their paths there.
    presets: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class IdleSection:
    """A key whose section counts for nothing beside what another key says."""

    section: str
    when: Condition


@dataclass(frozen=True, slots=True)
class TrainerHead:
    """What tells a trainer's file."""

    trainer: str  # Its name
    title: str  # Its name in prose
    role: str = "job"  # ``job``, ``launcher`` for files that say how one is launched, ``other`` for those of no trainer
    detect: tuple[Condition, ...] = ()  # Conditions, of which one has to hold
    without: tuple[str, ...] = ()  # Keys of other trainers, none of which is there where one of those holds
    words: tuple[str, ...] = ()  # Patterns of the program or subcommand of a command line
    calls: tuple[str, ...] = ()  # Functions that a Python file calls
    # What would have to be read or modelled before a file of it can be answered; it is recognised only.
    missing: str = ""
    other_files: tuple[OtherFile, ...] = ()  # Files that have its keys and are no training job


@dataclass(frozen=True, slots=True)
class Mapped:
    """A mapping's body, what it extends put in front."""

    stack: str = ""  # Whose training loop a job runs; nothing for launchers
    package: str = ""  # Whose schema it was checked against
    version: str = ""  # The version that was read
    extends: tuple[str, ...] = ()
    # Keys, or ``KEY=VALUE``, that tell an older version -> the last version that took them.
    history: Mapping[str, str] = field(default_factory=dict)
    # Keys, or ``KEY=VALUE``, of files and flags -> the first version that took them: of older keys beside them none tells a version.
    since: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, OldKey] = field(default_factory=dict)  # Old name -> the key
    references: tuple[Reference, ...] = ()  # Keys that name files of launchers
    # Keys whose own keys count as if they stood beside them, those of the last over those of others.
    sections: tuple[str, ...] = ()
    idle: tuple[IdleSection, ...] = ()  # Sections that count for nothing, and when
    rules: tuple[Mapping[str, Any], ...] = ()  # What keys mean, in the order in which they are followed
    joined: tuple[Mapping[str, Any], ...] = ()  # What follows once a trainer's file and its launcher's are both read
    # Keys that move memory and that nothing follows -> what they do.
    not_modelled: Mapping[str, str] = field(default_factory=dict)
    # Keys of those, and of rules that refuse, that move no memory between steps.
    step_alone: tuple[str, ...] = ()
    experts_alone: tuple[str, ...] = ()  # Keys of those that change routed experts, and nothing of other models
    irrelevant: tuple[str, ...] = ()  # Keys that move no memory on the device
    irrelevant_of: tuple[
        str, ...
    ] = ()  # Mappings whose irrelevant keys count here too, given by themselves or to a call
    writes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrainerMappings:
    """All mappings of a folder."""

    folder: Path  # Where they lie

    def heads(self) -> tuple[TrainerHead, ...]:
        """Return what tells each trainer's file."""
        return _heads(self.folder)

    def names(self) -> list[str]:
        """Return the names of all trainers that are told."""
        return sorted(head.trainer for head in self.heads() if head.role != OTHER)

    def body(self, trainer: str) -> Mapped:
        """Return a trainer's mapping.

        Raises:
            UnknownNameError: There is none.
        """
        return _body(self, trainer)

    def shipped(self, launcher: str, named: str) -> GivenKeys | None:
        """Return the keys of a file that a package ships under a folder's and a file's name; None where none does.

        Args:
            named: A path that ends with that folder and file.
        """
        path = self.folder / SHIPPED / f"{launcher}.yaml"
        files = parse_document(read_text(path), str(path)).data if path.is_file() else {}
        for known, file in files.items():
            folder_and_file = "/".join(known.split("/")[-2:])
            if f"/{named}".endswith(f"/{folder_and_file}"):
                return GivenKeys(f"{Path(known).name} of {file['package']}", file["keys"], {(): NO_LINE})
        return None


SHIPPED = "shipped"
"""Folder of what packages' own files of launchers say."""


@lru_cache(maxsize=2)
def _heads(folder: Path) -> tuple[TrainerHead, ...]:
    heads = []
    for path in files_in(folder, "*.yaml"):
        head, _, _ = read_text(path).partition(HEAD_ENDS)
        data = parse_document(head, str(path)).data
        if data.get("detect") or data.get("words") or data.get("calls"):
            known = {key: value for key, value in data.items() if key in TrainerHead.__dataclass_fields__}
            heads.append(build(TrainerHead, known))
    return tuple(heads)


def _extended(own: Mapped, base: Mapped) -> Mapped:
    """Return a mapping with what it extends; its own rules come last, and so override."""
    return Mapped(
        stack=own.stack or base.stack,
        package=own.package,
        version=own.version,
        extends=own.extends,
        history={**base.history, **own.history},
        since={**base.since, **own.since},
        aliases={**base.aliases, **own.aliases},
        references=(*own.references, *(r for r in base.references if r.key not in {o.key for o in own.references})),
        sections=(*base.sections, *own.sections),
        idle=(*base.idle, *own.idle),
        rules=(*base.rules, *own.rules),
        joined=(*base.joined, *own.joined),
        not_modelled={**base.not_modelled, **own.not_modelled},
        step_alone=(*base.step_alone, *own.step_alone),
        experts_alone=(*base.experts_alone, *own.experts_alone),
        irrelevant=(*base.irrelevant, *own.irrelevant),
        irrelevant_of=own.irrelevant_of,
        writes={**base.writes, **own.writes},
    )


@lru_cache(maxsize=32)
def _body(mappings: TrainerMappings, trainer: str) -> Mapped:
    """Return a trainer's mapping; to parse it takes most of the time of an import."""
    path = mappings.folder / f"{trainer}.yaml"
    if not path.is_file():
        raise unknown_name("trainer", trainer, mappings.names())
    data = parse_document(read_text(path), str(path)).data
    known = {key: value for key, value in data.items() if key in Mapped.__dataclass_fields__}
    known["rules"] = [_with_table(mappings, rule) for rule in known.get("rules", ())]
    own = build(Mapped, known)
    for base in own.extends:
        own = _extended(own, mappings.body(base))
    shared = [key for name in own.irrelevant_of for key in mappings.body(name).irrelevant]
    return replace(own, irrelevant=(*own.irrelevant, *shared, *(f"*.{key}" for key in shared))) if shared else own


def _with_table(mappings: TrainerMappings, rule: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a rule with the table of another mapping's rule, ``TRAINER.KEY``, put in, and what it adds to that."""
    name = rule.get("table")
    if not isinstance(name, str):
        return rule
    trainer, _, key = name.partition(".")
    table = next(
        other["table"] for other in mappings.body(trainer).rules if other.get("key") == key and "table" in other
    )
    return {**rule, "table": {**table, **rule.get("also", {})}}
