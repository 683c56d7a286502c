"""The JSON Schemas of answers about trainers' own files."""

from __future__ import annotations

from memplan.report.schemas import schema_terms as t


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
    side = t.object_schema({"verdict": t.VERDICT, **t.same(t.BYTES, "device_bytes", "upper_bytes", "usable_bytes")})
    return t.object_schema(
        {
            "schema": {"const": "memplan/rewrite/1"},
            **t.same(t.TEXT, "memplan_version", "file", "diff"),
            **t.same(side, "before", "after"),
            "costs": t.array_schema(t.TEXT),
        }
    )
