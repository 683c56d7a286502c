"""JSON Schemas of answers and of data files."""

from __future__ import annotations

from typing import Any

from memplan.budget.baseline import BaselineFile
from memplan.budget.budget_schema import Budget
from memplan.catalog.entries import Gpu, GradientDtype, ModelEntry, Optimizer, StorageFormat
from memplan.catalog.training_config import TrainingConfig
from memplan.documents.schemas import json_schema
from memplan.published.table_schema import PublishedFile

BYTES = {"type": "integer", "minimum": 0}
TEXT = {"type": "string"}
LEARNING = {
    "enum": ["proven", "works", "experimental", "untried", "diverges"],
    "description": "How training learns with these formats, dtypes and optimizers, as the evidence says; not whether it fits.",
}
DRAFT = "https://json-schema.org/draft/2020-12/schema"

FILES: dict[str, type] = {
    "training": TrainingConfig,
    "budget": Budget,
    "baseline": BaselineFile,
    "gpu": Gpu,
    "format": StorageFormat,
    "gradient": GradientDtype,
    "optimizer": Optimizer,
    "model": ModelEntry,
    "published": PublishedFile,
}


def _object(required: dict[str, Any], optional: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return an object's schema; keys are only ever added, so others are allowed."""
    return {"type": "object", "required": list(required), "properties": {**required, **(optional or {})}}


def _array(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


object_schema, array_schema = _object, _array


def plan_schema() -> dict[str, Any]:
    """Return the schema of one plan."""
    component = _object(
        {
            "name": TEXT,
            "bytes": BYTES,
            "formula": TEXT,
            "values": {"type": "object"},
            "source": TEXT,
            "kind": {"enum": ["exact", "derived", "stated", "measured"]},
        }
    )
    peak = _object(
        {
            "instant": TEXT,
            "requested_bytes": BYTES,
            "allocated_bytes": BYTES,
            "reserved_bytes": BYTES,
            "device_bytes": BYTES,
            "upper_bytes": BYTES,
        }
    )
    per_parameter = {
        name: {"type": "number"} for name in ("weights", "master_weights", "gradients", "optimizer_states", "total")
    }
    suggestion = _object(
        {"change": TEXT, "saves_bytes": {"type": "integer"}, "flips_verdict": {"type": "boolean"}, "cost": TEXT}
    )
    return _object(
        {
            "schema": {"const": "memplan/plan/1"},
            "memplan_version": TEXT,
            "catalog_hash": TEXT,
            "config": TEXT,
            "verdict": {"enum": ["fits", "tight", "no"]},
            "answer": TEXT,
            "model": _object(
                {"name": TEXT, "parameters": BYTES, "active_parameters": BYTES, "architecture": TEXT, "source": TEXT}
            ),
            "gpu": _object(
                {"name": TEXT, "count": {"type": "integer", "minimum": 1}, "memory_bytes": BYTES, "usable_bytes": BYTES}
            ),
            "training": {"type": "object"},
            "bytes_per_parameter": _object(per_parameter),
            "components": _array(component),
            "instants": _array(_object({"name": TEXT, "requested_bytes": BYTES})),
            "peak": peak,
            "persistent_bytes": BYTES,
            "host": _object({"bytes": BYTES}),
            "suggestions": _array(suggestion),
            "assumptions": _array(TEXT),
            "not_modelled": _array(TEXT),
        }
    )


def check_schema() -> dict[str, Any]:
    """Return the schema of the answer of ``memplan check``."""
    finding = _object(
        {"rule": {"enum": ["limit", "component", "increase", "cannot-evaluate"]}, "message": TEXT},
        {"component": TEXT, "bytes": BYTES, "limit_bytes": BYTES, "over_bytes": BYTES},
    )
    sizes = dict.fromkeys(("device_bytes", "upper_bytes", "usable_bytes", "limit_bytes"), BYTES)
    figures = {
        "verdict": {"enum": ["fits", "tight", "no"]},
        **sizes,
        "headroom_bytes": {"type": "integer"},
        "asked": TEXT,
        "inputs": TEXT,
        "components": {"type": "object", "additionalProperties": BYTES},
        "baseline": _object({"device_bytes": BYTES, "upper_bytes": BYTES}),
    }
    texts = dict.fromkeys(("name", "gpu", "model", "config", "file"), TEXT)
    words = {
        "status": {"enum": ["over", "cannot", "warn", "within"]},
        "level": {"enum": ["error", "warn"]},
        "basis": {"enum": ["expected", "upper"]},
        "line": {"type": "integer", "minimum": 1},
        "findings": _array(finding),
    }
    return _object(
        {
            "schema": {"const": "memplan/check/1"},
            "memplan_version": TEXT,
            "catalog_hash": TEXT,
            "budget": TEXT,
            "verdict": {"enum": ["within", "over", "cannot"]},
            "exit_code": {"enum": [0, 1, 3]},
            "answer": TEXT,
            "counts": _object(dict.fromkeys(("checked", "over", "cannot", "warn", "within"), BYTES)),
            "rows": _array(_object({**texts, **words}, figures)),
        }
    )


def diff_schema() -> dict[str, Any]:
    """Return the schema of the answer of ``memplan diff``."""
    origin = _object({"memplan_version": TEXT, "catalog_hash": TEXT})
    side = _object({"model": TEXT, "config": TEXT, "device_bytes": BYTES, "upper_bytes": BYTES})
    row = _object(
        {
            "name": TEXT,
            "gpu": TEXT,
            "cause": {"enum": ["added", "removed", "config", "memplan", "config and memplan", "none"]},
            "moved_bytes": {"type": "integer"},
            "components": {"type": "object", "additionalProperties": {"type": "integer"}},
        },
        {"before": side, "after": side},
    )
    const = {"const": "memplan/diff/1"}
    return _object({"schema": const, "base": origin, "head": origin, "answer": TEXT, "rows": _array(row)})


def evidence_schema() -> dict[str, Any]:
    """Return the schema of a record of training, such as a config names as its evidence."""
    number = {"type": "number"}
    interval = {**_object(dict.fromkeys(("mean", "low", "high"), number)), "type": ["object", "null"]}
    maybe = {"type": ["number", "null"]}
    point = {"type": "array", "prefixItems": [BYTES, maybe], "minItems": 2, "maxItems": 2}
    losses = {"validation_loss": maybe, "first_validation_loss": maybe}
    counts = {"seed": {"type": "integer"}, "steps": BYTES, "tokens": BYTES, "tokens_per_second": BYTES}
    size = _object({"predicted_bytes": BYTES, "measured_bytes": BYTES})
    words = ("date", "machine", "torch", "command", "limits")
    return _object(
        {
            "schema": {"const": "memplan/evidence/1"},
            "config": TEXT,
            "settings": _array(TEXT),
            "verdict": {"enum": ["learns", "level", "indistinct", "close", "behind", "far behind", "diverges"]},
            "validation_loss": interval,
            "gap_percent": interval,
            "baseline": {"type": ["object", "null"]},
            "model": _object({"architecture": TEXT, "parameters": BYTES}),
            "training": _object({"steps": BYTES, "lr": number, "adamw_lr": number, "rounding": TEXT}),
            "text": _object({"source": TEXT, "sha256": TEXT}),
            "bytes": {"type": "object", "additionalProperties": size},
            "runs": {**_array(_object({**counts, **losses, "curve": _array(point)})), "minItems": 1},
            **dict.fromkeys(words, TEXT),
        }
    )


def literature_schema() -> dict[str, Any]:
    """Return the schema of what others have published of a method, such as a status may rest on."""
    claim = _object(dict.fromkeys(("claim", "where", "url"), TEXT))
    words = ("title", "verdict", "checked", "limits")
    claims = {**_array(claim), "minItems": 1}
    return _object({"schema": {"const": "memplan/literature/1"}, "claims": claims, **dict.fromkeys(words, TEXT)})


def experiment_schema() -> dict[str, Any]:
    """Return the schema of a record of ``memplan lab``: what was measured over several seeds, and what follows."""
    number = {"type": "number"}
    keys = {**dict.fromkeys(("mean", "low", "high"), number), "values": {**_array(number), "minItems": 1}}
    numbers = {"type": "object", "additionalProperties": number, "not": {"required": ["mean"]}}
    plain = {"type": ["string", "integer", "number", "boolean", "array", "null"]}
    value = {"anyOf": [_object(keys), numbers, plain]}
    row = {"type": "object", "minProperties": 2, "additionalProperties": value}
    words = ("experiment", "machine", "torch", "command", "limits")
    return _object(
        {
            "schema": {"const": "memplan/experiment/1"},
            "settings": {"type": "object"},
            "seeds": _array({"type": "integer"}),
            "rows": {**_array(row), "minItems": 1},
            "findings": {**_array({**TEXT, "minLength": 1}), "minItems": 1},
            "date": {**TEXT, "pattern": r"^\d{4}-\d\d-\d\d$"},
            **{word: {**TEXT, "minLength": 1} for word in words},
        },
        {"computed": _array({"type": "object"})},
    )


def validation_schema() -> dict[str, Any]:
    """Return the schema of ``memplan validate``: predicted, traced and measured side by side."""
    maybe = {"type": ["integer", "null"], "minimum": 0}
    row = _object(
        {
            "component": TEXT,
            "predicted_bytes": maybe,
            "traced_bytes": maybe,
            "measured_bytes": BYTES,
            "compared": {"enum": ["predicted", "traced"]},
            "difference_bytes": {"type": "integer"},
            "tolerance_bytes": BYTES,
            "agrees": {"type": "boolean"},
            "reason": TEXT,
        }
    )
    return _object(
        {
            "schema": {"const": "memplan/validation/1"},
            "memplan_version": TEXT,
            "model": TEXT,
            "config": TEXT,
            "device": TEXT,
            "torch_version": TEXT,
            "driver_version": TEXT,
            "status": {"enum": ["measured", "out of memory", "killed", "hung", "failed"]},
            "reason": TEXT,
            "rows": _array(row),
            "agrees": {"type": "boolean"},
        }
    )


def largest_row() -> dict[str, Any]:
    """Return the schema of a row of ``memplan max --for``: a value that fits, and what one more would need."""
    size = {"type": ["integer", "null"], "minimum": 0}
    return _object(
        {
            "gpu": TEXT,
            "count": BYTES,
            "usable_bytes": BYTES,
            "value": BYTES,
            "tight_value": BYTES,
            "bounded": {"type": "boolean"},
            "device_bytes": size,
            "upper_bytes": size,
            "next_upper_bytes": size,
        }
    )


def suggested_schema() -> dict[str, Any]:
    """Return the schema of a row of ``memplan suggest``: a plan, and what the search says of it."""
    estimate = {"step_seconds": {"type": "number"}, "tokens_per_second": {"type": "number"}, "rates_of": TEXT}
    plan = plan_schema()
    own = {"parts_status": LEARNING, "quality_risk": BYTES, "gives_up": TEXT, "estimate": _object(estimate)}
    return {**plan, "required": [*plan["required"], *own], "properties": {**plan["properties"], **own}}


def recommend_row() -> dict[str, Any]:
    """Return the schema of a row of ``memplan recommend``."""
    words = dict.fromkeys(("config", "status", "model"), TEXT)
    choice = {
        **_object({**words, "evidence": {"type": ["string", "null"]}, "parameters": BYTES}),
        "type": ["object", "null"],
    }
    return _object(
        {
            "gpu": TEXT,
            "count": BYTES,
            "usable_bytes": BYTES,
            "established": choice,
            "experimental": choice,
            "newton_schulz": TEXT,
            "faster_on_paper": {"type": "object", "additionalProperties": {"type": "number"}},
            "measured": {"type": "boolean"},
            "timed_by": TEXT,
        }
    )


def frontier_row() -> dict[str, Any]:
    """Return the schema of a cell of ``memplan frontier``."""
    sizes = dict.fromkeys(("requested_bytes", "device_bytes", "upper_bytes"), BYTES)
    verdict = {"enum": ["fits", "tight", "no"]}
    return _object({"micro_batch_size": BYTES, "sequence_length": BYTES, "verdict": verdict, **sizes})


def schema_of(name: str) -> dict[str, Any]:
    """Return the JSON Schema of an answer or a data file."""
    if name in FILES:
        return {"$schema": DRAFT, **json_schema(FILES[name])}
    if name == "tables":
        from memplan.report.table_schemas import tables_schema

        return {"$schema": DRAFT, **tables_schema()}
    answers = {"plan": plan_schema, "check": check_schema, "diff": diff_schema, "evidence": evidence_schema}
    answers |= {"validation": validation_schema, "literature": literature_schema, "experiment": experiment_schema}
    if name in answers:
        return {"$schema": DRAFT, **answers[name]()}
    rows = {
        "fit": plan_schema(),
        "compare": plan_schema(),
        "suggest": suggested_schema(),
        "frontier": frontier_row(),
        "largest": largest_row(),
        "max": _object(
            {
                "gpu": TEXT,
                "count": BYTES,
                "config": TEXT,
                "bytes_per_parameter": {"type": "number"},
                "max_parameters": BYTES,
                "largest_fitting_model": {"type": ["string", "null"]},
                "largest_fitting_parameters": BYTES,
            },
            {"notes_max_parameters": BYTES, "accounting": TEXT},
        ),
        "where": _object(
            {
                "gpu": TEXT,
                "count": BYTES,
                "pooled": {"type": "boolean"},
                "usable_bytes": BYTES,
                "device_bytes": BYTES,
                "upper_bytes": BYTES,
                "verdict": TEXT,
            },
            {"accounting": TEXT},
        ),
        "recommend": recommend_row(),
        "list": _object({"name": TEXT}),
    }
    return {"$schema": DRAFT, **_object({"schema": {"const": f"memplan/{name}/1"}, "rows": _array(rows[name])})}
