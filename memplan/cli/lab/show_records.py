"""``memplan lab show``: records as tables and pictures, without running anything again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from memplan.cli import option_groups as o
from memplan.cli.lab.experiment_options import PlotOption
from memplan.cli.output import emit, unit_text
from memplan.errors import InvalidFileError, MemplanError, printable
from memplan.library.lookup import open_catalog
from memplan.report.document import Document, Table


def show_record(
    asked: Annotated[
        str | None,
        typer.Argument(metavar="RECORD", help="A file, or the name of a record that is shipped.", show_default=False),
    ] = None,
    plot: PlotOption = None,
    as_json: o.JsonOption = False,
    form: o.FormatOption = o.OutputFormat.table,
    output: o.OutputOption = None,
    units: o.UnitsOption = None,
    quiet: o.QuietOption = False,
) -> None:
    """Show a record of training or of an experiment; with --plot, draw it again. Without RECORD: all that are shipped.

    Needs no torch.
    """
    from memplan.report.evidence_lines import SCHEMA
    from memplan.report.experiments import read_record, record_document, reporter_of
    from memplan.report.figures import check_drawable, save_figure
    from memplan.report.training_records import list_document, training_record_document

    folder = open_catalog(None).root / "configs" / "evidence"
    if asked is None:
        if plot is not None:
            raise InvalidFileError(["--plot: draws one record; name it"])
        raise typer.Exit(emit(list_document(folder), form, as_json, output, quiet))
    record = read_record(asked, folder)
    trained = record["schema"] == SCHEMA
    if plot is not None:
        if trained:
            raise InvalidFileError([f"--plot: {asked} is a record of training, which has no picture"])
        check_drawable(plot)
        with _as_written(asked):
            figure = reporter_of(record).figure(record)
        save_figure(figure, plot)
    with _as_written(asked):
        document = training_record_document(record, unit_text(units)) if trained else record_document(record)
        _require_text(document)
    raise typer.Exit(emit(document, form, as_json, output, quiet))


def _require_text(document: Document) -> None:
    """Raise a TypeError where a record put something else than text into a table."""
    for block in document.blocks:
        rows = block.rows if isinstance(block, Table) else ()
        if not all(isinstance(cell, str) for row in rows for cell in row):
            raise TypeError("a name is no text")


@contextmanager
def _as_written(asked: str) -> Iterator[None]:
    """Refuse a record that lacks what memplan writes into one; each experiment has figures of its own.

    Raises:
        InvalidFileError: A figure is missing, or of another kind.
    """
    try:
        yield
    except MemplanError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        problem = printable(f"{type(error).__name__}: {error}", 200)
        raise InvalidFileError([f"{printable(asked, 300)}: not as memplan writes such records: {problem}"]) from None


def add_show_command(lab: typer.Typer) -> None:
    """Add the command to ``memplan lab``."""
    lab.command("show")(show_record)
