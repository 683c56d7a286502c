"""Options of the experiments that train, and how one of them becomes an answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from memplan.cli import option_groups as o
from memplan.cli.lab.experiment_options import PANEL, check_torch, chosen_seeds, experiment_document
from memplan.cli.output import emit

if TYPE_CHECKING:
    from memplan.lab.learning.variants import Task

MODEL_PANEL = "Model"


class Device(StrEnum):
    """Where to train."""

    cpu = "cpu"
    cuda = "cuda"


StepsOption = Annotated[int, typer.Option("--steps", min=1, help="Optimizer steps.", rich_help_panel=PANEL)]
DeviceOption = Annotated[Device, typer.Option("--device", help="Where to train.", rich_help_panel=PANEL)]
ThreadsOption = Annotated[
    int, typer.Option("--threads", min=0, help="Threads on the CPU; 0 leaves it to torch.", rich_help_panel=PANEL)
]
BatchOption = Annotated[int, typer.Option("--batch", "-b", min=1, help="Sequences per step.", rich_help_panel=PANEL)]
LengthOption = Annotated[int, typer.Option("--length", "-s", min=2, help="Tokens of each.", rich_help_panel=PANEL)]
LayersOption = Annotated[int, typer.Option("--layers", min=1, help="Layers.", rich_help_panel=MODEL_PANEL)]
HiddenOption = Annotated[int, typer.Option("--hidden", min=1, help="Width.", rich_help_panel=MODEL_PANEL)]
HeadsOption = Annotated[int, typer.Option("--heads", min=1, help="Attention heads.", rich_help_panel=MODEL_PANEL)]
IntermediateOption = Annotated[
    int, typer.Option("--intermediate", min=1, help="Width of the feed-forward part.", rich_help_panel=MODEL_PANEL)
]


def names_option(flag: str, what: str) -> object:
    """Return an option that takes names of what is compared."""
    return typer.Option(flag, metavar="NAME", help=f"{what}; repeatable, all by default.", rich_help_panel=PANEL)


MomentumOption = Annotated[list[str] | None, names_option("--momentum", "A format of momentum, beside fp32")]
WeightsOption = Annotated[list[str] | None, names_option("--weights", "A format of weights, beside fp32")]
MomentOption = Annotated[list[str] | None, names_option("--moment", "A way to store the second moment, beside fp32")]
GradientOption = Annotated[list[str] | None, names_option("--gradient", "A way to keep gradients, beside fp32")]


@dataclass(frozen=True, slots=True)
class LearningRun:
    """What every command is told besides its own options."""

    seeds: list[int] | None
    device: Device
    threads: int
    out: Path | None
    plot: Path | None
    as_json: bool
    form: o.OutputFormat
    output: Path | None
    quiet: bool


def answer(title: str, task: Callable[[tuple[int, ...]], Task], run: LearningRun) -> NoReturn:
    """Run an experiment and print its record; ``task`` imports torch."""
    check_torch()
    ready = task(chosen_seeds(run.seeds))
    document = experiment_document(
        title,
        ready.parts,
        ready.run,
        device=run.device.value,
        threads=run.threads,
        out=run.out,
        plot=run.plot,
        quiet=run.quiet,
    )
    raise typer.Exit(emit(document, run.form, run.as_json, run.output, run.quiet))
