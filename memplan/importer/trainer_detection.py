"""Which trainer a file is of: its keys alone decide, never its name."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from memplan.documents.frozen_values import dataclass
from memplan.errors import InvalidFileError, unknown_name
from memplan.importer.classified_keys import known_keys
from memplan.importer.interpreter import PROGRAM
from memplan.importer.sources.conditions import holds, version_parts, word
from memplan.importer.sources.given_keys import MISSING, GivenKeys
from memplan.importer.trainer_mappings import OTHER, Mapped, TrainerHead

PARSED = "huggingface"
"""The mapping of trainers whose files transformers' parser reads: a key that it does not know fails, without a value too."""

FORM = "$form"
"""Whether keys are of a file, of Python or of a command line."""

TRAINS = "$trains"
"""Whether calls of a Python file may train: some name a trainer, or go back through a model themselves."""
_TRAINING = re.compile(
    r"(?<!pre)train(?!able)|backward|_fit$|get_peft_model$|(SFT|PO|OO|TO|Reward)Config$", re.IGNORECASE
)

NEGATION = "no_"

NO_TRAINER = "no trainer that memplan reads has these keys; name one with --from, or run a script of your own without a GPU: memplan run"


SCRIPT = "a script of one's own is not read, but executed without a GPU: memplan run {} --gpu NAME"

NOTEBOOK = (
    "a notebook that calls neither unsloth nor a trainer of TRL; save it as a script (jupyter nbconvert --to script),"
    " which is executed without a GPU: memplan run SCRIPT --gpu NAME"
)


@dataclass(frozen=True, slots=True)
class Owned:
    """A source and whose it is."""

    keys: GivenKeys
    head: TrainerHead  # The trainer
    kind: str = ""  # What the file is where it is no training job; else nothing


LONGEST_WORD = 4096
"""Characters of a program's path or a subcommand, at most (``PATH_MAX`` of Linux' limits.h): others are compared with no pattern."""


def owner_of(keys: GivenKeys, heads: Sequence[TrainerHead], named: str | None = None) -> Owned:
    """Return whose keys these are.

    Args:
        named: The trainer where the user names it.

    Raises:
        InvalidFileError: No trainer's, or those of several.
        UnknownNameError: No trainer has the name given.
    """
    none = NO_TRAINER
    if keys.form == "python" and keys.words:
        none = NOTEBOOK if keys.counted == "cell" else SCRIPT.format(keys.name)
    if named is not None:
        chosen = next((head for head in heads if _alike(head.trainer, named)), None)
        if chosen is None:
            raise unknown_name("trainer", named, [head.trainer for head in heads])
        if none != NO_TRAINER and not _is_of(keys, chosen):
            raise InvalidFileError([f"{keys.name}: {none}"])
        return Owned(_calls_alone(keys, chosen), chosen, other_kind(keys, chosen))
    told = [head for head in heads if head.role != OTHER and _is_of(keys, head)]
    told = told or [head for head in heads if head.role == OTHER and _is_of(keys, head)]
    told = [head for head in told if all(keys.value(name) is MISSING for name in head.without)] or told
    if keys.words and (longest := max((_by_words(keys, head) for head in told), default=0)):
        told = [head for head in told if _by_words(keys, head) == longest]
    if not told:
        raise InvalidFileError([f"{keys.name}: {none}"])
    if len(told) > 1:
        names = " and ".join(head.trainer for head in told)
        raise InvalidFileError([f"{keys.name}: has keys of {names}; name the trainer: memplan import --from"])
    return Owned(_calls_alone(keys, told[0]), told[0], other_kind(keys, told[0]))


def _calls_alone(keys: GivenKeys, head: TrainerHead) -> GivenKeys:
    """Return of a program that calls a trainer what it gives to calls: its variables are names of its own."""
    if keys.form != "python" or not head.calls:
        return keys
    return replace(keys, data={name: value for name, value in keys.data.items() if name in keys.words})


