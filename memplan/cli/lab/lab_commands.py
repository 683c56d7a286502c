"""``memplan lab``: estimates and methods held against what really happens; needs torch."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from memplan.cli.grouped_command import add_command, command, without
from memplan.cli.lab.learning_commands import LEARNING
from memplan.cli.lab.matrix_commands import orthogonality, precision, variance
from memplan.cli.lab.training_commands import largest_command, train_command
from memplan.cli.option_groups import OutputOptions, argument, option
from memplan.cli.output import emit
from memplan.errors import InvalidFileError, MemplanError, printable
from memplan.library.lookup import open_catalog
from memplan.report.document import Table

lab_command = typer.Typer(
    no_args_is_help=True,
    help="Experiments: what formats and methods do to learning, measured for real. Its commands take --json.",
)


@command(example="memplan lab show precision")
def show_record(
    *,
    name: Annotated[str | None, argument("Record", "RECORD", "A file, or the name of a record that is shipped.")] = (
        None
    ),
    plot: Annotated[Path | None, option("Record", "--plot FILE", "Draw the record, as SVG or PNG.")] = None,
    output: Annotated[OutputOptions, without("catalog_path")],
) -> int:
    """Show a record of training or of an experiment; with --plot, draw it again. Without RECORD: all that are shipped.

    Needs no torch.
    """
    from memplan.report.experiments import read_record, record_document, reporter_of
    from memplan.report.figures import check_drawable, save_figure
    from memplan.report.training_records import SCHEMA, list_document, training_record_document

    folder = open_catalog(None).root / "configs" / "evidence"
    if name is None:
        if plot is not None:
            raise InvalidFileError(["--plot draws one record: name it"])
        return emit(list_document(folder), output)
    record = read_record(name, folder)
    trained = record["schema"] == SCHEMA
    if plot is not None:
        if trained:
            raise InvalidFileError([f"--plot: {name} is a record of training, which has no picture"])
        check_drawable(plot)
        with _as_written(name):
            figure = reporter_of(record).figure(record)
        save_figure(figure, plot)
    with _as_written(name):
        document = training_record_document(record, output.unit) if trained else record_document(record)
        for block in document.blocks:
            rows = block.rows if isinstance(block, Table) else ()
            if not all(isinstance(cell, str) for row in rows for cell in row):
                raise TypeError("a name is no text")
    return emit(document, output)


@contextmanager
def _as_written(name: str) -> Iterator[None]:
    """Refuse a record that lacks what memplan writes into one; each experiment has figures of its own."""
    try:
        yield
    except MemplanError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        problem = printable(f"{type(error).__name__}: {error}", 200)
        raise InvalidFileError([f"{printable(name, 300)}: not as memplan writes such records: {problem}"]) from None


COMMANDS = {
    "train": train_command,
    "largest": largest_command,
    **{learns.__name__.replace("_", "-"): learns for learns in LEARNING},
    "orthogonality": orthogonality,
    "precision": precision,
    "variance": variance,
    "show": show_record,
}
for name, function in COMMANDS.items():
    add_command(lab_command, name, function)
