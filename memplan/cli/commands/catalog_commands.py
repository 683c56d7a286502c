"""``memplan list``, ``show`` and ``tables``: what memplan knows, with its sources, and the notes' tables."""

from typing import Annotated, Literal, get_args

import typer

from memplan.cli.grouped_command import command, without
from memplan.cli.option_groups import OutputOptions, argument, option
from memplan.cli.output import emit

Section = Literal["gpus", "models", "formats", "gradients", "optimizers", "configs", "stacks"]
"""Kinds of catalog entries."""


@command(example="memplan list gpus")
def list_command(
    kind: Annotated[Section, typer.Argument(metavar="KIND", help=f"What to list: {', '.join(get_args(Section))}.")],
    output: OutputOptions,
) -> int:
    """List what the catalog holds of a kind."""
    from memplan.report.catalog_answer import list_document

    return emit(list_document(kind, output.catalog(), output.unit), output)


@command(example="memplan show q4-0")
def show_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name or alias of any kind, or any MODEL, files too.")],
    output: OutputOptions,
) -> int:
    """Show one entry with its sources, or a model with its parameters by role."""
    from memplan.library.shown_document import show_document

    return emit(show_document(name, output.catalog(), output.unit), output)


@command(example="memplan tables s000.t15 --only wrong")
def tables_command(
    *,
    table: Annotated[str | None, argument("Tables", "ID", "A table such as s000.t02, or a document such as s000.")] = (
        None
    ),
    only: Annotated[
        Literal["wrong"] | None, option("Tables", "--only wrong", "Show only the cells that the notes got wrong.")
    ] = None,
    output: Annotated[OutputOptions, without("units")],
) -> int:
    """Are the published tables right? As printed, recomputed by the notes' own rules, and corrected.

    Without an ID: a row for each table; as JSON or CSV every cell.
    """
    from memplan.published.judgement import judged_tables
    from memplan.report.tables_answer import tables_document

    flat, wrong = output.format_name(output.form) == "csv", only is not None
    summary = table is None and not (wrong or flat or output.whole)
    judged = judged_tables(table, output.catalog(), remarks=not summary)
    return emit(tables_document(judged, wrong, flat, summary), output)
