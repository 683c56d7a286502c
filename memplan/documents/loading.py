"""Outside text to plain values, with the line of every key, whatever the text is."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from memplan.documents.frozen_values import dataclass
from memplan.documents.opening import read_text, shown_path
from memplan.errors import InvalidFileError, printable, shown_value

MAXIMUM_NODES = 200_000
MAXIMUM_DEPTH = 60
SAFE_OPENINGS = 5_000
"""Fewer brackets and dashes than this cannot nest so deeply that libyaml's recursion overflows the stack."""
SAFE_LENGTH = 100_000
"""Fewer characters than this cannot hold more values than fit into a hundred megabytes."""
MAXIMUM_DIGITS = 40
"""No size or count has more."""

Key = str | int
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Document:
    """Parsed YAML or JSON: plain values, and the line of every key."""

    name: str  # How messages call the file
    data: Any  # dict, list, str, int, float, bool or None
    # Path of keys -> line number, counted from 1; 0 of the whole where others have none
    lines: Mapping[tuple[Key, ...], int]
    problems: tuple[str, ...] = ()  # Duplicate keys and the like; :func:`validate` reports them with its own
    # Paths of keys whose values were set on the command line instead.
    settings: frozenset[tuple[Key, ...]] = frozenset()

    def where(self, path: Sequence[Key]) -> str:
        """Return ``file:line: a.b.c`` for a path of keys, at the nearest line where lines are known."""
        dotted = dotted_keys(path)
        if self._is_set(tuple(path)):
            return f"--set {dotted}"
        known = tuple(path)
        while known and known not in self.lines:
            known = known[:-1]
        line = self.lines.get(known, 1)
        place = f"{self.name}:{line}" if line and (self.lines or not dotted) else self.name
        return f"{place}: {dotted}" if dotted else place

    def _is_set(self, path: tuple[Key, ...]) -> bool:
        """Tell whether what stands at a path came, whole or as the only part of it, from the command line."""
        above = any(path[:end] in self.settings for end in range(1, len(path) + 1))
        return above or (path not in self.lines and any(path == key[: len(path)] for key in self.settings if path))


def dotted_keys(path: Iterable[Key]) -> str:
    """Return ``a.b.c`` for a path of keys, each fit to print."""
    return ".".join(printable(str(part)) for part in path)


def load_document(path: Path) -> Document:
    """Return the parsed YAML or JSON file at ``path``."""
    return parse_document(read_text(path), shown_path(path))


