"""Options of the experiments that train, and how one of them becomes an answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from memplan.cli.lab.experiment_options import RUN, RunOptions, check_torch, run_experiment
from memplan.cli.option_groups import MODEL, OutputOptions, option

if TYPE_CHECKING:
    from memplan.lab.learning.variants import Size, Task


@dataclass(frozen=True, slots=True)
class SizeOptions:
    """A tiny model, and how long it is trained."""

    steps: Annotated[int, option(RUN, "--steps", "Optimizer steps.", min=1)] = 120
    batch: Annotated[int, option(RUN, "--batch -b", "Sequences per step.", min=1)] = 8
    length: Annotated[int, option(RUN, "--length -s", "Tokens of each.", min=2)] = 128
    layers: Annotated[int, option(MODEL, "--layers", "Layers.", min=1)] = 2
    hidden: Annotated[int, option(MODEL, "--hidden", "Width.", min=1)] = 128
    heads: Annotated[int, option(MODEL, "--heads", "Attention heads.", min=1)] = 4
    intermediate: Annotated[int, option(MODEL, "--intermediate", "Width of the feed-forward part.", min=1)] = 352

    def size(self) -> Size:
        """Return the size as experiments take it."""
        from memplan.lab.learning.variants import Size

        return Size(self.layers, self.hidden, self.heads, self.intermediate, 256, self.batch, self.length, self.steps)


def names_option(flag: str, what: str) -> Any:
    """Return an option that takes names of what is compared."""
    return option("Compared", f"{flag} NAME", f"{what}; repeatable, all by default.")


def answer(title: str, task: Callable[[tuple[int, ...]], Task], options: RunOptions, output: OutputOptions) -> int:
    """Run an experiment and write its answer; ``task`` imports torch."""
    check_torch()
    ready = task(options.seeds())
    return run_experiment(title, ready.parts, ready.run, options, output)
