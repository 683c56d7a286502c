"""The JSON Schema of ``memplan tables``."""

from __future__ import annotations

from memplan.published.judged_tables import STATUSES, JudgedCell, ShapeFigures
from memplan.report.schemas import schema_terms as t


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
