"""Experiments of ``memplan lab`` that train: what formats of few bits do to learning."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

from memplan.cli.grouped_command import command, with_defaults
from memplan.cli.lab.experiment_options import NEEDS, RUN, LabOutput, RunOptions, run_experiment
from memplan.cli.option_groups import MODEL, OutputOptions, option
from memplan.documents.frozen_values import dataclass
from memplan.errors import InvalidFileError
from memplan.host.this_machine import require_torch
from memplan.library.lookup import open_catalog

if TYPE_CHECKING:
    from memplan.lab.learning.variants import Size


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


class Problem(StrEnum):  # of which typer takes several, as it does not of a Literal
    """What to learn."""

    teacher_student = "teacher-student"
    language_model = "language-model"


def _learn(
    name: str, run: RunOptions, output: OutputOptions, size: SizeOptions, *compared: Sequence[str] | None
) -> int:
    """Run the experiment of a module of that name, on what is compared; nothing said is all."""
    require_torch(NEEDS)
    experiment = getattr(import_module(f"memplan.lab.learning.{name}"), name)
    task = experiment(open_catalog(None), size.size(), run.seeds(), *(tuple(one or ()) for one in compared), run.device)
    return run_experiment(name.replace("_", "-"), task.parts, task.run, run, output)


@command(example="memplan lab dynamic-range --steps 20 --seed 0")
def dynamic_range(
    size: Annotated[SizeOptions, with_defaults(steps=150, layers=4)], run: RunOptions, output: LabOutput
) -> int:
    """Measure what Adam's second moment, Muon's momentum and Newton-Schulz' X span while a model learns."""
    return _learn("dynamic_range", run, output, size)


@command(example="memplan lab momentum-bits --momentum int4 --problem teacher-student")
def momentum_bits(
    *,
    momentum: Annotated[list[str] | None, names_option("--momentum", "A format of momentum, beside fp32")] = None,
    problem: Annotated[
        list[Problem] | None,
        option("Compared", "--problem NAME", f"{' or '.join(Problem)}; repeatable, both by default."),
    ] = None,
    size: SizeOptions,
    run: RunOptions,
    output: LabOutput,
) -> int:
    """Measure loss against bits, codebook, block and rounding of Muon's momentum, the notes' quantiser included."""
    return _learn("momentum_bits", run, output, size, momentum, [one.value for one in problem or ()])


@command(example="memplan lab weight-bits --steps 20 --seed 0")
def weight_bits(
    *,
    weights: Annotated[list[str] | None, names_option("--weights", "A format of weights, beside fp32")] = None,
    size: Annotated[SizeOptions, with_defaults(steps=100, layers=1, hidden=256, intermediate=256)],
    run: RunOptions,
    output: LabOutput,
) -> int:
    """Measure loss against format and rounding of the weights, which have no master copy."""
    return _learn("weight_bits", run, output, size, weights)


@command(example="memplan lab gradient-dtype --steps 20 --seed 0")
def gradient_dtype(
    *,
    gradient: Annotated[list[str] | None, names_option("--gradient", "A way to keep gradients, beside fp32")] = None,
    size: SizeOptions,
    run: RunOptions,
    output: LabOutput,
) -> int:
    """Measure loss against the dtype of gradients between backward and step, with a scale and by a plain cast."""
    return _learn("gradient_dtype", run, output, size, gradient)


@command(example="memplan lab adam-bits --steps 20 --seed 0")
def adam_bits(
    *,
    moment: Annotated[list[str] | None, names_option("--moment", "A way to store the second moment, beside fp32")] = (
        None
    ),
    size: SizeOptions,
    run: RunOptions,
    output: LabOutput,
) -> int:
    """Measure loss against bits, levels and range of Adam's second moment, the notes' quantiser included."""
    return _learn("adam_bits", run, output, size, moment)


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
def matched_8bit(matched: MatchedOptions, run: RunOptions, output: LabOutput) -> int:
    """Train one model with momentum in several formats, all else equal: loss, throughput, and bytes beside the plan.

    The notes compared 8-bit with fp32 momentum on two different models; here model, steps, data and
    seeds are the same. Their two shapes are always planned too.
    """
    shapes = matched.shapes()

    require_torch(NEEDS)
    from memplan.lab.learning.matched import matched_8bit as experiment
    from memplan.lab.learning.matched import shape_named, with_steps
    from memplan.lab.learning.variants import Size

    name = "custom" if shapes else matched.shape or "notes-28m"
    size = Size(**shapes, batch=8, length=128, steps=100) if shapes else shape_named(name)
    size = with_steps(size, matched.steps, matched.batch, matched.length)
    momentum, train = tuple(matched.momentum or ()), not matched.plan_only
    task = experiment(open_catalog(None), name, size, run.seeds(), momentum, run.device, train=train)
    return run_experiment("matched-8bit", task.parts, task.run, run, output)


LEARNING = (dynamic_range, momentum_bits, weight_bits, gradient_dtype, adam_bits, matched_8bit)
