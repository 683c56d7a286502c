"""A trainer's files joined into one job in memplan's keys: flags over the trainer's file over the launcher's."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from memplan.errors import InvalidFileError, printable, shown_value
from memplan.importer.classified_keys import SortedKeys, sort_keys
from memplan.importer.files.named_files import NamedFiles
from memplan.importer.interpreter import follow
from memplan.importer.reading import DEFAULTED, LAUNCHED, OVERRIDDEN, STATED, Reading, Refusal, Result, UsedKey
from memplan.importer.referred_files import checkpoint_dtype, references, with_section_files, without_given
from memplan.importer.sources.argument_vectors import CommandLine
from memplan.importer.sources.given_keys import NO_LINE, GivenKeys, with_components
from memplan.importer.sources.started_processes import listed_gpus, processes, unknown_processes, visible_gpus
from memplan.importer.trainer_detection import Owned, betrayed_version, is_owned, other_kind, owner_of, with_new_names
from memplan.importer.trainer_mappings import OTHER, Mapped, TrainerHead, TrainerMappings

Role = Literal["job", "launcher", "not_training"]

GPUS = "--gpus N, the number of GPUs"
VERSION = re.compile(r"\d{1,6}(\.\d{1,6}){0,4}", re.ASCII)
FLAGGED = "accelerate"
"""The launcher whose flags are keys of its file too, and name others."""
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Variables of the environment that set the caching allocator; torch reads the first that is set (c10/cuda/CUDAAllocatorConfig.h)."""


@dataclass(frozen=True, slots=True)
class Question:
    """What a file is read with."""

    mappings: TrainerMappings  # The trainers' mappings
    gpus: int | None = None  # GPUs that share the job, or None
    trainer: str | None = None  # The trainer where the user names it
    version: str = ""  # Its version where the user names it
    text: str | None = None  # What the first file is to hold, where that is not yet written
    files: NamedFiles = field(default_factory=NamedFiles)  # Where files that are named may lie
    degrees: Mapping[str, int] = field(default_factory=dict)  # Keys of ``parallel`` that are given over the file's


@dataclass(slots=True)
class ImportedJob:
    """What was read of a trainer's files."""

    head: TrainerHead  # Whose file it is
    mapped: Mapped  # Its mapping
    version: str  # The version that the answer is for
    role: Role  # What the file is
    kind: str  # What a file is in words that is no training job
    reading: Reading  # Results, used keys, refusals and needs
    keys: SortedKeys  # Irrelevant and unknown keys
    sources: tuple[GivenKeys, ...] = ()  # The files, that of the job last
    renamed: dict[str, str] = field(default_factory=dict)  # Key -> the name that was given

    @property
    def other(self) -> str:
        """What a file is, in words, that is no training job."""
        of_trainer = "" if self.head.role == OTHER else f" of {self.head.title}"
        return f"{self.kind}{of_trainer}, not a training job"

    @property
    def refused(self) -> bool:
        """Whether something that is not modelled moves what is kept between steps."""
        return any(one.key not in self.mapped.step_alone for one in self.reading.refusals)

    def leave_steps_open(self) -> None:
        """Say in the training config what of a step is not modelled, where that alone is not."""
        if unplanned := [f"{one.key}: {one.why}" for one in self.reading.refusals]:
            self.reading.results["training.parallel.megatron.unplanned"] = Result(unplanned, STATED)

    @property
    def refused_for_experts(self) -> bool:
        """Whether a key is refused that changes routed experts alone."""
        return any(one.key in self.mapped.experts_alone for one in self.reading.refusals)

    def leave_experts_out(self) -> None:
        """Take what changes routed experts alone as understood, for a model that has none."""
        for one in [one for one in self.reading.refusals if one.key in self.mapped.experts_alone]:
            self.reading.refusals.remove(one)
            effect = "nothing: the model has no routed experts"
            self.reading.used[one.source, one.key] = UsedKey(one.key, one.source, one.line, one.value, [effect])

    def section(self, name: str) -> dict[str, Any]:
        """Return the results below a name, nested."""
        nested: dict[str, Any] = {}
        for full, result in self.reading.results.items():
            head, *rest = full.split(".")
            if head != name or not rest:
                continue
            inner = nested
            for part in rest[:-1]:
                inner = inner.setdefault(part, {})
            inner[rest[-1]] = result.value
        return nested

    def value(self, name: str) -> Any:
        """Return a result, or None."""
        result = self.reading.results.get(name)
        return None if result is None else result.value


