"""The keys of one given file or command line: plain values, and where each stands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from memplan.documents.frozen_values import dataclass
from memplan.documents.loading import Document, Key, dotted_keys
from memplan.errors import InvalidFileError

MISSING: Any = object()
"""What stands where a key is not given."""
UNSET = (None, "???")
"""Values of a key that is not given: an empty one, and OmegaConf's mark of one that another file has to give."""
COMPONENT = "_component_"
"""The key below which torchtune names a class or function."""
NO_LINE = 0
"""Where a key stands whose file is known by what a package ships, and lies nowhere here."""
REPEATED = "duplicate key"
"""What the loader says of a key that is given twice; trainers' own loaders take the last one."""


class Expression(str):
    """A value that only running a program would tell, as it is written."""


class Loaded(Expression):
    """A model that a program loads, and the keywords that it gives its class."""

    keywords: Mapping[str, Any]

    def __new__(cls, text: str, keywords: Mapping[str, Any]) -> Loaded:
        """Return the text of a call, with its keywords."""
        loaded = super().__new__(cls, text)
        loaded.keywords = keywords
        return loaded


@dataclass(frozen=True, slots=True)
class GivenKeys:
    """One source of keys."""

    name: str  # How messages call it: a path, or ``command line``
    data: Mapping[str, Any]  # Keys and values, nested
    lines: Mapping[tuple[Key, ...], int]  # Path of keys -> line, or the place among the words of a command line, from 1
    form: str = "file"  # ``file``, ``python`` or ``argv``
    words: tuple[str, ...] = ()  # Program and subcommands of a command line; functions that a Python file calls
    environment: Mapping[str, str] | None = None  # Variables set in front of a command
    absent: tuple[str, ...] = ()  # Files that it includes and that are not there
    repeated: tuple[str, ...] = ()  # Keys that are given twice, of which the last counts
    variables: frozenset[str] = frozenset()  # Keys that others refer to
    counted: str = "line"  # What ``lines`` counts: ``line``, the ``word`` of a command, the ``cell`` of a notebook
    noted: tuple[tuple[str, str, str], ...] = ()  # What reading it assumes: of what, what, and why
    # Keys of another source that count where these say nothing: a file's under the flags of its command.
    under: GivenKeys | None = None

    def value(self, path: str) -> Any:
        """Return what stands at a dotted path, or :data:`MISSING`; an empty value counts as not given."""
        own = self._own(path)
        return own if own is not MISSING or self.under is None else self.under.value(path)

    def source(self, path: str) -> GivenKeys:
        """Return the source that gives a key, this one where none does."""
        if self.under is None or self._own(path) is not MISSING or self.under.value(path) is MISSING:
            return self
        return self.under.source(path)

    def has(self, key: str) -> bool:
        """Tell whether a key stands in a source, with a value or without."""
        return key in self.data or (self.under is not None and self.under.has(key))

    def _own(self, path: str) -> Any:
        node: Any = self.data
        if path in self.data:
            node = self.data[path]
            return MISSING if _is_unset(node) else node
        for part in path.split("."):
            if not isinstance(node, Mapping) or part not in node:
                return MISSING
            node = node[part]
        return MISSING if _is_unset(node) else node

    def line(self, path: str) -> int:
        """Return the line of a dotted path, or of the nearest key above it."""
        if (source := self.source(path)) is not self:
            return source.line(path)
        known: tuple[Key, ...] = (path,) if (path,) in self.lines else tuple(path.split("."))
        while known and known not in self.lines:
            known = known[:-1]
        return self.lines.get(known, 1)

    def where(self, path: str) -> str:
        """Return ``file:line: key`` for messages."""
        if (source := self.source(path)) is not self:
            return source.where(path)
        line = self.line(path)
        place = shown_place(self.name, line) if self.counted == "line" else f"{self.name}: {self.counted} {line}"
        return f"{place}: {dotted_keys(path.split('.'))}"

    def at(self, path: str) -> GivenKeys:
        """Return the keys below one key, as if they stood alone."""
        inner, parts = self.value(path), tuple(path.split("."))
        lines = {key[len(parts) :]: line for key, line in self.lines.items() if key[: len(parts)] == parts}
        return replace(self, data=inner if isinstance(inner, Mapping) else {}, lines=lines)


def shown_place(source: str, line: int) -> str:
    """Return ``file:line`` for messages; the file alone of one that lies nowhere here."""
    return source if line == NO_LINE else f"{source}:{line}"


def _is_unset(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value in UNSET)


def given_document(document: Document) -> GivenKeys:
    """Return the keys of a parsed file, with merged anchors put in and references between keys followed.

    Raises:
        InvalidFileError: It holds no keys.
    """
    if problems := [problem for problem in document.problems if REPEATED not in problem]:
        raise InvalidFileError(problems)
    if not isinstance(document.data, dict):
        kind = "empty" if document.data is None else "no keys and values"
        raise InvalidFileError([f"{document.name}:1: {kind}: expected the configuration of a training job"])
    return GivenKeys(document.name, with_merges(document.data), document.lines, repeated=document.problems)


def with_merges(value: Any) -> Any:
    """Return a value in which ``<<`` is replaced by the keys it stands for, which given ones override."""
    if isinstance(value, list):
        return [with_merges(item) for item in value]
    if not isinstance(value, dict):
        return value
    plain = {key: with_merges(item) for key, item in value.items() if key != "<<"}
    merged: dict[str, Any] = {}
    anchors = value.get("<<")
    for part in anchors if isinstance(anchors, list) else [anchors]:
        if isinstance(part, dict):
            merged = {**with_merges(part), **merged}
    return {**merged, **plain}


def with_components(keys: GivenKeys, under: GivenKeys) -> GivenKeys:
    """Return flags in which a component that the file below has is named in full: ``model=PATH`` is ``model._component_``.

    Source:
        torchtune 0.6.1: config/_utils.py, _merge_yaml_and_cli_args
    """
    nested = {key for key, value in under.data.items() if isinstance(value, Mapping) and COMPONENT in value}
    short = {key: f"{key}.{COMPONENT}" for key in nested if isinstance(keys.data.get(key), str)}
    data = {short.get(key, key): value for key, value in keys.data.items()}
    lines = {(short.get(str(path[0]), path[0]), *path[1:]): line for path, line in keys.lines.items()}
    return replace(keys, data=data, lines=lines)


def key_paths(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every key of nested mappings as a dotted path with its value, those above before those below."""
    for key, value in data.items():
        path = f"{prefix}{key}"
        yield path, value
        if isinstance(value, Mapping):
            yield from key_paths(value, f"{path}.")
