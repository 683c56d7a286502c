"""``memplan lab orthogonality``, ``precision`` and ``variance``: experiments on matrices, without a model."""

import re
from typing import Annotated, Literal

from memplan.cli.grouped_command import command
from memplan.cli.lab.experiment_options import NEEDS, LabOutput, RunOptions, run_experiment
from memplan.cli.option_groups import option
from memplan.documents.frozen_values import dataclass
from memplan.errors import UnitError
from memplan.host.this_machine import require_torch

MATRIX = "Matrices"


_ITERATIONS = option(MATRIX, "--iterations", "Of Newton-Schulz.", min=1, max=50)


@dataclass(frozen=True, slots=True)
class OrthogonalityOptions:
    """Which matrices, under which schedules."""

    size: Annotated[
        list[str] | None,
        option(
            MATRIX,
            "--size ROWS[xCOLUMNS]",
            "The first is followed by iteration, others are looked at after five, with 3 seeds; repeatable.",
        ),
    ] = None
    schedule: Annotated[
        list[str] | None, option(MATRIX, "--schedule NAME", "Coefficients, all by default; repeatable.")
    ] = None
    iterations: Annotated[int, _ITERATIONS] = 10
    dtype: Annotated[str, option(MATRIX, "--dtype NAME", "bf16, fp16 or fp32.")] = "bf16"
    measure: Annotated[
        Literal["frobenius", "largest-element"],
        option(MATRIX, "--measure ERROR", "That the picture shows, frobenius or largest-element; tables have both."),
    ] = "frobenius"


@dataclass(frozen=True, slots=True)
class PrecisionOptions:
    """Which matrices, in which precisions."""

    width: Annotated[
        list[int] | None,
        option(
            MATRIX,
            "--width",
            "Side of the matrices, 1024 by default; repeatable: others take 2 seeds, and no fp16 and FP8.",
        ),
    ] = None
    names: Annotated[
        list[str] | None, option(MATRIX, "--precision NAME", "Such as bf16, all by default; repeatable.")
    ] = None
    products: Annotated[
        list[str] | None,
        option(
            MATRIX,
            "--products NAME",
            "What is rounded: input (X), gram (factors of X X^T), all, all-rows (a scale a row); all by default.",
        ),
    ] = None
    schedule: Annotated[str, option(MATRIX, "--schedule NAME", "Coefficients.")] = "keller-jordan"
    iterations: Annotated[int, _ITERATIONS] = 5


@dataclass(frozen=True, slots=True)
class VarianceOptions:
    """Which gradients, and their noise."""

    width: Annotated[int, option(MATRIX, "--width", "Side of the gradients.")] = 512
    samples: Annotated[int, option(MATRIX, "--samples", "Gradients for each seed.", min=2, max=100_000)] = 100
    noise: Annotated[float, option(MATRIX, "--noise", "Standard deviation.", min=1e-6, max=1e6)] = 0.5
    iterations: Annotated[int, _ITERATIONS] = 5


@command(example="memplan lab orthogonality --size 128 --seed 0")
def orthogonality(matrices: OrthogonalityOptions, run: RunOptions, output: LabOutput) -> int:
    """How orthogonal Newton-Schulz makes a matrix: by iteration, schedule and shape, against time and QR.

    Two errors: Frobenius, norm(X X^T - I) / sqrt(rows), and the largest element of X X^T - I.
    """
    require_torch(NEEDS)
    from memplan.lab.matrices import orthogonality as lab

    seeds, shapes = run.seeds(), [_shape(text) for text in matrices.size or ()] or lab.SHAPES
    names, key = matrices.schedule or lab.NAMES, matrices.measure.replace("-", "_")
    return run_experiment(
        "orthogonality",
        lab.parts(seeds, shapes),
        lambda told: lab.run(seeds, told, shapes, names, matrices.iterations, matrices.dtype, key, run.device),
        run,
        output,
    )


@command(example="memplan lab precision --width 256 --precision bf16")
def precision(matrices: PrecisionOptions, run: RunOptions, output: LabOutput) -> int:
    """Newton-Schulz in every precision: error, difference from fp32 and time; buffers and traffic beside."""
    require_torch(NEEDS)
    from memplan.lab.matrices import precision as lab

    seeds, widths = run.seeds(), matrices.width or list(lab.WIDTHS)
    chosen, which = matrices.names or list(lab.PRECISIONS), matrices.products or list(lab.PRODUCTS)
    return run_experiment(
        "precision",
        lab.parts(seeds, widths, chosen, which),
        lambda told: lab.run(seeds, told, widths, chosen, which, matrices.iterations, matrices.schedule, run.device),
        run,
        output,
    )


@command(example="memplan lab variance --width 128 --samples 20")
def variance(matrices: VarianceOptions, run: RunOptions, output: LabOutput) -> int:
    """What orthogonalising noisy gradients does to their variance: the notes' table, and what it leaves out."""
    require_torch(NEEDS)
    from memplan.lab.matrices import variance as lab

    seeds = run.seeds()
    return run_experiment(
        "variance",
        lab.parts(seeds),
        lambda told: lab.run(
            seeds, told, matrices.width, matrices.samples, matrices.iterations, matrices.noise, run.device
        ),
        run,
        output,
    )


def _shape(text: str) -> tuple[int, int]:
    """Return rows and columns of ``512`` or ``512x1024``."""
    sides = re.fullmatch(r"(\d{1,9})(?:x(\d{1,9}))?", text.strip())
    if sides is None:
        raise UnitError(f"--size: expected ROWS or ROWSxCOLUMNS, such as 512 or 512x1024, got {text!r}")
    return int(sides[1]), int(sides[2] or sides[1])
