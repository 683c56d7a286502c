"""Changes of single values in a file's text, at the marks of its parser: every other character stays."""

import json
import re
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from memplan.documents.frozen_values import dataclass
from memplan.documents.loading import parse_document
from memplan.errors import CannotAnswerError, MemplanError, printable

TOML = ".toml"
COMMANDS = "commands"
"""The one key of a file that lists commands, each as its words."""


@dataclass(frozen=True, slots=True)
class Edit:
    """A key of a file and the value that it is to have."""

    key: str
    value: str
    after: str  # The key whose next line an absent key is put on


def spliced(text: str, name: str, edit: Edit) -> str:
    """Return a YAML, JSON or TOML text, or a list of commands as JSON, with one value replaced, or one key put in.

    Keys below others are joined by dots. A new key is put behind the first one beside it.

    Raises:
        CannotAnswerError: The value is a reference, an anchor or no scalar, or the edit would change anything else.
    """
    if "\r\n" in text and text.count("\n") == text.count("\r\n"):
        return spliced(text.replace("\r\n", "\n"), name, edit).replace("\n", "\r\n")
    changed = (_toml_spliced if name.endswith(TOML) else _yaml_spliced)(text, name, edit)
    before, after = _parsed(text, name), _parsed(changed, name)
    commands = isinstance(before, dict) and list(before) == [COMMANDS]
    if after is None or (not commands and _without(before, edit.key) != _without(after, edit.key)):
        raise CannotAnswerError(f"{name}: {edit.key}: cannot be changed by itself; write {edit.key}: {edit.value}")
    return changed


def _parsed(text: str, name: str) -> Any:
    """Return what a text holds; None where it cannot be read."""
    text = text.replace("\t", " ") if name.endswith(".json") else text
    try:
        return tomllib.loads(text) if name.endswith(TOML) else parse_document(text, name, last_counts=True).data
    except (MemplanError, tomllib.TOMLDecodeError):
        return None


def _without(data: Any, key: str) -> Any:
    """Return keys and values without the one at a dotted path."""
    if not isinstance(data, dict):
        return data
    if key in data or "." not in key:
        return {name: value for name, value in data.items() if name != key}
    head, _, rest = key.partition(".")
    return {name: _without(value, rest) if name == head else value for name, value in data.items()}


def _absent(name: str, edit: Edit) -> CannotAnswerError:
    return CannotAnswerError(f"{name}: {edit.key}: not in this file; write {edit.key}: {edit.value} where it is")


def _yaml_spliced(text: str, name: str, edit: Edit) -> str:
    import yaml

    tabbed = text.replace("\t", " ") if name.endswith(".json") else text  # YAML takes no tabs between tokens
    try:
        node: Any = yaml.compose(tabbed, yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError):
        raise CannotAnswerError(f"{name}: cannot be changed; write {edit.key}: {edit.value}") from None
    pairs = _pairs(node)
    if list(pairs) == [COMMANDS]:
        return _words_spliced(text, name, edit, pairs[COMMANDS][1])
    above, key = "", edit.key
    while key not in pairs and "." in key and (head := key.partition(".")[0]) in pairs:
        node, above, key = pairs[head][1], f"{above}{head}.", key.partition(".")[2]
        pairs = _pairs(node)
    if key in pairs:
        return _replaced(text, name, edit, *pairs[key])
    if not pairs or "." in key or (not above and edit.after not in pairs):
        raise _absent(name, edit)
    beside = pairs[edit.after] if not above else next(iter(pairs.values()))
    return _inserted(text, replace(edit, key=key), node.flow_style, *beside)


def _pairs(node: Any) -> dict[str, tuple[Any, Any]]:
    if node is None or node.id != "mapping":
        return {}
    return {key.value: (key, value) for key, value in node.value if key.id == "scalar"}


def _toml_spliced(text: str, name: str, edit: Edit) -> str:
    """Return a TOML text with a value replaced, or a key put behind the first of its table."""
    written = toml_value(edit.value)
    places = list(toml_places(text))
    for place in places:
        if place.path == edit.key:
            return f"{text[: place.begin]}{written}{text[place.end :]}"
    table, _, key = edit.key.rpartition(".")
    beside = next((place for place in places if place.path.rpartition(".")[0] == table), None)
    if beside is None:
        raise _absent(name, edit)
    line = text.rfind("\n", 0, beside.begin) + 1
    indent = text[line : len(text) - len(text[line:].lstrip(" \t"))]
    return f"{text[: beside.line_end]}\n{indent}{key} = {written}{text[beside.line_end :]}"


def _words_spliced(text: str, name: str, edit: Edit, commands: Any) -> str:
    """Return commands with the value of a flag replaced, or a flag put behind the value of another."""
    for command in commands.value if commands.id == "sequence" else ():
        words = command.value if command.id == "sequence" else []
        if any(word.id != "scalar" for word in words):
            continue
        flags = {_flag(word.value): at for at, word in enumerate(words)}
        if edit.key in flags:
            return _flag_replaced(text, name, edit, words, flags[edit.key])
        if edit.after in flags:
            return _flag_inserted(text, edit, words, flags[edit.after])
    raise _absent(name, edit)


