"""``memplan lab``: estimates and methods held against what really happens; needs torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from memplan.cli.grouped_command import add_command, command, with_defaults, without
from memplan.cli.lab.experiment_options import RUN, RunOptions
from memplan.cli.lab.largest_command import largest_command
from memplan.cli.lab.learning_commands import LEARNING, SizeOptions
from memplan.cli.lab.matrix_commands import orthogonality, precision, variance
from memplan.cli.option_groups import OutputOptions, option
from memplan.cli.output import emit
from memplan.documents.frozen_values import dataclass
from memplan.errors import InvalidFileError, MemplanError, printable
from memplan.library.lookup import Overrides, Shapes, open_catalog
from memplan.report.document import Document, Table

lab_command = typer.Typer(
    no_args_is_help=True,
    help="Experiments: what formats and methods do to learning, measured for real. Its commands take --json.",
)


class Rounding(StrEnum):
    """Rounding of weights that are not fp32."""

    nearest = "nearest"
    stochastic = "stochastic"
    golden = "golden"


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """What is trained, and how."""

    config: Annotated[str, option(RUN, "--config -c NAME|FILE", "Training config, which must be given.")]
    rounding: Annotated[
        Rounding, option(RUN, "--rounding KIND", "Of weights that are not fp32: nearest, stochastic or golden.")
    ] = Rounding.stochastic
    momentum_format: Annotated[
        str | None, option(RUN, "--momentum-format NAME", "In place of the config's, such as gauss4.")
    ] = None
    lr: Annotated[float, option(RUN, "--lr", "Largest rate of Muon.", min=0.0)] = 0.02
    adamw_lr: Annotated[float, option(RUN, "--adamw-lr", "Largest rate of AdamW.", min=0.0)] = 0.006
    weight_decay: Annotated[float, option(RUN, "--weight-decay", "Decoupled.", min=0.0)] = 0.0
    muon: Annotated[
        list[str] | None,
        option(RUN, "--muon KEY=VALUE", "Any key of Muon's parameter groups, such as momentum=0.9; repeatable."),
    ] = None
    settings: Annotated[
        list[str] | None,
        option(RUN, "--set KEY=VALUE", "Any key of a training config, such as kernels.optimizer=fused; repeatable."),
    ] = None
    against: Annotated[Path | None, option(RUN, "--against FILE", "A record to compare with, seed by seed.")] = None


@command(example="memplan lab train --config tier1 --steps 20 --batch 4 --length 64")
def train_command(
    training: TrainOptions,
    size: Annotated[SizeOptions, with_defaults(steps=300, batch=16, layers=4)],
    run: Annotated[RunOptions, without("plot")],
    output: OutputOptions,
) -> int:
    """Train a tiny byte-level language model under a config, on the sources of Python's library.

    Every format starts from the same numbers and sees the same batches. Bytes are measured beside the plan.
    """
    from memplan.cli.lab.train_command import TrainingRequest, training_document

    request = TrainingRequest(
        config=training.config,
        overrides=Overrides(size.batch, size.length, None, tuple(training.settings or ())),
        shapes=Shapes(size.layers, size.hidden, size.intermediate, size.heads, vocab=256),
        seeds=run.seeds((0,)),
        steps=size.steps,
        rates=(training.lr, training.adamw_lr, training.weight_decay),
        rounding=training.rounding.value,
        momentum_format=training.momentum_format,
        matrix_options=tuple(training.muon or ()),
        device=run.device.value,
        threads=run.threads,
        out=run.out,
        against=training.against,
        quiet=output.quiet,
    )
    return emit(training_document(request, output.catalog(), output.unit), output)


@dataclass(frozen=True, slots=True)
class RecordOptions:
    """Which record, and its picture."""

    record: Annotated[
        str | None,
        typer.Argument(
            metavar="RECORD",
            help="A file, or the name of a record that is shipped.",
            show_default=False,
            rich_help_panel="Record",
        ),
    ] = None
    plot: Annotated[Path | None, option("Record", "--plot FILE", "Draw the record, as SVG or PNG.")] = None


@command(example="memplan lab show precision")
def show_record(shown: RecordOptions, output: Annotated[OutputOptions, without("catalog_path")]) -> int:
    """Show a record of training or of an experiment; with --plot, draw it again. Without RECORD: all that are shipped.

    Needs no torch.
    """
    from memplan.report.evidence_lines import SCHEMA
    from memplan.report.experiments import read_record, record_document, reporter_of
    from memplan.report.figures import check_drawable, save_figure
    from memplan.report.training_records import list_document, training_record_document

    name, plot = shown.record, shown.plot
    folder = open_catalog(None).root / "configs" / "evidence"
    if name is None:
        if plot is not None:
            raise InvalidFileError(["--plot: draws one record; name it"])
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
        _require_text(document)
    return emit(document, output)


def _require_text(document: Document) -> None:
    """Raise a TypeError where a record put something else than text into a table."""
    for block in document.blocks:
        rows = block.rows if isinstance(block, Table) else ()
        if not all(isinstance(cell, str) for row in rows for cell in row):
            raise TypeError("a name is no text")


@contextmanager
def _as_written(name: str) -> Iterator[None]:
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
