"""The JSON Schemas of records: of training, of experiments, of what others published, and of validations."""

from __future__ import annotations

from memplan.published.judged_tables import STATUSES, JudgedCell, ShapeFigures
from memplan.report.schemas import schema_terms as t

TRAINING_VERDICTS = ("learns", "level", "indistinct", "close", "behind", "far behind", "diverges")
OUTCOMES = ("measured", "out of memory", "killed", "hung", "failed")


def evidence_schema() -> t.Schema:
    """Return the schema of a record of training, such as a config names as its evidence."""
    interval = t.or_null(t.object_schema(t.same(t.NUMBER, "mean", "low", "high")))
    size = t.object_schema(t.same(t.BYTES, "predicted_bytes", "measured_bytes"))
    return t.object_schema(
        {
            "schema": {"const": "memplan/evidence/1"},
            "config": t.TEXT,
            "settings": t.array_schema(t.TEXT),
            "verdict": t.choice(TRAINING_VERDICTS),
            **t.same(interval, "validation_loss", "gap_percent"),
            "baseline": t.or_null(t.OBJECT),
            "model": t.object_schema({"architecture": t.TEXT, "parameters": t.BYTES}),
            "training": t.object_schema({"steps": t.BYTES, **t.same(t.NUMBER, "lr", "adamw_lr"), "rounding": t.TEXT}),
            "text": t.object_schema(t.same(t.TEXT, "source", "sha256")),
            "bytes": {"type": "object", "additionalProperties": size},
            "runs": {**t.array_schema(_run()), "minItems": 1},
            **t.same(t.TEXT, "date", "machine", "torch", "command", "limits"),
        },
        {"memory": _memory_limit()},
    )


def _memory_limit() -> t.Schema:
    """Return the schema of a run's memory, where the run was held to so much of a GPU."""
    total = t.object_schema({"predicted_bytes": t.BYTES, "measured_bytes": t.BYTES_OR_NULL})
    sizes = t.same(t.BYTES, "capacity_bytes", "expected_bytes", "upper_bytes")
    return t.object_schema({**sizes, "verdict": t.TEXT, **t.same(total, "requested", "reserved")})


def _run() -> t.Schema:
    """Return the schema of one seed's run."""
    point = {"type": "array", "prefixItems": [t.BYTES, t.NUMBER_OR_NULL], "minItems": 2, "maxItems": 2}
    counts = {"seed": t.INTEGER, **t.same(t.BYTES, "steps", "tokens", "tokens_per_second")}
    losses = t.same(t.NUMBER_OR_NULL, "validation_loss", "first_validation_loss")
    return t.object_schema({**counts, **losses, "curve": t.array_schema(point)})


def literature_schema() -> t.Schema:
    """Return the schema of what others have published of a method, such as a status may rest on."""
    claims = {**t.array_schema(t.object_schema(t.same(t.TEXT, "claim", "where", "url"))), "minItems": 1}
    words = t.same(t.TEXT, "title", "verdict", "checked", "limits")
    return t.object_schema({"schema": {"const": "memplan/literature/1"}, "claims": claims, **words})


def experiment_schema() -> t.Schema:
    """Return the schema of a record of ``memplan lab``: what was measured over several seeds, and what follows."""
    keys = {**t.same(t.NUMBER, "mean", "low", "high"), "values": {**t.array_schema(t.NUMBER), "minItems": 1}}
    numbers = {"type": "object", "additionalProperties": t.NUMBER, "not": {"required": ["mean"]}}
    plain = {"type": ["string", "integer", "number", "boolean", "array", "null"]}
    value = {"anyOf": [t.object_schema(keys), numbers, plain]}
    row = {"type": "object", "minProperties": 2, "additionalProperties": value}
    filled = {**t.TEXT, "minLength": 1}
    return t.object_schema(
        {
            "schema": {"const": "memplan/experiment/1"},
            "settings": t.OBJECT,
            "seeds": t.array_schema(t.INTEGER),
            "rows": {**t.array_schema(row), "minItems": 1},
            "findings": {**t.array_schema(filled), "minItems": 1},
            "date": {**t.TEXT, "pattern": r"^\d{4}-\d\d-\d\d$"},
            **t.same(filled, "experiment", "machine", "torch", "command", "limits"),
        },
        {"computed": t.array_schema(t.OBJECT)},
    )


def validation_schema() -> t.Schema:
    """Return the schema of ``memplan validate``: predicted, traced and measured side by side."""
    row = t.object_schema(
        {
            "component": t.TEXT,
            **t.same(t.BYTES_OR_NULL, "predicted_bytes", "traced_bytes"),
            "measured_bytes": t.BYTES,
            "compared": t.choice(("predicted", "traced")),
            "difference_bytes": t.INTEGER,
            "tolerance_bytes": t.BYTES,
            "agrees": t.FLAG,
            "reason": t.TEXT,
        }
    )
    return t.object_schema(
        {
            "schema": {"const": "memplan/validation/1"},
            **t.same(t.TEXT, "memplan_version", "model", "config", "device", "torch_version", "driver_version"),
            "status": t.choice(OUTCOMES),
            "reason": t.TEXT,
            "rows": t.array_schema(row),
            "agrees": t.FLAG,
        }
    )


def tables_schema() -> t.Schema:
    """Return the schema of the notes' tables: every cell as printed, recomputed and corrected."""
    counts = t.object_schema(t.same(t.BYTES, "tables", "cells", *STATUSES, "wrong"))
    table = t.object_schema(
        {
            "id": {**t.TEXT, "pattern": r"^s\d{3}\.t\d{2}$"},
            **t.same(t.TEXT, "title", "section", "document", "source"),
            **t.same(t.TEXT_OR_NULL, "rule", "reason", "unit"),
            "notes": t.array_schema(t.TEXT),
            "counts": counts,
            "cells": t.array_schema(t.value_schema(JudgedCell)),
        }
    )
    names = {"type": "object", "additionalProperties": t.TEXT}
    return t.object_schema(
        {
            "schema": {"const": "memplan/tables/1"},
            "tables": t.array_schema(table),
            "counts": counts,
            **t.same(names, "statuses", "rules"),
            "statements": t.array_schema(t.TEXT),
            "shapes": t.array_schema(_shape()),
        }
    )


def _shape() -> t.Schema:
    return t.value_schema(ShapeFigures, leave_out=("document",))
