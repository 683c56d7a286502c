"""Parsed data to frozen values; every problem names its file, line and key.

Files that ship with memplan are built directly (the tests validate every one of them); files of a
user go through pydantic, which is imported only then.
"""

import json
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, TypeVar

from memplan.documents.loading import Document, Key
from memplan.errors import MOST_EXPLAINED, InvalidFileError, match_hint, printable, shown_value

T = TypeVar("T")


# ------------------------------------------------------------------ trusted data: build
def build(cls: type[T], data: Mapping[str, Any]) -> T:
    """Return the dataclass that trusted ``data`` describes, without checking it.

    Nested dataclasses, tuples and mappings follow the annotations of ``cls``.
    """
    return typing.cast("T", _builder(typing.cast("Any", cls))(data))


@cache
def _builder(hint: Any) -> Callable[[Any], Any]:
    if is_dataclass(hint):
        return _dataclass_builder(typing.cast("type", hint))
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        item = _builder(arguments[0])
        return lambda value: tuple(item(part) for part in value)
    if origin in (dict, Mapping):
        item = _builder(arguments[1])
        return lambda value: {key: item(part) for key, part in value.items()}
    if origin in (typing.Union, types.UnionType):
        nested = [a for a in arguments if is_dataclass(a) or typing.get_origin(a) in (tuple, dict, Mapping)]
        if nested:
            inner = _builder(nested[0])
            return lambda value: inner(value) if isinstance(value, dict | list) else value
    return _identity


def _identity(value: Any) -> Any:
    return value


def _dataclass_builder(cls: type) -> Callable[[Any], Any]:
    def made(name: str, value: Any) -> Any:
        return _builder(_hint(cls, name))(value) if isinstance(value, dict | list | tuple) else value

    def make(data: Any) -> Any:
        return cls(**{(name := key.replace("-", "_")): made(name, value) for key, value in data.items()})

    return make


@cache
def _hint(cls: type, name: str) -> Any:
    """Return what one field's annotation stands for, as :func:`typing.get_type_hints` would, which reads all of them."""
    owner = next(base for base in cls.__mro__ if name in vars(base).get("__annotations__", {}))
    annotation = owner.__annotations__[name]
    return eval(annotation, vars(sys.modules[owner.__module__])) if isinstance(annotation, str) else annotation


# ------------------------------------------------------------------ outside data: validate
def validate(cls: type[T], document: Document, data: Any = ..., path: tuple[Key, ...] = ()) -> T:
    """Return the dataclass that outside data describes, or report every problem at once.

    Args:
        cls: A frozen dataclass whose annotations are the schema; unknown keys are refused.
        document: Where the data stands, for the messages.
        data: The part of the document to read; all of it when it is not given.
        path: Keys leading from the top of the document to ``data``.

    Raises:
        InvalidFileError: One message per problem, each with file, line and key.
    """
    from pydantic import ValidationError

    value = document.data if data is ... else data
    if not isinstance(value, dict):
        given = "an empty file" if value is None and not path else _shown(value)
        problem = f"{document.where(path)}: expected keys and values, got {given}"
        raise InvalidFileError([*document.problems, problem])
    problems, paths = set(document.problems), []
    try:
        result = _adapter(typing.cast("Any", cls)).validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        located = [(item, _keys(value, item)) for item in error.errors()]
        problems |= {_problem(cls, document, (*path, *keys), keys, item) for item, keys in located[:MOST_EXPLAINED]}
        problems |= {f"{document.where((*path, *keys))}: {item['msg']}" for item, keys in located[MOST_EXPLAINED:]}
        paths = [(*path, *keys) for _, keys in located]
    if problems:
        raise InvalidFileError(sorted(_joined(problems), key=_line_number), paths)
    return typing.cast("T", result)


def _joined(problems: Iterable[str]) -> Iterator[str]:
    """Yield problems, those of one value that may be of several kinds as one."""
    wanted: dict[tuple[str, str], list[str]] = {}
    for problem in sorted(problems):
        where, _, rest = problem.partition(": expected ")
        kind, _, given = rest.rpartition(", got ")
        wanted.setdefault((where, given) if kind else (problem, ""), []).append(kind)
    for (where, given), kinds in wanted.items():
        yield f"{where}: expected {' or '.join(kinds)}, got {given}" if kinds != [""] else where


@cache
def _adapter(cls: type) -> Any:
    from pydantic import TypeAdapter

    _forbid_unknown_keys(cls)
    return TypeAdapter(cls)


