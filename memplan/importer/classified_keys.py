"""Every key of a source, sorted: understood, irrelevant, not modelled, or unknown."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

from memplan.errors import MOST_EXPLAINED, match_hint, printable, shown_value
from memplan.importer.interpreter import ARITHMETIC, is_unknown
from memplan.importer.reading import Reading, Refusal, UsedKey
from memplan.importer.sources.conditions import is_on, word
from memplan.importer.sources.given_keys import MISSING, GivenKeys, key_paths
from memplan.importer.trainer_mappings import Mapped


@dataclass(frozen=True, slots=True)
class UnknownKey:
    """A key that the trainer does not have, with the nearest that it has."""

    key: str
    source: str
    line: int
    nearest: str


@dataclass(slots=True)
class SortedKeys:
    """Keys of all sources by what is made of them; those understood stand in the reading."""

    irrelevant: list[str]
    unknown: list[UnknownKey]


def known_keys(mapped: Mapped) -> frozenset[str]:
    """Return every key that a mapping's rules, references and lists name."""
    return frozenset((*rule_keys(mapped), *mapped.not_modelled, *mapped.irrelevant, *mapped.aliases))


def rule_keys(mapped: Mapped) -> frozenset[str]:
    """Return every key that a mapping's rules and references look at."""
    names: set[str] = {reference.key for reference in mapped.references}
    for rule in (*mapped.rules, *mapped.joined):
        key = rule.get("key", [])
        names.update([key] if isinstance(key, str) else key)
        names.update(rule.get("when", ()), rule.get("unless", ()))
        names.update(
            term
            for term in [term for name in (*ARITHMETIC, "join") for term in rule.get(name, ())]
            if isinstance(term, str)
        )
    return frozenset(name for name in names if not name.startswith("$"))


SWITCHES = frozenset(("true", "false", "yes", "no", "on", "off", "y", "n", "t", "f", "1", "0", "none", "null", ""))
"""Words that say whether something is on, as YAML, command lines and JSON have them."""


def _switches(mapped: Mapped) -> frozenset[str]:
    """Return the keys that a mapping's rules ask only whether they are on, true or false."""
    requested: dict[str, bool] = {}
    for rule in (*mapped.rules, *mapped.joined):
        for name, wanted in {**rule.get("when", {}), **rule.get("unless", {})}.items():
            words = {str(one).lower() for one in (wanted if isinstance(wanted, list) else [wanted])}
            if not words <= {"given", "absent"}:
                requested[name] = requested.get(name, True) and words <= {"true", "false", "absent", "given"}
        names = rule.get("key", [])
        for name in [names] if isinstance(names, str) else names:
            if not {"value", "set"} & rule.keys() and ("refuse" not in rule or "table" in rule):
                requested[name] = requested.get(name, True) and rule.get("as") == "flag"
    return frozenset(name for name, only in requested.items() if only and not name.startswith("$"))


def switch_problems(keys: GivenKeys, mapped: Mapped) -> Iterator[str]:
    """Yield every key that switches something on or off and has another value than that."""
    for name in _switches(mapped):
        value = keys.value(name)
        if value is MISSING or isinstance(value, bool | Mapping) or word(value) in SWITCHES or is_unknown(value):
            continue
        yield f"{keys.where(name)}: expected true or false, got {shown_value(value, 60)}"


def _decided(mapped: Mapped) -> frozenset[str]:
    """Return the keys whose values, and not parts of them, decide whether a mapping's rules hold."""
    words: dict[str, set[str]] = {}
    for rule in (*mapped.rules, *mapped.joined):
        for name, wanted in [*rule.get("when", {}).items(), *rule.get("unless", {}).items()]:
            words.setdefault(name, set()).update(map(str, wanted if isinstance(wanted, list) else [wanted]))
    given = {"given", "absent"}
    return frozenset(
        name for name, of in words.items() if of - given and "*" not in "".join(of) and not name.startswith("$")
    )


