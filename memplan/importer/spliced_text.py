"""Changes of single values in a file's text, at the marks of its parser: every other character stays."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from memplan.documents.loading import parse_document
from memplan.errors import CannotAnswerError, printable


@dataclass(frozen=True, slots=True)
class Edit:
    """A key of a file and the value that it is to have.

    Attributes:
        after: The key whose next line an absent key is put on.
    """

    key: str
    value: str
    after: str


def spliced(text: str, name: str, edit: Edit) -> str:
    """Return a YAML or JSON text with one value replaced, or one key put in.

    Raises:
        CannotAnswerError: The value is a reference, an anchor or no scalar, or the edit would change anything else.
    """
    import yaml

    root: Any = yaml.compose(text, yaml.SafeLoader)
    pairs = {key.value: (key, value) for key, value in root.value} if isinstance(root, yaml.MappingNode) else {}
    if edit.key in pairs:
        changed = _replaced(text, name, edit, *pairs[edit.key])
    elif edit.after in pairs:
        changed = _inserted(text, edit, root.flow_style, *pairs[edit.after])
    else:
        raise CannotAnswerError(f"{name}: {edit.key}: not in this file; write {edit.key}: {edit.value} where it is")
    before, after = (
        parse_document(text, name, last_counts=True).data,
        parse_document(changed, name, last_counts=True).data,
    )
    if {**before, edit.key: None} != {**after, edit.key: None}:
        raise CannotAnswerError(f"{name}: {edit.key}: cannot be changed by itself; write {edit.key}: {edit.value}")
    return changed


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


def _is_plain(value: str) -> bool:
    """Tell whether a value is written without quotes in JSON: a number, true or false."""
    try:
        return not isinstance(json.loads(value), str)
    except ValueError:
        return False


def _quoted(text: str) -> str:
    return json.dumps(text)