def _forbid_unknown_keys(hint: Any) -> None:
    """Tell pydantic, for a dataclass and those inside it, to refuse keys that it does not have."""
    if is_dataclass(hint):
        typing.cast("Any", hint).__pydantic_config__ = {"extra": "forbid"}
        for inner in typing.get_type_hints(hint).values():
            _forbid_unknown_keys(inner)
    for inner in typing.get_args(hint):
        _forbid_unknown_keys(inner)


def json_schema(cls: type) -> dict[str, Any]:
    """Return the JSON Schema of a dataclass that :func:`validate` reads."""
    return typing.cast("dict[str, Any]", _adapter(typing.cast("Any", cls)).json_schema())


def _problem(
    cls: type, document: Document, full: tuple[Key, ...], location: tuple[Key, ...], item: Mapping[str, Any]
) -> str:
    where = document.where(full)
    kind, given = item["type"], _shown(item["input"])
    if kind in ("unexpected_keyword_argument", "extra_forbidden"):
        allowed = _allowed_keys(cls, location[:-1])
        known = f"; known keys: {', '.join(allowed)}" if allowed else ""
        return f"{where}: unknown key{match_hint(str(location[-1]), allowed, known)}"
    if kind in ("missing", "missing_argument"):
        return f"{where}: required key is missing"
    if kind == "literal_error":
        expected = item["ctx"]["expected"].replace("'", "")
        hint = match_hint(str(item["input"]), expected.replace(" or ", ", ").split(", "))
        return f"{where}: expected {expected}, got {given}{hint}"
    if kind == "value_error":
        return f"{where}: {item['ctx']['error']}"
    wanted = item["msg"].removeprefix("Input should be ")
    for word, better in _WANTED.items():
        wanted = wanted.replace(word, better)
    if wanted == "keys and values" and isinstance(item["input"], str) and (first := _first_key(cls, location)):
        wanted = f"keys and values, such as {{{first}: {printable(item['input'], 40)}}}"
    if wanted == "text" and type(item["input"]) in (int, float):
        given = f"{given}: write it in quotes"
    if item["input"] is False or item["input"] is True:
        given = f"{str(item['input']).lower()} (YAML reads unquoted yes, no, on and off so)"
    return f"{where}: expected {wanted}, got {given}"


_WANTED = {
    "a valid integer": "an integer",
    "a valid array": "a list",
    "a valid ": "a ",
    "an object": "keys and values",
    "a string": "text",
}
"""Words of pydantic -> words of a person who writes YAML."""


def _keys(value: Any, item: Mapping[str, Any]) -> tuple[Key, ...]:
    """Return the keys that lead to what pydantic found wrong; its labels of union branches lead nowhere."""
    keys: list[Key] = []
    missing = item["type"] in ("missing", "missing_argument")
    for part in item["loc"][:-1] if missing else item["loc"]:
        if (isinstance(value, dict) and part in value) or (isinstance(value, list) and part in range(len(value))):
            keys.append(part)
            value = value[part]
    return (*keys, item["loc"][-1]) if missing else tuple(keys)


def _allowed_keys(cls: Any, location: Sequence[Key]) -> list[str]:
    """Return the keys that the dataclass at ``location`` inside ``cls`` takes."""
    hint: Any = cls
    for part in location:
        hint = _step(hint, part)
    for option in (hint, *typing.get_args(hint)):
        if is_dataclass(option):
            return sorted(field.name for field in fields(option))
    return []


def _first_key(cls: Any, location: Sequence[Key]) -> str:
    """Return the key that a text alone most likely stands for: a dataclass' first, or that of all roles; nothing where there is none."""
    hint: Any = cls
    for part in location:
        hint = _step(hint, part)
    for option in (hint, *typing.get_args(hint)):
        if is_dataclass(option):
            return fields(option)[0].name
    return "default" if typing.get_origin(hint) is Mapping else ""


def _step(hint: Any, part: Key) -> Any:
    for option in (hint, *typing.get_args(hint)):
        if is_dataclass(option):
            return typing.get_type_hints(option).get(str(part), Any)
        if typing.get_origin(option) in (tuple, dict, Mapping):
            return typing.get_args(option)[-1 if typing.get_origin(option) is not tuple else 0]
    return Any


def _shown(value: Any) -> str:
    return shown_value(value, 60)


def _line_number(problem: str) -> tuple[int, str]:
    for part in problem.split(":"):
        if part.isdigit():
            return int(part), problem
    return 0, problem