def ask_for_unknown(reading: Reading, keys: GivenKeys, mapped: Mapped) -> None:
    """Ask for values on which rules depend and that nobody can tell from a source."""
    for name in sorted(_decided(mapped)):
        value = keys.value(name)
        said = f"{name} is {printable(str(value), 40)!r} in"
        if is_unknown(value) and not any(said in need for need in reading.needs):
            reading.need(f"the value of {name}: {said} {keys.where(name)}")


def _is_nan(value: Any) -> bool:
    """Tell what is not a number, which YAML and JSON write as words, whatever key has it."""
    return value != value if isinstance(value, float) else isinstance(value, str) and value.lower() in (".nan", "nan")


def sort_keys(reading: Reading, keys: GivenKeys, mapped: Mapped, sorted_keys: SortedKeys) -> None:
    """Sort the keys of one source, noting those that move memory and are not modelled as refused, and no switches' values."""
    reading.problems += switch_problems(keys, mapped)
    ask_for_unknown(reading, keys, mapped)
    reading.problems += [
        f"{keys.where(path)}: expected a number, got NaN" for path, value in key_paths(keys.data) if _is_nan(value)
    ]
    _sort(reading, keys, keys.data, "", mapped, sorted_keys, frozenset(rule_keys(mapped)))


def _sort(
    reading: Reading,
    keys: GivenKeys,
    data: Mapping[str, Any],
    prefix: str,
    mapped: Mapped,
    done: SortedKeys,
    ruled: Iterable[str],
) -> None:
    above = {name[:dot] for name in (*ruled, *mapped.not_modelled, *mapped.irrelevant) for dot in _dots(name)}
    for key, value in data.items():
        path = f"{prefix}{key}"
        below = f"{path}."
        inner = path in above
        refusal = _listed(path, mapped.not_modelled)
        if refusal != path and path in ruled:  # a pattern is of the keys that no rule names
            refusal = None
        if isinstance(value, Mapping) and inner:
            _sort(reading, keys, value, below, mapped, done, ruled)
        elif refusal is not None:
            _not_modelled(reading, keys, path, value, mapped.not_modelled[refusal])
        elif path in ruled:
            place = (keys.name, path)
            reading.used.setdefault(place, UsedKey(path, keys.name, keys.line(path), value))
        elif (
            _listed(path, mapped.irrelevant) is not None
            or path in keys.variables
            or (not prefix and keys.form == "python" and key in keys.words)  # a call that is none of the trainer's
            or (value is None and (inner or path in mapped.aliases))
            or (path in mapped.aliases and keys.value(mapped.aliases[path].now) is not MISSING)
        ):
            done.irrelevant.append(path)
        else:
            hinted = len(done.unknown) < MOST_EXPLAINED
            nearest = match_hint(path, _names(mapped, prefix)) if hinted else ""
            done.unknown.append(UnknownKey(path, keys.name, keys.line(path), nearest))


def _names(mapped: Mapped, prefix: str) -> list[str]:
    """Return the keys that a mapping names, those of any call as that call's."""
    return [f"{prefix}{name[2:]}" if name.startswith("*.") else name for name in known_keys(mapped)]


def _dots(name: str) -> list[int]:
    return [place for place, letter in enumerate(name) if letter == "."]


def _not_modelled(reading: Reading, keys: GivenKeys, path: str, value: Any, why: str) -> None:
    """Refuse a key that is switched on; one that is off is understood."""
    if is_on(value):
        if not any(refusal.key == path for refusal in reading.refusals):
            reading.refusals.append(Refusal(path, keys.name, keys.line(path), value, why))
    else:
        reading.used.setdefault((keys.name, path), UsedKey(path, keys.name, keys.line(path), value, ["off"]))


def _listed(path: str, names: Iterable[str]) -> str | None:
    """Return the entry of a list that a key falls under: itself, or a pattern with ``*``."""
    if path in names:
        return path
    return next((name for name in names if "*" in name and _fits(path, name)), None)


@lru_cache(maxsize=4096)
def _fits(path: str, pattern: str) -> bool:
    return fnmatchcase(path, pattern)
