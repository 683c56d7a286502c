"""What all experiments of ``memplan lab`` have in common: their options, and how a run becomes an answer."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from memplan.cli.grouped_command import without
from memplan.cli.option_groups import OutputOptions, TorchDevice, option
from memplan.cli.output import Progress, deliver, emit
from memplan.documents.frozen_values import dataclass
from memplan.documents.opening import require_folder_of
from memplan.report.experiments import record_document, record_text, reporter_of
from memplan.report.figures import check_drawable, save_figure

if TYPE_CHECKING:
    from memplan.lab.experiment_record import Outcome
    from memplan.lab.experiment_record import Progress as Told

RUN = "Run"
LabOutput = Annotated[OutputOptions, without("units", "catalog_path")]
NEEDS = "experiments need"
"""What is said where there is no torch."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How an experiment is run, and what is written of it besides its answer."""

    seed: Annotated[
        list[int] | None, option(RUN, "--seed", "Seed, 0, 1 and 2 by default; repeatable.", min=0, max=2**63 - 1)
    ] = None
    device: Annotated[TorchDevice, option(RUN, "--device KIND", "Where to run, cpu or cuda.")] = "cpu"
    threads: Annotated[int, option(RUN, "--threads", "Threads on the CPU; 0 leaves it to torch.", min=0, max=1024)] = 0
    out: Annotated[Path | None, option(RUN, "--out FILE", "Write the record of the runs, as JSON.")] = None
    plot: Annotated[Path | None, option(RUN, "--plot FILE", "Draw the record, as SVG or PNG.")] = None

    def seeds(self, default: tuple[int, ...] = (0, 1, 2)) -> tuple[int, ...]:
        """Return the seeds that were given, each once."""
        return tuple(dict.fromkeys(self.seed or default))


def run_experiment(
    title: str, parts: int, run: Callable[[Told], Outcome], options: RunOptions, output: OutputOptions
) -> int:
    """Run an experiment with progress, write its record and its answer, and return the exit code.

    Args:
        parts: How often ``run`` reports.
        run: The experiment; it is given whom to tell of its progress, and imports torch only now.

    Raises:
        CannotAnswerError: matplotlib is missing, or there is no such device.
        InvalidFileError: A file cannot be written.
    """
    out, plot = options.out, options.plot
    if plot is not None:
        check_drawable(plot)
    if out is not None:
        require_folder_of(out)
    from memplan.lab.experiment_record import record
    from memplan.lab.training.trained_model import prepare

    device = options.device
    prepare(device, options.threads)
    progress = Progress(title, parts)
    outcome = run(_silent if output.quiet else progress)
    if not output.quiet:
        progress.end()
    made = record(outcome, typed_command(), date.today().isoformat(), device)
    if out is not None:
        deliver(record_text(made), out)
    if plot is not None:
        save_figure(reporter_of(made).figure(made), plot)
    return emit(record_document(made), output)


def typed_command() -> str:
    """Return the command as it was typed."""
    return shlex.join(["memplan", *sys.argv[1:]])


def _silent(done: int, note: str) -> None:
    pass
