"""JSON Schemas of answers and of data files, by name: ``configs/schemas.yaml`` has those of answers, classes those of files."""

import types
import typing
from collections.abc import Mapping
from dataclasses import fields
from fractions import Fraction
from functools import cache
from typing import Any

from memplan.budget import baseline, budget_jobs, evaluation
from memplan.catalog.catalog import data_directory
from memplan.catalog.entries import Gpu, GradientDtype, ModelEntry, Optimizer, StorageFormat
from memplan.catalog.stacks import Stack
from memplan.catalog.training_config import TrainingConfig
from memplan.documents.loading import load_document
from memplan.documents.schemas import json_schema
from memplan.failure import out_of_memory_message
from memplan.plan.bytes_per_parameter import BytesPerParameter
from memplan.plan.components import Component
from memplan.published.judged_tables import JudgedCell, ShapeFigures
from memplan.published.table_schema import PublishedFile

Schema = dict[str, Any]

DRAFT = "https://json-schema.org/draft/2020-12/schema"

FILES: Mapping[str, type] = {
    "training": TrainingConfig,
    "budget": budget_jobs.Budget,
    "baseline": baseline.BaselineFile,
    "gpu": Gpu,
    "format": StorageFormat,
    "gradient": GradientDtype,
    "optimizer": Optimizer,
    "model": ModelEntry,
    "stack": Stack,
    "published": PublishedFile,
}
VALUES: Mapping[str, Any] = {
    "component": Component,
    "bytes-per-parameter": BytesPerParameter,
    "cell": JudgedCell,
    "shape": ShapeFigures,
    "rule": evaluation.Rule,
    "job-status": evaluation.Status,
    "level": budget_jobs.Level,
    "basis": budget_jobs.Basis,
    "moved-by": baseline.Cause,
    "failure-cause": out_of_memory_message.Cause,
    "failure-phase": out_of_memory_message.Phase,
}
"""Terms that answers have from the code: frozen values, and words."""

PLAIN: Mapping[Any, Schema] = {
    str: {"type": "string"},
    int: {"type": "integer", "minimum": 0},
    bool: {"type": "boolean"},
    float: {"type": "number"},
    Fraction: {"type": "number"},
}
"""Annotation -> schema; whole numbers are bytes and counts, never negative."""

HIDDEN = "document"
"""Field of values that JSON does not have."""

TERMS: Mapping[str, Schema] = {
    "text": PLAIN[str],
    "bytes": PLAIN[int],
    "flag": PLAIN[bool],
    "number": PLAIN[float],
    "integer": {"type": "integer"},
    "count": {"type": "integer", "minimum": 1},
    "object": {"type": "object"},
}


def schema_of(name: str) -> Schema:
    """Return the JSON Schema of an answer or a data file."""
    if name in FILES:
        return {"$schema": DRAFT, **json_schema(FILES[name])}
    if name in _answers()["answers"]:
        return {"$schema": DRAFT, **_schema(_answers()["answers"][name])}
    return {"$schema": DRAFT, **_schema({"schema": f"=memplan/{name}/1", "rows": [_answers()["rows"][name]]})}


def names() -> list[str]:
    """Return what has a schema."""
    return [*FILES, *_answers()["answers"], *_answers()["rows"]]


@cache
def _answers() -> Mapping[str, Mapping[str, Any]]:
    data: Mapping[str, Mapping[str, Any]] = load_document(data_directory() / "configs" / "schemas.yaml").data
    return data


def _schema(written: Any) -> Schema:
    """Return the schema that a part of ``configs/schemas.yaml`` stands for."""
    if isinstance(written, str):
        return _term(written)
    if isinstance(written, list):
        least = {"minItems": written[1]} if len(written) > 1 else {}
        return {"type": "array", "items": _schema(written[0]), **least}
    if not written.keys().isdisjoint(("type", "enum", "anyOf")):
        return dict(written)
    if "*" in written:
        return {"type": "object", "additionalProperties": _schema(written["*"])}
    base = _schema(written["+"]) if "+" in written else {"required": [], "properties": {}}
    keys = {key: _schema(value) for several, value in written.items() if several != "+" for key in several.split()}
    required = [key for key in keys if not key.endswith("?")]
    properties = {key.removesuffix("?"): schema for key, schema in keys.items()}
    return {
        "type": "object",
        "required": [*base["required"], *required],
        "properties": {**base["properties"], **properties},
    }


def _term(word: str) -> Schema:
    if word.startswith("="):
        return {"const": word[1:]}
    if "|" in word:
        return {"enum": word.split(" | ")}
    if word.endswith("?"):
        schema = _term(word[:-1])
        return {**schema, "type": [schema["type"], "null"]}
    if word in TERMS:
        return TERMS[word]
    if word in VALUES:
        return annotated_schema(VALUES[word])
    return _schema(_answers()["terms"][word])


def annotated_schema(hint: Any) -> Schema:
    """Return the schema of a frozen value as JSON has it, or of a field's annotation."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in PLAIN:
        return PLAIN[hint]
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin is types.UnionType and type(None) in arguments:
        schema = annotated_schema(arguments[0])
        return {**schema, "type": [schema["type"], "null"]}
    if origin in (dict, Mapping):
        return TERMS["object"]
    if origin is tuple:
        return {"type": "array", "items": annotated_schema(arguments[0])}
    if not isinstance(hint, type) or not hasattr(hint, "__dataclass_fields__"):
        raise AssertionError(f"no JSON Schema for {hint}")
    hints = typing.get_type_hints(hint)
    shown = [item.name for item in fields(hint) if item.name != HIDDEN]
    return {"type": "object", "required": shown, "properties": {name: annotated_schema(hints[name]) for name in shown}}