def is_owned(keys: GivenKeys, heads: Iterable[TrainerHead]) -> bool:
    """Tell whether these are keys of some trainer, or of several."""
    return any(head.role != OTHER and _is_of(keys, head) for head in heads)


def foreign_kind(keys: GivenKeys, heads: Iterable[TrainerHead]) -> str:
    """Return what a source is that no trainer reads, in words; nothing where that is not known."""
    return next(
        (kind for head in heads if head.role == OTHER and _is_of(keys, head) and (kind := other_kind(keys, head))), ""
    )


def is_program_of(keys: GivenKeys, head: TrainerHead) -> bool:
    """Tell whether a command line runs a program, or subcommand, that a trainer has."""
    return bool(_by_words(keys, head))


def _alike(one: str, other: str) -> bool:
    return one.replace("-", "") == other.lower().replace("-", "").replace("_", "").replace(" ", "")


def _is_of(keys: GivenKeys, head: TrainerHead) -> bool:
    said = _said(keys)
    return bool(_by_words(keys, head)) or (
        any(holds(condition, lambda key: _stated_value(keys, key, said)) for condition in head.detect)
        and all(keys.value(name) is MISSING for name in head.without)
    )


def _by_words(keys: GivenKeys, head: TrainerHead) -> int:
    """Return how long the longest pattern is that a program, or calls of a Python file, fit; 0 where none does."""
    if keys.form == "python":
        patterns = [pattern for pattern in head.calls if any(fnmatchcase(word, pattern) for word in keys.words)]
    else:
        line = " ".join(word for word in keys.words if len(word) <= LONGEST_WORD)
        patterns = [pattern for pattern in head.words if fnmatchcase(line, pattern)]
    return max(map(len, patterns), default=0)


def other_kind(keys: GivenKeys, head: TrainerHead, *, unread: bool = False) -> str:
    """Return what a source is that has a trainer's keys and is no training job; nothing where it is one.

    Args:
        unread: Whether a file that a command names is not there, so that the program alone can tell.
    """
    said = _said(keys)
    others = [one for one in head.other_files if PROGRAM in one.when or not unread]

    def lookup(key: str) -> Any:
        return _stated_value(keys, key, said)

    told = (one for one in others if holds(one.when, lookup) and not (one.unless and holds(one.unless, lookup)))
    return next((one.kind for one in told), "")


def _said(keys: GivenKeys) -> dict[str, Any]:
    """Return what conditions ask of a source besides its keys."""
    trains = keys.form != "python" or any(map(_TRAINING.search, keys.words))
    return {FORM: keys.form, PROGRAM: " ".join(keys.words) or MISSING, TRAINS: trains}


def _stated_value(keys: GivenKeys, key: str, said: Mapping[str, Any]) -> Any:
    return said[key] if key in said else keys.value(key)


def with_new_names(keys: GivenKeys, mapped: Mapped, version: str) -> tuple[GivenKeys, dict[str, str]]:
    """Return keys in which old names are replaced, and new name -> the name that was given.

    Args:
        version: The version that the user says, which may no longer take an old name; or nothing.
    """
    renamed: dict[str, str] = {}
    if PARSED in mapped.extends:
        keys = replace(keys, data={key: _parsed(value) for key, value in keys.data.items()})
    for section in mapped.sections:
        keys = _without_section(keys, section)
    idle: dict[str, Any] = {
        one.section: {} for one in mapped.idle if one.section in keys.data and holds(one.when, keys.value)
    }
    keys = replace(keys, data={**keys.data, **idle}) if idle else keys
    for old, alias in mapped.aliases.items():
        value = keys.value(old)
        retired = version and alias.until and version_parts(version) > version_parts(alias.until)
        both = keys.value(alias.now) is not MISSING and not (alias.first and value is not None)
        if value is MISSING or retired or both:
            continue
        before, after = old.split("."), alias.now.split(".")
        below = {path[len(before) :]: line for path, line in keys.lines.items() if [*path[: len(before)]] == before}
        lines = {tuple(after): keys.line(old)} | {(*after, *rest): line for rest, line in below.items()}
        keys = replace(keys, data=_placed(_without(keys.data, before), after, value), lines={**keys.lines, **lines})
        renamed |= {alias.now: old} | {
            ".".join(map(str, (*after, *rest))): ".".join(map(str, (*before, *rest))) for rest in below
        }
    return (_without_negations(keys, mapped) if keys.form == "argv" and PARSED in mapped.extends else keys), renamed


