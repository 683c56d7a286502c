"""``memplan schema`` and ``memplan doctor``: for programs that read answers, and for bug reports."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from memplan.cli import option_groups as o
from memplan.cli.output import emit
from memplan.library.lookup import open_catalog


class SchemaName(StrEnum):
    """Things that have a JSON Schema."""

    plan = "plan"
    fit = "fit"
    max = "max"
    where = "where"
    largest = "largest"
    frontier = "frontier"
    suggest = "suggest"
    compare = "compare"
    recommend = "recommend"
    check = "check"
    diff = "diff"
    evidence = "evidence"
    literature = "literature"
    validation = "validation"
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
    published = "published"


def schema_command(
    name: Annotated[SchemaName, typer.Argument(help="Whose schema to print.")] = SchemaName.plan,
    as_json: o.JsonOption = False,
    output: o.OutputOption = None,
) -> None:
    """Print a JSON Schema: of answers, of training configs, or of catalog entries."""
    from memplan.report.document import Document
    from memplan.report.json_schemas import schema_of

    del as_json  # a schema is JSON in any case
    raise typer.Exit(emit(Document(schema_of(name.value)), o.OutputFormat.json, True, output, False))


def doctor_command(
    as_json: o.JsonOption = False,
    form: o.FormatOption = o.OutputFormat.table,
    output: o.OutputOption = None,
    quiet: o.QuietOption = False,
    catalog_path: o.CatalogOption = None,
) -> None:
    """Print versions, the catalog in use, and the device that is seen."""
    from memplan.cli.diagnosis import doctor_document

    raise typer.Exit(emit(doctor_document(open_catalog(catalog_path)), form, as_json, output, quiet))
