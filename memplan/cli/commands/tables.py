"""``memplan tables``: every table of the notes, recomputed and corrected."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import typer

from memplan.cli.grouped_command import command, without
from memplan.cli.option_groups import OutputOptions, option
from memplan.cli.output import emit


class Only(StrEnum):
    """Which cells to show."""

    wrong = "wrong"


@dataclass(frozen=True, slots=True)
class TableOptions:
    """Which tables, and which of their cells."""

    table: Annotated[
        str | None,
        typer.Argument(
            metavar="ID",
            help="A table such as s000.t02, or a document such as s000.",
            show_default=False,
            rich_help_panel="Tables",
        ),
    ] = None
    only: Annotated[Only | None, option("Tables", "--only wrong", "Show only the cells that the notes got wrong.")] = (
        None
    )


@command(example="memplan tables s000.t15 --only wrong")
def tables_command(tables: TableOptions, output: Annotated[OutputOptions, without("units")]) -> int:
    """Are the published tables right? As printed, recomputed by the notes' own rules, and corrected.

    Without an ID: a row for each table; as JSON or CSV every cell.
    """
    from memplan.published.judgement import judged_tables
    from memplan.report.tables_answer import tables_document

    flat, wrong = output.format_name(output.form) == "csv", tables.only is not None
    summary = tables.table is None and not (wrong or flat or output.whole)
    judged = judged_tables(tables.table, output.catalog(), remarks=not summary)
    return emit(tables_document(judged, wrong, flat, summary), output)
