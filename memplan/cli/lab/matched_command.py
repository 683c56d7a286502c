"""``memplan lab matched-8bit``: the comparison of momentum formats that the notes call for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from memplan.cli.grouped_command import command, without
from memplan.cli.lab.experiment_options import RUN, RunOptions
from memplan.cli.lab.learning_options import answer, names_option
from memplan.cli.option_groups import MODEL, OutputOptions, option
from memplan.errors import InvalidFileError
from memplan.library.lookup import open_catalog

if TYPE_CHECKING:
    from memplan.lab.learning.variants import Task


def _number(flag: str, what: str, least: int = 1) -> Any:
    return option(MODEL, flag, f"{what}; in place of --shape.", min=least)


@dataclass(frozen=True, slots=True)
class MatchedOptions:
    """What is compared, on which model, and for how long."""

    shape: Annotated[str | None, option(MODEL, "--shape NAME", "tiny, notes-28m (default) or notes-282m.")] = None
    layers: Annotated[int | None, _number("--layers", "Layers")] = None
    hidden: Annotated[int | None, _number("--hidden", "Width")] = None
    heads: Annotated[int | None, _number("--heads", "Attention heads")] = None
    intermediate: Annotated[int | None, _number("--intermediate", "Width of the feed-forward part")] = None
    vocab: Annotated[int | None, _number("--vocab", "Size of the vocabulary", 256)] = None
    momentum: Annotated[list[str] | None, names_option("--momentum", "A format of momentum, beside fp32")] = None
    plan_only: Annotated[bool, option(RUN, "--plan-only", "Plan the bytes; train nothing.")] = False
    steps: Annotated[int | None, option(RUN, "--steps", "Optimizer steps, 100 by default.", min=1)] = None
    batch: Annotated[int | None, option(RUN, "--batch -b", "Sequences per step.", min=1)] = None
    length: Annotated[int | None, option(RUN, "--length -s", "Tokens of each.", min=2)] = None

    def shapes(self) -> dict[str, int]:
        """Return the numbers of a shape, all of them or none.

        Raises:
            InvalidFileError: Some are missing, or there is a name too.
        """
        numbers = {name: getattr(self, name) for name in ("layers", "hidden", "heads", "intermediate", "vocab")}
        given = {name: value for name, value in numbers.items() if value is not None}
        if given and self.shape is not None:
            raise InvalidFileError([f"--shape {self.shape}: give a name or {' '.join(_flags(given))}, not both"])
        missing = _flags(numbers.keys() - given.keys()) if given else []
        if missing:
            raise InvalidFileError([f"a model by its shapes needs {' and '.join(missing)} too"])
        return given


def _flags(names: Iterable[str]) -> list[str]:
    return [f"--{name}" for name in sorted(names)]


@command(example="memplan lab matched-8bit --shape tiny --plan-only")
def matched_8bit(
    matched: MatchedOptions, run: RunOptions, output: Annotated[OutputOptions, without("units", "catalog_path")]
) -> int:
    """Train one model with momentum in several formats, all else equal: loss, throughput, and bytes beside the plan.

    The notes compared 8-bit with fp32 momentum on two different models; here model, steps, data and
    seeds are the same. Their two shapes are always planned too.
    """
    shapes = matched.shapes()

    def task(seeds: tuple[int, ...]) -> Task:
        from memplan.lab.learning.matched import matched_8bit as experiment
        from memplan.lab.learning.matched import shape_named, with_steps
        from memplan.lab.learning.variants import Size

        name = "custom" if shapes else matched.shape or "notes-28m"
        size = Size(**shapes, batch=8, length=128, steps=100) if shapes else shape_named(name)
        size = with_steps(size, matched.steps, matched.batch, matched.length)
        momentum, train = tuple(matched.momentum or ()), not matched.plan_only
        return experiment(open_catalog(None), name, size, seeds, momentum, run.device.value, train=train)

    return answer("matched-8bit", task, run, output)
