"""The JSON Schemas of plans, and of the rows that searches and the like are made of."""

from __future__ import annotations

from typing import get_args

from memplan.failure.failure_causes import Cause
from memplan.failure.out_of_memory_message import Phase
from memplan.plan.bytes_per_parameter import BytesPerParameter
from memplan.plan.components import Component
from memplan.report.schemas import schema_terms as t

LEARNING: t.Schema = {
    "enum": ["proven", "works", "experimental", "untried", "diverges"],
    "description": "How training learns with these formats, dtypes and optimizers, as the evidence says; not whether it fits.",
}
TOTALS = ("requested_bytes", "allocated_bytes", "reserved_bytes", "device_bytes", "upper_bytes", "lower_bytes")
LEAST: t.Schema = {
    **t.BYTES,
    "description": "The least device total with which the run is known to survive on a nearly full card, by the simulated "
    "allocator, which then releases what it caches; the verdict rests on it. device_bytes is with memory to spare.",
}
BY_SHARE: t.Schema = {
    **t.TEXT,
    "description": "Why the allocator's reserve is a share of the allocated bytes and not simulated; empty where it is simulated.",
}


def plan_schema() -> t.Schema:
    """Return the schema of one plan."""
    per_parameter = t.value_schema(BytesPerParameter)
    return t.object_schema(
        {
            "schema": {"const": "memplan/plan/1"},
            **t.same(t.TEXT, "memplan_version", "catalog_hash", "config"),
            "stack": t.STACK,
            "verdict": t.VERDICT,
            "answer": t.TEXT,
            "model": _model(),
            "gpu": t.object_schema(
                {"name": t.TEXT, "count": t.COUNT, **t.same(t.BYTES, "memory_bytes", "usable_bytes")}
            ),
            "training": t.OBJECT,
            "bytes_per_parameter": t.object_schema({**per_parameter["properties"], "total": t.NUMBER}),
            "components": t.array_schema(t.value_schema(Component)),
            "instants": t.array_schema(t.object_schema({"name": t.TEXT, "requested_bytes": t.BYTES})),
            "peak": t.object_schema(
                {
                    "instant": t.TEXT,
                    **t.same(t.BYTES, *TOTALS),
                    "least_bytes": LEAST,
                    "reserve_by_share": BY_SHARE,
                }
            ),
            "persistent_bytes": t.BYTES,
            "host": _host(),
            "suggestions": t.array_schema(_suggestion()),
            "assumptions": t.array_schema(t.TEXT),
            "not_modelled": t.array_schema(t.TEXT),
        },
        {"ranks": t.array_schema(_rank())},
    )


def _host() -> t.Schema:
    """Return the schema of host memory: what a rank keeps there, and the ranks of a node where an engine keeps it there."""
    part = t.object_schema({"name": t.TEXT, "bytes": t.BYTES})
    sizes = t.same(t.BYTES, "pinned_bytes", "taken_bytes", "ranks_per_node", "node_bytes", "limit_bytes")
    return t.object_schema({"bytes": t.BYTES}, {**sizes, "components": t.array_schema(part)})


def _rank() -> t.Schema:
    """Return the schema of one rank of a pipeline, which a plan of one has."""
    numbers = {"stages": t.array_schema(t.BYTES), "layers": t.array_schema(t.BYTES)}
    sizes = t.same(t.BYTES, "rank", "pairs", "persistent_bytes", "requested_bytes", "device_bytes")
    return t.object_schema({**sizes, **numbers, **t.same(t.FLAG, "embedding", "head"), "instant": t.TEXT})


def _model() -> t.Schema:
    counts = t.same(t.BYTES, "parameters", "active_parameters")
    return t.object_schema({"name": t.TEXT, **counts, **t.same(t.TEXT, "architecture", "source")})


def inference_schema() -> t.Schema:
    """Return the schema of ``memplan fit --method inference``."""
    gpu = t.object_schema({"name": t.TEXT, "count": t.COUNT, **t.same(t.BYTES, "memory_bytes", "usable_bytes")})
    requested = t.object_schema(
        {**t.same(t.COUNT, "context", "concurrency"), **t.same(t.TEXT, "kv_dtype", "weights", "engine")}
    )
    figures = t.same(t.BYTES, "device_bytes", "upper_bytes", "largest_context", "largest_concurrency")
    return t.object_schema(
        {
            "schema": {"const": "memplan/inference/1"},
            **t.same(t.TEXT, "memplan_version", "catalog_hash", "answer"),
            "verdict": t.VERDICT,
            "model": _model(),
            "gpu": gpu,
            "inference": requested,
            "components": t.array_schema(t.object_schema({"name": t.TEXT, "bytes": t.BYTES})),
            **figures,
            "assumptions": t.array_schema(t.TEXT),
        }
    )


