"""The JSON Schema of ``memplan tables``."""

from __future__ import annotations

from typing import Any

from memplan.published.judged_tables import STATUSES
from memplan.report.json_schemas import BYTES, TEXT, array_schema, object_schema


def tables_schema() -> dict[str, Any]:
    """Return the schema of the notes' tables: every cell as printed, recomputed and corrected."""
    maybe = {"type": ["string", "null"]}
    cell = object_schema(
        {
            **dict.fromkeys(("row", "column", "printed"), TEXT),
            **dict.fromkeys(("rule", "recomputed", "corrected"), maybe),
            "status": {"enum": list(STATUSES)},
            "wrong": {"type": "boolean"},
            "reason": TEXT,
        }
    )
    counts = object_schema(dict.fromkeys(("tables", "cells", *STATUSES, "wrong"), BYTES))
    words = dict.fromkeys(("title", "section", "document", "source"), TEXT)
    table = object_schema(
        {
            "id": {**TEXT, "pattern": r"^s\d{3}\.t\d{2}$"},
            **words,
            **dict.fromkeys(("rule", "reason", "unit"), maybe),
            "notes": array_schema(TEXT),
            "counts": counts,
            "cells": array_schema(cell),
        }
    )
    names = {"type": "object", "additionalProperties": TEXT}
    shape_bytes = ("weight_bytes", "gradient_bytes", "matrix_state_bytes", "state_bytes", "persistent_bytes")
    shape = object_schema(
        {"shape": TEXT, "optimizer": TEXT, **dict.fromkeys(("parameters", "matrix_parameters", *shape_bytes), BYTES)}
    )
    return object_schema(
        {
            "schema": {"const": "memplan/tables/1"},
            "tables": array_schema(table),
            "counts": counts,
            "statuses": names,
            "rules": names,
            "statements": array_schema(TEXT),
            "shapes": array_schema(shape),
        }
    )
