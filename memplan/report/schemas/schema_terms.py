"""What JSON Schemas are put together from: sizes, texts, objects, and values of ours by their annotations."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import fields
from fractions import Fraction
from typing import Any

Schema = dict[str, Any]

BYTES: Schema = {"type": "integer", "minimum": 0}
TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "number"}
INTEGER: Schema = {"type": "integer"}
COUNT: Schema = {"type": "integer", "minimum": 1}
FLAG: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}
TEXT_OR_NULL: Schema = {"type": ["string", "null"]}
NUMBER_OR_NULL: Schema = {"type": ["number", "null"]}
BYTES_OR_NULL: Schema = {"type": ["integer", "null"], "minimum": 0}
STACK: Schema = {
    "type": "object",
    "required": ["name", "version"],
    "properties": {"name": TEXT, "version": TEXT},
}
VERDICT: Schema = {"enum": ["fits", "tight", "no"]}

PLAIN: Mapping[Any, Schema] = {str: TEXT, int: BYTES, bool: FLAG, float: NUMBER, Fraction: NUMBER}
"""Annotation -> schema; whole numbers are bytes and counts, never negative."""


def object_schema(required: Schema, optional: Schema | None = None) -> Schema:
    """Return an object's schema; keys are only ever added, so others are allowed."""
    return {"type": "object", "required": list(required), "properties": {**required, **(optional or {})}}


def array_schema(items: Schema) -> Schema:
    """Return the schema of a list."""
    return {"type": "array", "items": items}


def same(schema: Schema, *names: str) -> Schema:
    """Return keys that have one schema."""
    return dict.fromkeys(names, schema)


def choice(names: Iterable[Any]) -> Schema:
    """Return the schema of one of several texts or numbers."""
    return {"enum": list(names)}


def or_null(schema: Schema) -> Schema:
    """Return a schema that null follows as well."""
    return {**schema, "type": [schema["type"], "null"]}


def value_schema(cls: type, leave_out: Iterable[str] = (), **replaced: Schema) -> Schema:
    """Return the schema of a frozen value as JSON has it, by its annotations.

    Args:
        leave_out: Fields that JSON does not have, or that readers cannot rely on.
        replaced: Fields that JSON has in another form.
    """
    hints = typing.get_type_hints(cls)
    names = [item.name for item in fields(cls) if item.name not in leave_out]
    return object_schema({name: replaced.get(name) or _hint_schema(hints[name]) for name in names})


def _hint_schema(hint: Any) -> Schema:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in PLAIN:
        return PLAIN[hint]
    if origin is typing.Literal:
        return choice(arguments)
    if origin is types.UnionType and type(None) in arguments:
        return or_null(_hint_schema(arguments[0]))
    if origin in (dict, Mapping):
        return OBJECT
    if origin is tuple:
        return array_schema(_hint_schema(arguments[0]))
    raise AssertionError(f"no JSON Schema for {hint}")
