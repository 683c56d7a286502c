"""The JSON Schemas of budget checks, of what moved between baselines, and of answers about trainers' own files."""

from __future__ import annotations

from typing import get_args

from memplan.budget.baseline import CAUSES
from memplan.budget.budget_schema import Basis, Level
from memplan.budget.evaluation import WORST_FIRST, Rule
from memplan.report.schemas import schema_terms as t


def check_schema() -> t.Schema:
    """Return the schema of the answer of ``memplan check``."""
    return t.object_schema(
        {
            "schema": {"const": "memplan/check/1"},
            **t.same(t.TEXT, "memplan_version", "catalog_hash", "budget"),
            "verdict": t.choice(("within", "over", "cannot")),
            "exit_code": t.choice((0, 1, 3)),
            "answer": t.TEXT,
            "counts": t.object_schema(t.same(t.BYTES, "checked", *WORST_FIRST)),
            "rows": t.array_schema(t.object_schema(_row(), _figures())),
        }
    )


def _row() -> t.Schema:
    """Return the keys of every job on every GPU."""
    finding = t.object_schema(
        {"rule": t.choice(get_args(Rule)), "message": t.TEXT},
        {"component": t.TEXT, **t.same(t.BYTES, "bytes", "limit_bytes", "over_bytes")},
    )
    return {
        **t.same(t.TEXT, "name", "gpu", "model", "config", "file"),
        "status": t.choice(WORST_FIRST),
        "level": t.choice(get_args(Level)),
        "basis": t.choice(get_args(Basis)),
        "line": t.COUNT,
        "findings": t.array_schema(finding),
    }


def _figures() -> t.Schema:
    """Return the keys of a job that could be evaluated."""
    return {
        "verdict": t.VERDICT,
        **t.same(t.BYTES, "device_bytes", "upper_bytes", "usable_bytes", "limit_bytes"),
        "headroom_bytes": t.INTEGER,
        **t.same(t.TEXT, "asked", "inputs"),
        "components": {"type": "object", "additionalProperties": t.BYTES},
        "baseline": t.object_schema(t.same(t.BYTES, "device_bytes", "upper_bytes")),
    }


def diff_schema() -> t.Schema:
    """Return the schema of the answer of ``memplan diff``."""
    origin = t.object_schema(t.same(t.TEXT, "memplan_version", "catalog_hash"))
    side = t.object_schema({**t.same(t.TEXT, "model", "config"), **t.same(t.BYTES, "device_bytes", "upper_bytes")})
    row = t.object_schema(
        {
            **t.same(t.TEXT, "name", "gpu"),
            "cause": t.choice(CAUSES),
            "moved_bytes": t.INTEGER,
            "components": {"type": "object", "additionalProperties": t.INTEGER},
        },
        t.same(side, "before", "after"),
    )
    const = {"const": "memplan/diff/1"}
    return t.object_schema(
        {"schema": const, **t.same(origin, "base", "head"), "answer": t.TEXT, "rows": t.array_schema(row)}
    )


def import_schema() -> t.Schema:
    """Return the schema of the answer of ``memplan import``."""
    place = {"key": t.TEXT, "line": t.BYTES_OR_NULL, "file": t.TEXT}
    keys = {
        "used": t.array_schema(t.object_schema({**place, "effect": t.TEXT})),
        "unknown": t.array_schema(t.object_schema({**place, "nearest": t.TEXT})),
        "not_modelled": t.array_schema(t.object_schema({**place, "why": t.TEXT})),
        "irrelevant": t.array_schema(t.TEXT),
    }
    return t.object_schema(
        {
            "schema": {"const": "memplan/import/1"},
            "memplan_version": t.TEXT,
            "trainer": t.object_schema({"name": t.TEXT, "version": t.TEXT_OR_NULL}),
            "role": t.choice(("job", "launcher", "not_training")),
            "model": t.object_schema({"given": t.TEXT_OR_NULL, "name": t.TEXT_OR_NULL}),
            "method": t.OBJECT,
            "training": t.OBJECT,
            "packing": {"type": ["boolean", "null"]},
            "keys": t.object_schema(keys),
            "assumed": t.array_schema(t.object_schema({"key": t.TEXT, "why": t.TEXT, "change": t.TEXT})),
            "needs": t.array_schema(t.TEXT),
            "files": t.array_schema(t.TEXT),
            "answer": t.TEXT,
        }
    )


def rewrite_schema() -> t.Schema:
    """Return the schema of the answer of ``memplan suggest`` for a trainer's own file."""
    side = t.object_schema(
        {"verdict": t.VERDICT, **t.same(t.BYTES, "device_bytes", "least_bytes", "upper_bytes", "usable_bytes")}
    )
    return t.object_schema(
        {
            "schema": {"const": "memplan/rewrite/1"},
            **t.same(t.TEXT, "memplan_version", "file", "diff"),
            **t.same(side, "before", "after"),
            "costs": t.array_schema(t.TEXT),
        }
    )