def _flag(word: str) -> str:
    return word[2:].partition("=")[0].replace("-", "_") if word.startswith("--") else ""


def _value_word(words: Any, at: int) -> Any:
    """Return the word that holds a flag's value, which may be the flag's own."""
    alone = "=" in words[at].value or at + 1 == len(words) or words[at + 1].value.startswith("--")
    return words[at] if alone else words[at + 1]


def _flag_replaced(text: str, name: str, edit: Edit, words: Any, at: int) -> str:
    value, (flag, equals, _) = _value_word(words, at), words[at].value.partition("=")
    own = value is words[at]
    if (own and not equals) or any(sign in value.value for sign in "$`"):
        place = f"{name}:{value.start_mark.line + 1}: {edit.key}"
        shown = printable(value.value, 40)
        raise CannotAnswerError(f"{place}: {shown!r} stands for something else; write {edit.value} there")
    written = _quoted(f"{flag}={edit.value}" if own else edit.value)
    return f"{text[: value.start_mark.index]}{written}{text[value.end_mark.index :]}"


def _flag_inserted(text: str, edit: Edit, words: Any, at: int) -> str:
    """Return a text with a flag and its value in words of their own, on lines of their own where the words before are."""
    before = _value_word(words, at)
    start, end = before.start_mark.index, before.end_mark.index
    line = text.rfind("\n", 0, start) + 1
    gap = " " if text[line:start].strip() else f"\n{text[line:start]}"
    more = "".join(f",{gap}{_quoted(word)}" for word in (f"--{edit.key}", edit.value))
    return f"{text[:end]}{more}{text[end:]}"


def _replaced(text: str, name: str, edit: Edit, key: Any, value: Any) -> str:
    start, end = value.start_mark.index, value.end_mark.index
    given = text[start:end]
    shared = start < key.end_mark.index or given.startswith(("&", "*", "!"))
    if value.id != "scalar" or shared or "${" in given:
        place = f"{name}:{key.start_mark.line + 1}: {edit.key}"
        raise CannotAnswerError(
            f"{place}: {printable(given, 40)!r} stands for something else; write {edit.value} there"
        )
    written = _quoted(edit.value) if given.startswith('"') and not _is_plain(edit.value) else edit.value
    gap = " " if start == key.end_mark.index + 1 and start == end else ""
    return f"{text[:start]}{gap}{written}{text[end:]}"


def _inserted(text: str, edit: Edit, flow: bool, key: Any, value: Any) -> str:
    """Return a text with a new key after another, as that one is indented."""
    indent = " " * key.start_mark.column
    if flow:
        end = value.end_mark.index
        written = edit.value if _is_plain(edit.value) else _quoted(edit.value)
        return f"{text[:end]},\n{indent}{_quoted(edit.key)}: {written}{text[end:]}"
    end = text.find("\n", value.end_mark.index)
    end = len(text) if end < 0 else end
    return f"{text[:end]}\n{indent}{edit.key}: {edit.value}{text[end:]}"


def toml_value(text: str) -> str:
    """Return a value as TOML writes it: numbers, true and false as they are, all else in quotes."""
    return text if _is_plain(text) or text in ("inf", "nan") else _quoted(text)


def _is_plain(value: str) -> bool:
    """Tell whether a value is written without quotes in JSON: a number, true or false."""
    try:
        return not isinstance(json.loads(value), str)
    except ValueError:
        return False


def _quoted(text: str) -> str:
    return json.dumps(text)


_TABLE = re.compile(r"\s*\[(?!\[)\s*([A-Za-z0-9_.\"' -]+?)\s*\]\s*(?:#.*)?$")
_ENTRY = re.compile(r"\s*([A-Za-z0-9_.\"'-]+)\s*=[ \t]*")
_SCALAR = re.compile(r"\"(?:[^\"\\\n]|\\.)*\"(?!\")|'[^'\n]*'(?!')|[^\s\"'\[{#][^\s#]*")


@dataclass(frozen=True, slots=True)
class TomlPlace:
    """A value that stands on one line."""

    path: str  # Its key with the tables above it, joined by dots
    begin: int  # Index of its first character
    end: int  # Index behind its last
    line_end: int  # Index of the end of its line


def toml_places(text: str) -> Iterator[TomlPlace]:
    """Yield the scalar values of a file in their order; of tables in arrays, and of values on several lines, none."""
    table: str | None = ""
    at = 0
    for line in text.splitlines(keepends=True):
        body = line.rstrip("\r\n")
        if body.lstrip().startswith("["):
            head = _TABLE.match(body)
            table = None if head is None else f"{_plain(head[1])}."
        elif table is not None and (entry := _ENTRY.match(body)) and (value := _SCALAR.match(body, entry.end())):
            yield TomlPlace(f"{table}{_plain(entry[1])}", at + value.start(), at + value.end(), at + len(body))
        at += len(line)


def _plain(path: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in path.split("."))
