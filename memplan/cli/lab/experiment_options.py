"""What all experiments of ``memplan lab`` have in common: their options, and how a run becomes an answer."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from datetime import date
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memplan.cli.output import deliver
from memplan.cli.progress import Progress
from memplan.errors import CannotAnswerError, InvalidFileError
from memplan.report.document import Document
from memplan.report.experiments import record_document, record_text, reporter_of
from memplan.report.figures import check_drawable, save_figure

if TYPE_CHECKING:
    from memplan.lab.experiment_record import Outcome
    from memplan.lab.experiment_record import Progress as Told

PANEL = "Run"

SeedsOption = Annotated[
    list[int] | None,
    typer.Option(
        "--seed", min=0, max=2**63 - 1, help="Seed, 0, 1 and 2 by default; repeatable.", rich_help_panel=PANEL
    ),
]
OutOption = Annotated[
    Path | None,
    typer.Option("--out", metavar="FILE", help="Write the record of the runs, as JSON.", rich_help_panel=PANEL),
]
PlotOption = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE", help="Draw the record, as SVG or PNG.", rich_help_panel=PANEL),
]


class Device(StrEnum):
    """Where to run."""

    cpu = "cpu"
    cuda = "cuda"


DeviceOption = Annotated[Device, typer.Option("--device", help="Where to run.", rich_help_panel=PANEL)]
ThreadsOption = Annotated[
    int, typer.Option("--threads", min=0, max=1024, help="Threads on the CPU; 0: torch's.", rich_help_panel=PANEL)
]


def chosen_seeds(seeds: list[int] | None, default: tuple[int, ...] = (0, 1, 2)) -> tuple[int, ...]:
    """Return the seeds that were asked for, each once."""
    return tuple(dict.fromkeys(seeds or default))


def experiment_document(
    title: str,
    parts: int,
    run: Callable[[Told], Outcome],
    *,
    device: str,
    threads: int,
    out: Path | None,
    plot: Path | None,
    quiet: bool,
) -> Document:
    """Run an experiment with progress, write what was asked for, and return its answer.

    Args:
        title: What the progress bar says.
        parts: How often ``run`` reports.
        run: The experiment; it is given whom to tell of its progress, and imports torch only now.
        device: ``cpu`` or ``cuda``.
        threads: Threads on the CPU; 0 leaves it to torch.
        out: Where the record goes.
        plot: Where the picture goes.
        quiet: Whether to keep progress to itself.

    Raises:
        CannotAnswerError: torch or matplotlib is missing, or there is no such device.
        InvalidFileError: A file cannot be written.
    """
    check_torch()
    if plot is not None:
        check_drawable(plot)
    if out is not None and not out.parent.is_dir():
        raise InvalidFileError([f"{out}: there is no folder {out.parent}"])
    from memplan.lab.experiment_record import record
    from memplan.lab.training.device import prepare

    prepare(device, threads)
    progress = Progress(title, parts)
    outcome = run(_silent if quiet else progress)
    if not quiet:
        progress.end()
    found = record(outcome, shlex.join(["memplan", *sys.argv[1:]]), date.today().isoformat(), device)
    if out is not None:
        deliver(record_text(found), out)
    if plot is not None:
        save_figure(reporter_of(found).figure(found), plot)
    return record_document(found)


def check_torch() -> None:
    """Raise where there is no torch.

    Raises:
        CannotAnswerError: There is none.
    """
    if find_spec("torch") is None:
        raise CannotAnswerError("experiments need torch, which is not installed: pip install 'memplan[torch]'")


def _silent(done: int, note: str) -> None:
    pass