def parse_document(text: str, name: str, *, last_counts: bool = False) -> Document:
    """Return parsed YAML (of which JSON is a part), noting duplicate keys, refusing alias bombs.

    Of a key that is given twice the first value counts, or with ``last_counts`` the last, as stock loaders have it.

    Numbers that are none (NaN, infinity, 10,000 digits) stay text, which strict types refuse.

    Raises:
        InvalidFileError: Not YAML, or nested or expanded beyond the limits.
    """
    import yaml

    language = "JSON" if name.endswith(".json") else "YAML"
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        text.encode()
        _refuse_bombs(text, loader, name)
        node = yaml.compose(text, loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise InvalidFileError([f"{name}:{line}: not valid {language}: {error.problem or error.context}"]) from None
    except yaml.YAMLError as error:
        raise InvalidFileError([f"{name}:1: not valid {language}: {str(error).splitlines()[0]}"]) from None
    except UnicodeEncodeError:
        raise InvalidFileError([f"{name}:1: not UTF-8 text"]) from None
    except RecursionError:
        raise InvalidFileError([f"{name}:1: nested too deeply"]) from None
    reader = _NodeReader(name, last_counts)
    data = None if node is None else reader.value(node, (), 0)
    return Document(name, data, reader.lines, tuple(reader.problems))


def setting_text(value: object) -> str:
    """Return a value as ``--set`` reads it.

    Raises:
        InvalidFileError: It is none that JSON can hold.

    Example:
        >>> setting_text("fused"), setting_text(True), setting_text([1, 2])
        ('fused', 'true', '[1, 2]')
    """
    return value if isinstance(value, str) else written_json(value, "set")


def written_json(value: object, name: str) -> str:
    """Return a program's value as JSON.

    Raises:
        InvalidFileError: It is none that JSON can hold, or holds itself.
    """
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        expected = "text, numbers, true, false, None, and lists or keys and values of these"
        raise InvalidFileError([f"{name}: expected {expected}, got {shown_value(value)}"]) from None


def _refuse_bombs(text: str, loader: Any, name: str) -> None:
    """Refuse text whose nesting would crash the composer in C, which recurses without a limit, or fill the memory.

    Indented lines cannot do it: within the largest file they nest a few thousand levels.
    """
    import yaml

    openings = sum(text.count(opening) for opening in ("[", "{", "- ", "-\t", "? ", "?\t"))
    if openings < SAFE_OPENINGS and len(text) < SAFE_LENGTH:
        return
    depth = nodes = 0
    for event in yaml.parse(text, loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        nodes += isinstance(event, yaml.NodeEvent)
        if depth > MAXIMUM_DEPTH + 1 or nodes > MAXIMUM_NODES:
            raise _too_much(name, event.start_mark)


def _too_much(name: str, mark: Any) -> InvalidFileError:
    line = mark.line + 1 if mark else 1
    return InvalidFileError([f"{name}:{line}: too many or too deeply nested values for a file of this kind"])


class _NodeReader:
    """Turns YAML nodes into plain values, counting them and noting where each key stands."""

    def __init__(self, name: str, last_counts: bool) -> None:
        self.name = name
        self.last_counts = last_counts
        self.lines: dict[tuple[Key, ...], int] = {}
        self.problems: list[str] = []
        self.nodes = 0

    def value(self, node: Any, path: tuple[Key, ...], depth: int) -> Any:
        self.nodes += 1
        if self.nodes > MAXIMUM_NODES or depth > MAXIMUM_DEPTH:
            raise _too_much(self.name, node.start_mark)
        if node.id == "scalar":
            return _scalar(node)
        if node.id == "sequence":
            items = []
            for index, item in enumerate(node.value):
                self.lines[(*path, index)] = item.start_mark.line + 1
                items.append(self.value(item, (*path, index), depth + 1))
            return items
        return self.mapping(node, path, depth)

    def mapping(self, node: Any, path: tuple[Key, ...], depth: int) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if key_node.id != "scalar":
                self.problems.append(f"{self.name}:{line}: keys must be plain text")
                continue
            key = key_node.value
            here = (*path, key)
            if key in result:
                self.problems.append(
                    f"{self.name}:{line}: {dotted_keys(here)}: duplicate key, first given on line {self.lines[here]}"
                )
                if not self.last_counts:
                    continue
            self.lines[here] = line
            result[key] = self.value(value_node, here, depth + 1)
        return result


def _scalar(node: Any) -> Any:
    convert = _SCALARS.get(node.tag)
    if convert is None:
        return node.value
    try:
        return convert(node.value)
    except (ValueError, OverflowError):
        return node.value


def _integer(text: str) -> int:
    """Return a YAML 1.1 integer: underscores and base prefixes, but no base 60."""
    digits = text.replace("_", "")
    if len(digits) > MAXIMUM_DIGITS:
        raise ValueError(text)
    negative = digits.startswith("-")
    digits = digits.lstrip("+-")
    if digits[:1] == "0" and digits[1:].isdigit():
        value = int(digits, 8)
    else:
        value = int(digits, 0)
    return -value if negative else value


def _float(text: str) -> float:
    value = float(text.replace("_", "").lower().replace(".inf", "inf").replace(".nan", "nan"))
    if not math.isfinite(value):
        raise ValueError(text)
    return value


_SCALARS: dict[str, Callable[[str], Any]] = {
    "tag:yaml.org,2002:int": _integer,
    "tag:yaml.org,2002:float": _float,
    "tag:yaml.org,2002:bool": lambda text: text.lower() in ("true", "yes", "on"),
    "tag:yaml.org,2002:null": lambda _: None,
}
