"""JSON Schemas of answers and of data files, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from memplan.budget.baseline import BaselineFile
from memplan.budget.budget_schema import Budget
from memplan.catalog.entries import Gpu, GradientDtype, ModelEntry, Optimizer, StorageFormat
from memplan.catalog.stacks import Stack
from memplan.catalog.training_config import TrainingConfig
from memplan.documents.schemas import json_schema
from memplan.published.table_schema import PublishedFile
from memplan.report.schemas import plan_schemas as plans
from memplan.report.schemas.check_schemas import check_schema, diff_schema, import_schema, rewrite_schema
from memplan.report.schemas.record_schemas import (
    evidence_schema,
    experiment_schema,
    literature_schema,
    tables_schema,
    validation_schema,
)
from memplan.report.schemas.schema_terms import TEXT, Schema, array_schema, object_schema

DRAFT = "https://json-schema.org/draft/2020-12/schema"

FILES: Mapping[str, type] = {
    "training": TrainingConfig,
    "budget": Budget,
    "baseline": BaselineFile,
    "gpu": Gpu,
    "format": StorageFormat,
    "gradient": GradientDtype,
    "optimizer": Optimizer,
    "model": ModelEntry,
    "stack": Stack,
    "published": PublishedFile,
}
ANSWERS: Mapping[str, Callable[[], Schema]] = {
    "plan": plans.plan_schema,
    "inference": plans.inference_schema,
    "grid": plans.grid_schema,
    "why": plans.why_schema,
    "check": check_schema,
    "diff": diff_schema,
    "import": import_schema,
    "rewrite": rewrite_schema,
    "evidence": evidence_schema,
    "validation": validation_schema,
    "literature": literature_schema,
    "experiment": experiment_schema,
    "tables": tables_schema,
    "ui": lambda: object_schema({"schema": {"const": "memplan/ui/1"}, "address": TEXT}),
}
ROWS: Mapping[str, Callable[[], Schema]] = {
    "fit": plans.plan_schema,
    "compare": plans.plan_schema,
    "suggest": plans.suggested_schema,
    "layouts": plans.layout_row,
    "ranks": plans.rank_row,
    "frontier": plans.frontier_row,
    "largest": plans.largest_row,
    "max": plans.max_row,
    "where": plans.where_row,
    "recommend": plans.recommend_row,
    "list": lambda: object_schema({"name": TEXT}),
}
"""Answers that are a list of rows, and the schema of one of them."""


def schema_of(name: str) -> Schema:
    """Return the JSON Schema of an answer or a data file."""
    if name in FILES:
        return {"$schema": DRAFT, **json_schema(FILES[name])}
    if name in ANSWERS:
        return {"$schema": DRAFT, **ANSWERS[name]()}
    keys = {"schema": {"const": f"memplan/{name}/1"}, "rows": array_schema(ROWS[name]())}
    return {"$schema": DRAFT, **object_schema(keys)}
