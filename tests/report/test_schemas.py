"""JSON Schemas are derived from the values that JSON shows, and every answer's schema is one itself."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Literal, get_args

import jsonschema
import pytest

from memplan.cli.schema_and_doctor import SchemaName
from memplan.plan.components import Component
from memplan.report.json_schemas import TERMS, annotated_schema, names, schema_of
from tests.jobs import follow_schema


@dataclass(frozen=True)
class Shown:
    document: str
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
    schema = annotated_schema(Shown)
    assert schema["required"] == ["size", "ratio", "kind", "reason", "parts", "values"]
    assert schema["properties"]["size"] == TERMS["bytes"]
    assert schema["properties"]["kind"] == {"enum": ["a", "b"]}
    assert schema["properties"]["reason"] == {"type": ["string", "null"]}
    assert schema["properties"]["parts"] == {"type": "array", "items": TERMS["bytes"]}


def test_an_annotation_that_json_does_not_have_is_no_schema():
    with pytest.raises(AssertionError, match="complex"):
        annotated_schema(Odd)


def test_a_component_follows_its_schema():
    line = Component("logits", 4, "4 b*t", {"b": 1}, "a source", "derived")
    follow_schema(asdict(line), annotated_schema(Component))
    with pytest.raises(jsonschema.ValidationError):
        follow_schema(asdict(line) | {"kind": "guessed"}, annotated_schema(Component))


def test_every_schema_can_be_asked_for():
    assert {*names()} == {*get_args(SchemaName)} | {"ui"}


@pytest.mark.parametrize("name", names())
def test_every_schema_is_one(name):
    jsonschema.Draft202012Validator.check_schema(schema_of(name))
