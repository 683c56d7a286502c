"""``memplan tables``: every table of the notes, recomputed and corrected."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from memplan.cli import option_groups as o
from memplan.cli.output import emit
from memplan.library.lookup import open_catalog


class Only(StrEnum):
    """Which cells to show."""

    wrong = "wrong"


def tables_command(
    table: Annotated[
        str | None,
        typer.Argument(metavar="ID", help="A table such as s000.t02, or a document such as s000.", show_default=False),
    ] = None,
    only: Annotated[Only | None, typer.Option("--only", help="Show only the cells that the notes got wrong.")] = None,
    as_json: o.JsonOption = False,
    form: o.FormatOption = o.OutputFormat.table,
    output: o.OutputOption = None,
    quiet: o.QuietOption = False,
    catalog_path: o.CatalogOption = None,
) -> None:
    """Are the published tables right? As printed, recomputed by the notes' own rules, and corrected.

    Without an ID: a row for each table; as JSON or CSV every cell.
    """
    from memplan.published.judgement import judged_tables
    from memplan.report.tables_answer import tables_document

    whole = as_json or form is o.OutputFormat.json
    flat = form is o.OutputFormat.csv and not as_json
    summary = table is None and only is None and not (flat or whole)
    judged = judged_tables(table, open_catalog(catalog_path), remarks=not summary)
    document = tables_document(judged, only is not None, flat, summary)
    raise typer.Exit(emit(document, form, as_json, output, quiet))