def grid_schema() -> t.Schema:
    """Return the schema of ``memplan fit`` for a model that is divided among GPUs."""
    component = t.array_schema(t.object_schema({"name": t.TEXT, "bytes": t.BYTES}))
    places = t.same(t.BYTES, "stage", "layers", "parameters_per_rank", "first_rank", "last_rank", "fullest_rank")
    stage = t.object_schema(
        {
            **places,
            **t.same(t.FLAG, "embedding", "head"),
            "components": component,
            **t.same(t.BYTES, "persistent_bytes", "least_persistent_bytes"),
            **t.same(t.BYTES_OR_NULL, "least_activation_bytes", "step_bytes", "most_step_bytes", "lasting_step_bytes"),
        }
    )
    degrees = ("tensor", "pipeline", "virtual", "context", "expert", "expert_tensor", "data", "replicate")
    return t.object_schema(
        {
            "schema": {"const": "memplan/grid/1"},
            **t.same(t.TEXT, "memplan_version", "catalog_hash", "answer", "stack"),
            "verdict": {"enum": ["fits", "tight", "no", "unknown"]},
            "model": _model(),
            "gpu": t.object_schema(
                {"name": t.TEXT, "count": t.COUNT, **t.same(t.BYTES, "memory_bytes", "usable_bytes")}
            ),
            "parallel": t.object_schema({**t.same(t.COUNT, *degrees), "zero_stage": t.BYTES, "sequence": t.FLAG}),
            "stages": t.array_schema(stage),
            "rank": t.object_schema({"number": t.BYTES, "components": component, "persistent_bytes": t.BYTES}),
            **t.same(t.BYTES, "fullest_rank", "persistent_bytes", "least_bytes", "most_communicator_bytes"),
            **t.same(t.BYTES_OR_NULL, "expected_bytes", "upper_bytes"),
            **t.same(t.array_schema(t.TEXT), "communicators", "assumptions", "not_modelled"),
        }
    )


def _suggestion() -> t.Schema:
    own = t.object_schema({"setting": t.TEXT, "own_key": t.TEXT_OR_NULL, "own_value": t.TEXT_OR_NULL})
    figures = {"saves_bytes": t.INTEGER, "flips_verdict": t.FLAG}
    return t.object_schema({"change": t.TEXT, **figures, "cost": t.TEXT, "own": t.array_schema(own)})


def suggested_schema() -> t.Schema:
    """Return the schema of a row of ``memplan suggest``: a plan, and what the search says of it."""
    estimate = t.object_schema({**t.same(t.NUMBER, "step_seconds", "tokens_per_second"), "rates_of": t.TEXT})
    plan, own = (
        plan_schema(),
        {"parts_status": LEARNING, "quality_risk": t.BYTES, "gives_up": t.TEXT, "estimate": estimate},
    )
    return {**plan, "required": [*plan["required"], *own], "properties": {**plan["properties"], **own}}


def rank_row() -> t.Schema:
    """Return the schema of a row of ``memplan fit --rank``: ranks that hold the same."""
    parts = ("weight_bytes", "gradient_bytes", "state_bytes", "persistent_bytes", "requested_bytes")
    sizes = t.same(t.BYTES, "first", "last", *parts, "device_bytes", "upper_bytes")
    return t.object_schema({**sizes, "ranks": t.COUNT, "verdict": t.VERDICT})


def layout_row() -> t.Schema:
    """Return the schema of a row of ``memplan suggest`` on several GPUs: a plan, its layout, and what it sends."""
    seconds = t.same(t.NUMBER, "step_seconds", "exposed_seconds", "overlapped_seconds", "bubble", "tokens_per_second")
    layout = {**t.same(t.COUNT, "data", "tensor", "pipeline", "replicate"), "sequence": t.FLAG, "zero_stage": t.BYTES}
    own = {
        "layout": t.object_schema({**layout, **t.same(t.TEXT, "stack", "engine")}),
        "fullest_rank": t.BYTES_OR_NULL,
        "own_words": t.array_schema(t.TEXT),
        "sent": t.object_schema(t.same(t.BYTES, "inside_bytes", "between_bytes")),
        "estimate": t.object_schema({**seconds, "tokens_per_step": t.COUNT, "rates_of": t.TEXT}),
    }
    plan = plan_schema()
    return {**plan, "required": [*plan["required"], *own], "properties": {**plan["properties"], **own}}


