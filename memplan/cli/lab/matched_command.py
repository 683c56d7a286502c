"""``memplan lab matched-8bit``: the comparison of momentum formats that the notes call for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from memplan.cli import option_groups as o
from memplan.cli.lab.experiment_options import PANEL, OutOption, PlotOption, SeedsOption
from memplan.cli.lab.learning_options import (
    MODEL_PANEL,
    Device,
    DeviceOption,
    LearningRun,
    MomentumOption,
    ThreadsOption,
    answer,
)
from memplan.errors import InvalidFileError
from memplan.library.lookup import open_catalog

if TYPE_CHECKING:
    from memplan.lab.learning.variants import Task


@dataclass(frozen=True, slots=True)
class _Asked:
    """A shape by its name or its numbers."""

    name: str | None
    numbers: dict[str, int | None]

    def shapes(self) -> dict[str, int]:
        """Return the numbers, all of them or none.

        Raises:
            InvalidFileError: Some are missing, or there is a name too.
        """
        given = {name: value for name, value in self.numbers.items() if value is not None}
        if given and self.name is not None:
            raise InvalidFileError([f"--shape {self.name}: give a name or {' '.join(_flags(given))}, not both"])
        missing = _flags(self.numbers.keys() - given.keys()) if given else []
        if missing:
            raise InvalidFileError([f"a model by its shapes needs {' and '.join(missing)} too"])
        return given


def _flags(names: object) -> list[str]:
    return [f"--{name}" for name in sorted(names)]  # type: ignore[call-overload]


def _number(flag: str, what: str, least: int = 1) -> object:
    return typer.Option(flag, min=least, help=f"{what}; in place of --shape.", rich_help_panel=MODEL_PANEL)


def matched_8bit(
    shape: Annotated[
        str | None,
        typer.Option(
            "--shape", metavar="NAME", help="tiny, notes-28m (default) or notes-282m.", rich_help_panel=MODEL_PANEL
        ),
    ] = None,
    layers: Annotated[int | None, _number("--layers", "Layers")] = None,
    hidden: Annotated[int | None, _number("--hidden", "Width")] = None,
    heads: Annotated[int | None, _number("--heads", "Attention heads")] = None,
    intermediate: Annotated[int | None, _number("--intermediate", "Width of the feed-forward part")] = None,
    vocab: Annotated[int | None, _number("--vocab", "Size of the vocabulary", 256)] = None,
    momentum: MomentumOption = None,
    plan_only: Annotated[
        bool, typer.Option("--plan-only", help="Plan the bytes; train nothing.", rich_help_panel=PANEL)
    ] = False,
    steps: Annotated[
        int | None, typer.Option("--steps", min=1, help="Optimizer steps, 100 by default.", rich_help_panel=PANEL)
    ] = None,
    seed: SeedsOption = None,
    batch: Annotated[
        int | None, typer.Option("--batch", "-b", min=1, help="Sequences per step.", rich_help_panel=PANEL)
    ] = None,
    length: Annotated[
        int | None, typer.Option("--length", "-s", min=2, help="Tokens of each.", rich_help_panel=PANEL)
    ] = None,
    device: DeviceOption = Device.cpu,
    threads: ThreadsOption = 0,
    out: OutOption = None,
    plot: PlotOption = None,
    as_json: o.JsonOption = False,
    form: o.FormatOption = o.OutputFormat.table,
    output: o.OutputOption = None,
    quiet: o.QuietOption = False,
) -> None:
    """Train one model with momentum in several formats, all else equal: loss, throughput, and bytes beside the plan.

    The notes compared 8-bit with fp32 momentum on two different models; here model, steps, data and
    seeds are the same. Their two shapes are always planned too.
    """
    numbers = {"layers": layers, "hidden": hidden, "heads": heads, "intermediate": intermediate, "vocab": vocab}
    shapes = _Asked(shape, numbers).shapes()

    def task(seeds: tuple[int, ...]) -> Task:
        from memplan.lab.learning.matched import matched_8bit as experiment
        from memplan.lab.learning.matched import shape_named, with_steps
        from memplan.lab.learning.variants import Size

        name = "custom" if shapes else shape or "notes-28m"
        size = Size(**shapes, batch=8, length=128, steps=100) if shapes else shape_named(name)
        size = with_steps(size, steps, batch, length)
        return experiment(
            open_catalog(None), name, size, seeds, tuple(momentum or ()), device.value, train=not plan_only
        )

    answer("matched-8bit", task, LearningRun(seed, device, threads, out, plot, as_json, form, output, quiet))
