"""``memplan schema`` and ``memplan doctor``: for programs that read answers, and for bug reports."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import typer

from memplan.cli.grouped_command import command, without
from memplan.cli.option_groups import OutputOptions
from memplan.cli.output import emit, emit_as


class SchemaName(StrEnum):
    """Things that have a JSON Schema."""

    plan = "plan"
    fit = "fit"
    grid = "grid"
    ranks = "ranks"
    layouts = "layouts"
    inference = "inference"
    max = "max"
    where = "where"
    largest = "largest"
    frontier = "frontier"
    suggest = "suggest"
    compare = "compare"
    recommend = "recommend"
    check = "check"
    diff = "diff"
    why = "why"
    imported = "import"
    rewrite = "rewrite"
    evidence = "evidence"
    literature = "literature"
    validation = "validation"
    experiment = "experiment"
    list = "list"
    tables = "tables"
    training = "training"
    budget = "budget"
    baseline = "baseline"
    gpu = "gpu"
    weight_format = "format"
    gradient = "gradient"
    optimizer = "optimizer"
    model = "model"
    stack = "stack"
    published = "published"


@dataclass(frozen=True, slots=True)
class SchemaOptions:
    """Whose schema."""

    name: Annotated[
        SchemaName, typer.Argument(metavar="NAME", help=f"Whose schema to print: {', '.join(SchemaName)}.")
    ] = SchemaName.plan


@command(example="memplan schema training -o training.schema.json")
def schema_command(
    schema: SchemaOptions, output: Annotated[OutputOptions, without("form", "units", "quiet", "catalog_path")]
) -> int:
    """Print a JSON Schema: of answers, of training configs, or of catalog entries."""
    from memplan.report.document import Document
    from memplan.report.json_schemas import schema_of

    return emit_as(Document(schema_of(schema.name.value)), "json", output)


@command(example="memplan doctor --json")
def doctor_command(output: Annotated[OutputOptions, without("units")]) -> int:
    """Print versions, the catalog in use, and the device that is seen."""
    from memplan.cli.diagnosis import doctor_document

    return emit(doctor_document(output.catalog()), output)