def joined_job(sources: Sequence[GivenKeys], question: Question, command: CommandLine | None = None) -> ImportedJob:
    """Return the job that sources describe together, of a trainer's and its launcher's.

    Raises:
        InvalidFileError: Keys of no trainer or of several, or impossible values.
    """
    heads = question.mappings.heads()
    jobs, launchers = _by_role(sources, heads, question)
    main = jobs[-1] if jobs else launchers[-1]
    if command is not None and command.config:  # the file that it names says what a command is
        below = jobs[0].keys if len(jobs) > 1 else None
        main = replace(main, kind=other_kind(replace(main.keys, under=below), main.head, unread=below is None))
    if jobs and len({told.head.trainer for told in jobs}) > 1:
        names = " and ".join(dict.fromkeys(f"{told.head.trainer} ({told.keys.name})" for told in jobs))
        raise InvalidFileError([f"files of {names}: give one trainer's and its launcher's"])
    mapped = question.mappings.body(main.head.trainer)
    version, betraying = betrayed_version([told.keys for told in jobs] or [main.keys], mapped)
    version = _stated_version(question.version) or version or mapped.version
    environment = {name: value for source in sources for name, value in (source.environment or {}).items()}
    reading = Reading(_inputs(main.keys, question, version, environment), notes=list(main.keys.noted))
    ordered = tuple(sorted(sources, key=lambda keys: keys is main.keys))
    job = ImportedJob(main.head, mapped, version, _role(main), main.kind, reading, SortedKeys([], []), ordered)
    for absent in main.keys.absent:
        reading.need(absent)
    if betraying:
        _note_version(reading, version, betraying, main)
    if job.role == "not_training":
        named = (main.keys.value(key) for key in ("model_name_or_path", "base_model", "model", "checkpoint_dir"))
        given = next((name for name in named if isinstance(name, str)), None)
        job.reading.results["model.given"] = Result(given, DEFAULTED)
        return job
    if main.head.missing:  # what its keys say plainly; nothing is made of those that no rule follows
        follow(reading, mapped.rules, main.keys, STATED)
        return job
    flags = None if command is None else _launched(job, command)
    if said := next((name for name in ALLOCATOR if name in environment), ""):
        _take_up_allocator(reading, said, str(environment[said]), main.keys.name)
    _follow_all(job, jobs, launchers, flags, question)
    if reading.problems:
        raise InvalidFileError(reading.problems)
    return job


def _take_up_allocator(reading: Reading, name: str, text: str, source: str) -> None:
    """Take up what a variable says of torch's allocator, whose segments are planned; of its other settings say that they are not."""
    settings = dict(part.strip().partition(":")[::2] for part in re.split(r",(?![^\[]*\])", text) if part.strip())
    kind = "expandable" if settings.pop("expandable_segments", "").lower() == "true" else "native"
    reading.results["training.allocator"] = Result(kind, OVERRIDDEN, name, source)
    if settings.pop("backend", "native").lower() != "native":
        reading.refusals.append(Refusal(name, source, NO_LINE, text, "another allocator than torch's own"))
    if settings:
        why = f"the reserve is planned without {', '.join(printable(one, 40) for one in settings)}"
        reading.notes.append((name, kind, why))


