"""JSON Schemas are derived from the values that JSON shows, and every answer's schema is one itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Literal

import jsonschema
import pytest

from memplan.cli.schema_and_doctor import SchemaName
from memplan.plan.components import Component
from memplan.report.json_schemas import ANSWERS, FILES, ROWS, schema_of
from memplan.report.schemas.schema_terms import BYTES, TEXT, value_schema


@dataclass(frozen=True)
class Shown:
    name: str
    size: int
    ratio: Fraction
    kind: Literal["a", "b"]
    reason: str | None
    parts: tuple[int, ...]
    values: Mapping[str, int]


@dataclass(frozen=True)
class Odd:
    whatever: complex


def test_a_value_is_described_by_its_annotations():
    schema = value_schema(Shown, leave_out=("name",))
    assert schema["required"] == ["size", "ratio", "kind", "reason", "parts", "values"]
    assert schema["properties"]["size"] == BYTES
    assert schema["properties"]["kind"] == {"enum": ["a", "b"]}
    assert schema["properties"]["reason"] == {"type": ["string", "null"]}
    assert schema["properties"]["parts"] == {"type": "array", "items": BYTES}
    assert value_schema(Shown, size=TEXT)["properties"]["size"] == TEXT


def test_an_annotation_that_json_does_not_have_is_no_schema():
    with pytest.raises(AssertionError, match="complex"):
        value_schema(Odd)


def test_a_component_follows_its_schema():
    line = Component("logits", 4, "4 b*t", {"b": 1}, "a source", "derived")
    jsonschema.validate(asdict(line), value_schema(Component))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(asdict(line) | {"kind": "guessed"}, value_schema(Component))


def test_every_schema_can_be_asked_for():
    assert {*FILES, *ANSWERS, *ROWS} == {*SchemaName} | {"ui"}


@pytest.mark.parametrize("name", [*FILES, *ANSWERS, *ROWS])
def test_every_schema_is_one(name):
    jsonschema.Draft202012Validator.check_schema(schema_of(name))