def _parsed(value: Any) -> Any:
    """Return the keys that a text holds as JSON, as transformers reads those of its arguments; any other value as it is.

    Source:
        ``_VALID_DICT_FIELDS`` in transformers/training_args.py (5.23.0).
    """
    if not (isinstance(value, str) and value.startswith("{")):
        return value
    try:
        inner = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return inner if isinstance(inner, dict) else value


def _without_section(keys: GivenKeys, section: str) -> GivenKeys:
    """Return keys in which those of a section stand beside it, over others of their names."""
    inner = keys.data.get(section)
    if not isinstance(inner, Mapping):
        return keys
    data = {**{key: value for key, value in keys.data.items() if key != section}, **inner}
    return replace(keys, data=data, lines={**keys.lines, **keys.at(section).lines})


def _without_negations(keys: GivenKeys, mapped: Mapped) -> GivenKeys:
    """Return flags in which ``--no_KEY``, which transformers' parser takes for switches that are on by default, is ``KEY`` off."""
    known = known_keys(mapped)
    names = {name: name[len(NEGATION) :] for name in keys.data if name.startswith(NEGATION) and name not in known}
    off = {name: key for name, key in names.items() if key in known and keys.data[name] is True}
    data = {off.get(name, name): False if name in off else value for name, value in keys.data.items()}
    lines = {(off.get(str(path[0]), path[0]), *path[1:]): line for path, line in keys.lines.items()}
    return replace(keys, data=data, lines=lines)


def betrayed_version(sources: Sequence[GivenKeys], mapped: Mapped) -> tuple[str, str]:
    """Return the newest version that took all keys of a job's files and flags, and the key, or ``KEY=VALUE``, that betrays it.

    Nothing where the newest that is read takes all of them, or no version does: a key that came later than an old one went.
    """
    written = [given for given in sources if given.form == "argv" or not given.words]  # no program's calls
    latest = max(
        (version_parts(first) for key, first in mapped.since.items() if any(_gives(given, key) for given in written)),
        default=(),
    )
    dated = {old: alias.until for old, alias in mapped.aliases.items() if alias.until} | dict(mapped.history)
    strict = PARSED in mapped.extends
    old = {
        key: until
        for given in sources
        for key, until in dated.items()
        if (_gives(given, key) or (strict and key in given.data)) and version_parts(until) >= latest
    }
    if not old:
        return "", ""
    key = min(old, key=lambda name: version_parts(old[name]))
    return old[key], key


def _gives(given: GivenKeys, key: str) -> bool:
    """Tell whether a file has a key, or under ``KEY=VALUE`` has it at that value."""
    name, _, wanted = key.partition("=")
    value = given.value(name)
    return value is not MISSING and (not wanted or word(value) == wanted)


def _without(data: Any, path: Sequence[str]) -> Any:
    if ".".join(path) in data:
        return {key: value for key, value in data.items() if key != ".".join(path)}
    head, rest = path[0], path[1:]
    if not rest:
        return {key: value for key, value in data.items() if key != head}
    return {**data, head: _without(data[head], rest)}


def _placed(data: Any, path: Sequence[str], value: Any) -> Any:
    head, rest = path[0], path[1:]
    inner = data.get(head) if isinstance(data.get(head), dict) else {}
    return {**data, head: value if not rest else _placed(inner, rest, value)}