def _inputs(keys: GivenKeys, question: Question, version: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return what rules ask for that is no key, as far as it is known."""
    inputs: dict[str, Any] = {
        "gpus": question.gpus,
        "degrees": question.degrees,
        "version": version,
        "form": keys.form,
        "checkpoint": checkpoint_dtype(keys, question.files),
        "program": " ".join(keys.words),
        "visible": listed_gpus(environment),
    }
    inputs |= {f"environment.{name}": value for name, value in environment.items()}
    return {name: value for name, value in inputs.items() if value not in (None, "", {})}


def _note_version(reading: Reading, version: str, betraying: str, main: Owned) -> None:
    why = f"{betraying} is a key of {version} and older"
    reading.results["let.version"] = Result(version, DEFAULTED, betraying, main.keys.name, why)


def _stated_version(version: str) -> str:
    """Return a version that the user says.

    Raises:
        InvalidFileError: It is none.
    """
    if version and not VERSION.fullmatch(version):
        raise InvalidFileError([f"--trainer-version {printable(version)}: expected numbers with dots, such as 0.19"])
    return version


def _by_role(
    sources: Sequence[GivenKeys], heads: Sequence[TrainerHead], question: Question
) -> tuple[list[Owned], list[Owned]]:
    """Return the sources of the job and those of its launcher."""
    jobs: list[Owned] = []
    launchers: list[Owned] = []
    for keys in sources:
        launching = question.trainer is not None and is_owned(keys, [one for one in heads if one.role == "launcher"])
        named = None if launching else question.trainer
        try:
            source = owner_of(keys, heads, named)
        except InvalidFileError:
            source = _beside(keys, sources[-1], jobs, heads, named)
        (launchers if source.head.role == "launcher" else jobs).append(source)
    return jobs, launchers


_TRAINS = re.compile(r"(?!.*(?:eval|infer|generat|merg|export|convert|serve|chat|predict|test))(?:.*(?:train|tun|sft|dpo|grpo|run|main|launch))", re.IGNORECASE)  # fmt: skip
"""Names of programs that train by the file that they are given, as far as a name tells."""


def _beside(
    keys: GivenKeys, command: GivenKeys, jobs: Sequence[Owned], heads: Sequence[TrainerHead], named: str | None
) -> Owned:
    """Return whose keys are that do not tell it: a file's that a command names those of that command's trainer, and the other way round.

    Raises:
        InvalidFileError: Neither tells.
    """
    if command is not keys and command.form == "argv":
        return owner_of(keys, heads, owner_of(command, heads, named).head.trainer)
    program = " ".join(word for word in keys.words if word.endswith((".py", ".sh")))
    if jobs and keys.form == "argv" and _TRAINS.match(program):
        return owner_of(keys, heads, jobs[-1].head.trainer)
    return owner_of(keys, heads, named)


def _role(main: Owned) -> Role:
    if main.kind:
        return "not_training"
    return "launcher" if main.head.role == "launcher" else "job"


def _launched(job: ImportedJob, command: CommandLine) -> GivenKeys | None:
    """Take up how many processes a command starts; return the flags of a launcher that has keys of its own."""
    counted = processes(command.launched, command.job.environment or {})
    if (unknown := unknown_processes(command)) and job.reading.inputs.get("gpus") is None:
        name, value = unknown
        job.reading.need(f"{GPUS}: {name} is {shown_value(value, 60)} in {command.launched.where(name)}")
    elif counted is not None:
        job.reading.results["launcher.processes"] = Result(counted[1], STATED, counted[0], command.job.name)
    elif shown := visible_gpus(command):
        job.reading.results["launcher.processes"] = Result(shown[1], DEFAULTED, shown[0], command.job.name)
    return command.launched if command.launcher == FLAGGED and command.launched.data else None


def _follow_all(
    job: ImportedJob, jobs: Sequence[Owned], launchers: Sequence[Owned], flags: GivenKeys | None, question: Question
) -> None:
    """Follow launchers' rules, then the trainer's, then what only both together say.

    Args:
        flags: Those of the command's launcher, which count over its file.
    """
    sources = [with_section_files(job.reading, told.keys, question.files) for told in jobs]
    given = [with_new_names(keys, job.mapped, question.version) for keys in sources]
    job.renamed.update(pair for _, renamed in given for pair in renamed.items())
    referred = [
        pair
        for place, (source, _) in enumerate(given)
        for pair in references(
            job.reading,
            without_given(job.mapped, [keys for keys, _ in given[place + 1 :]]),
            source,
            question.files,
            bool(launchers),
            question.mappings,
        )
    ]
    beside = [(told.keys, told.head.trainer) for told in launchers]
    joined = []
    for keys, trainer in beside:
        rules = _follow_launcher(job, keys, trainer, LAUNCHED, question)
        joined += rules if flags is None or trainer != FLAGGED else []
    if flags is not None:
        under = next((keys for keys, trainer in beside if trainer == FLAGGED), None)
        joined += _follow_launcher(job, flags, FLAGGED, STATED, question, under)
    for keys, trainer in referred:
        joined += _follow_launcher(job, keys, trainer, LAUNCHED, question)
    if given:
        over = given[0][0]
        for keys, _ in given[1:]:
            over = replace(with_components(keys, over), under=over)
        follow(job.reading, job.mapped.rules, over, STATED)
        for keys, _ in given:
            sort_keys(job.reading, keys, job.mapped, job.keys)
        joined.append((job.mapped.joined, over))
    for waiting, keys in joined:
        follow(job.reading, waiting, keys, STATED)


Joined = list[tuple[Sequence[Mapping[str, Any]], GivenKeys]]
"""Rules that are followed once all sources are read, and whose keys."""


def _follow_launcher(
    job: ImportedJob, given: GivenKeys, trainer: str, rank: int, question: Question, under: GivenKeys | None = None
) -> Joined:
    """Follow the rules of a launcher and of files that its keys name; return the rules that wait for the others.

    Args:
        rank: How strongly its keys count.
        under: Its file, whose keys those rules look at too.
    """
    mapped = question.mappings.body(trainer)
    keys, renamed = with_new_names(given, mapped, "")
    job.renamed.update(renamed)
    follow(job.reading, mapped.rules, keys, rank)
    sort_keys(job.reading, keys, mapped, job.keys)
    joined: Joined = []
    if trainer == FLAGGED:
        for inner, name in references(job.reading, mapped, keys, question.files, False, question.mappings):
            joined += _follow_launcher(job, inner, name, LAUNCHED, question)
    below = under if under is None else with_new_names(under, mapped, "")[0]
    return [*joined, (mapped.joined, replace(keys, under=below))]
