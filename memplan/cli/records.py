"""``memplan lab show``: a record of an experiment, as tables and as a picture, without running it again."""

from __future__ import annotations

from typing import Annotated

import typer

from memplan.cli import options as o
from memplan.cli.experiments import PlotOption
from memplan.cli.output import emit
from memplan.cli.resolve import open_catalog


def show_record(
    asked: Annotated[str, typer.Argument(metavar="RECORD", help="A file, or an experiment whose record is shipped.")],
    plot: PlotOption = None,
    as_json: o.JsonOption = False,
    form: o.FormatOption = o.OutputFormat.table,
    output: o.OutputOption = None,
    quiet: o.QuietOption = False,
) -> None:
    """Show a record of an experiment; with --plot, draw it again. Needs no torch."""
    from memplan.report.experiments import read_record, record_document, reporter_of
    from memplan.report.figures import check_drawable, save_figure

    record = read_record(asked, open_catalog(None).root / "configs" / "evidence")
    if plot is not None:
        check_drawable(plot)
        save_figure(reporter_of(record).figure(record), plot)
    raise typer.Exit(emit(record_document(record), form, as_json, output, quiet))


def add_show_command(lab: typer.Typer) -> None:
    """Add the command to ``memplan lab``."""
    lab.command("show")(show_record)