def frontier_row() -> t.Schema:
    """Return the schema of a cell of ``memplan frontier``."""
    sizes = t.same(t.BYTES, "requested_bytes", "device_bytes", "upper_bytes")
    return t.object_schema({**t.same(t.BYTES, "micro_batch_size", "sequence_length"), "verdict": t.VERDICT, **sizes})


def largest_row() -> t.Schema:
    """Return the schema of a row of ``memplan max --for``: a value that fits, and what one more would need."""
    return t.object_schema(
        {
            "gpu": t.TEXT,
            **t.same(t.BYTES, "count", "usable_bytes", "value", "tight_value"),
            "bounded": t.FLAG,
            **t.same(t.BYTES_OR_NULL, "device_bytes", "upper_bytes", "next_upper_bytes"),
        }
    )


def max_row() -> t.Schema:
    """Return the schema of a row of ``memplan max``: a bound for a GPU and a config, and a model that fits.

    The notes count bytes of a parameter whatever trains it: by their accounting the stack is null.
    """
    return t.object_schema(
        {
            "gpu": t.TEXT,
            "count": t.BYTES,
            "config": t.TEXT,
            "stack": t.or_null(t.STACK),
            "bytes_per_parameter": t.NUMBER,
            "max_parameters": t.BYTES,
            "largest_fitting_model": t.TEXT_OR_NULL,
            "largest_fitting_parameters": t.BYTES,
        },
        {"notes_max_parameters": t.BYTES, "accounting": t.TEXT},
    )


def where_row() -> t.Schema:
    """Return the schema of a row of ``memplan where``: the fewest GPUs of a kind."""
    sizes = t.same(t.BYTES, "usable_bytes", "device_bytes", "upper_bytes")
    return t.object_schema(
        {"gpu": t.TEXT, "count": t.BYTES, "pooled": t.FLAG, **sizes, "verdict": t.TEXT},
        {"accounting": t.TEXT, "bound": t.BYTES_OR_NULL, "tensor": t.COUNT},
    )


def recommend_row() -> t.Schema:
    """Return the schema of a row of ``memplan recommend``."""
    words = t.same(t.TEXT, "config", "status", "model")
    model = t.or_null(
        t.object_schema(
            {**words, "stack": t.STACK, "evidence": t.TEXT_OR_NULL, "parameters": t.BYTES, "released": t.TEXT_OR_NULL}
        )
    )
    return t.object_schema(
        {
            "gpu": t.TEXT,
            **t.same(t.BYTES, "count", "usable_bytes"),
            **t.same(model, "established", "experimental"),
            "adapters": t.array_schema(model),
            "released_since": t.TEXT,
            "newton_schulz": t.TEXT,
            "faster_on_paper": {"type": "object", "additionalProperties": t.NUMBER},
            "measured": t.FLAG,
            "timed_by": t.TEXT,
        }
    )


def why_schema() -> t.Schema:
    """Return the schema of ``memplan why``: the figures of a message, their cause, and the plan of the job."""
    sizes = ("tried", "allocated", "unallocated", "outside", "other_processes", "free", "capacity", "short")
    plan = t.object_schema(
        {
            "verdict": t.VERDICT,
            "allocated_bytes": t.BYTES,
            "peak_instant": t.TEXT,
            "instant": t.TEXT_OR_NULL,
            **t.same(t.BYTES, "beyond_bytes", "states_missing_bytes"),
            "changes": t.array_schema(t.TEXT),
        }
    )
    return t.object_schema(
        {
            "schema": {"const": "memplan/why/1"},
            "answer": t.TEXT,
            "cause": {"enum": list(get_args(Cause))},
            "phase": {"enum": list(get_args(Phase))},
            "step": t.BYTES_OR_NULL,
            **t.same(t.BYTES, *(f"{size}_bytes" for size in sizes)),
            "allowed_bytes": t.BYTES_OR_NULL,
            "plan": t.or_null(plan),
        }
    )
