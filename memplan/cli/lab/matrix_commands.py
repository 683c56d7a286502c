"""``memplan lab orthogonality``, ``precision`` and ``variance``: experiments on matrices, without a model."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated

import typer

from memplan.cli import option_groups as o
from memplan.cli.lab.experiment_options import (
    PANEL,
    Device,
    DeviceOption,
    OutOption,
    PlotOption,
    SeedsOption,
    ThreadsOption,
    check_torch,
    chosen_seeds,
    experiment_document,
)
from memplan.cli.output import emit
from memplan.errors import UnitError

MATRIX = "Matrices"


class Measure(StrEnum):
    """Errors of ``X X^T`` against the identity."""

    frobenius = "frobenius"
    largest_element = "largest-element"


ShapesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--size",
        metavar="ROWS[xCOLUMNS]",
        help="The first is followed by iteration, others are looked at after five, with 3 seeds; repeatable.",
        rich_help_panel=MATRIX,
    ),
]
SchedulesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--schedule", metavar="NAME", help="Coefficients, all by default; repeatable.", rich_help_panel=MATRIX
    ),
]
ScheduleOption = Annotated[
    str, typer.Option("--schedule", metavar="NAME", help="Coefficients.", rich_help_panel=MATRIX)
]
IterationsOption = Annotated[
    int, typer.Option("--iterations", min=1, max=50, help="Of Newton-Schulz.", rich_help_panel=MATRIX)
]
DtypeOption = Annotated[str, typer.Option("--dtype", help="bf16, fp16 or fp32.", rich_help_panel=MATRIX)]
MeasureOption = Annotated[
    Measure, typer.Option("--measure", help="Error that the picture shows; tables have both.", rich_help_panel=PANEL)
]
WidthsOption = Annotated[
    list[int] | None,
    typer.Option(
        "--width",
        help="Side of the matrices, 1024 by default; repeatable: others take 2 seeds, and no fp16 and FP8.",
        rich_help_panel=MATRIX,
    ),
]
PrecisionsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--precision", metavar="NAME", help="Such as bf16, all by default; repeatable.", rich_help_panel=MATRIX
    ),
]
ProductsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--products",
        metavar="NAME",
        help="What is rounded: input (X), gram (factors of X X^T), all, all-rows (a scale a row); all by default.",
        rich_help_panel=MATRIX,
    ),
]
WidthOption = Annotated[int, typer.Option("--width", help="Side of the gradients.", rich_help_panel=MATRIX)]
SamplesOption = Annotated[
    int, typer.Option("--samples", min=2, max=100_000, help="Gradients for each seed.", rich_help_panel=MATRIX)
]
NoiseOption = Annotated[
    float, typer.Option("--noise", min=1e-6, max=1e6, help="Standard deviation.", rich_help_panel=MATRIX)
]


def orthogonality(
    size: ShapesOption = None,
    schedule: SchedulesOption = None,
    iterations: IterationsOption = 10,
    dtype: DtypeOption = "bf16",
    measure: MeasureOption = Measure.frobenius,
    seed: SeedsOption = None,
    device: DeviceOption = Device.cpu,
    threads: ThreadsOption = 0,
    out: OutOption = None,
    plot: PlotOption = None,
    as_json: o.JsonOption = False,
    form: o.FormatOption = o.OutputFormat.table,
    output: o.OutputOption = None,
    quiet: o.QuietOption = False,
) -> None:
    """How orthogonal Newton-Schulz makes a matrix: by iteration, schedule and shape, against time and QR.

    Two errors: Frobenius, norm(X X^T - I) / sqrt(rows), and the largest element of X X^T - I.
    """
    check_torch()
    from memplan.lab.matrices import orthogonality as lab

    seeds, shapes = chosen_seeds(seed), [_shape(text) for text in size or ()] or lab.SHAPES
    names, key = schedule or lab.NAMES, measure.value.replace("-", "_")
    document = experiment_document(
        "orthogonality",
        lab.parts(seeds, shapes),
        lambda told: lab.run(seeds, told, shapes, names, iterations, dtype, key, device.value),
        device=device.value,
        threads=threads,
        out=out,
        plot=plot,
        quiet=quiet,
    )
    raise typer.Exit(emit(document, form, as_json, output, quiet))


def precision(
    width: WidthsOption = None,
    names: PrecisionsOption = None,
    products: ProductsOption = None,
    schedule: ScheduleOption = "keller-jordan",
    iterations: IterationsOption = 5,
    seed: SeedsOption = None,
    device: DeviceOption = Device.cpu,
    threads: ThreadsOption = 0,
    out: OutOption = None,
    plot: PlotOption = None,
    as_json: o.JsonOption = False,
    form: o.FormatOption = o.OutputFormat.table,
    output: o.OutputOption = None,
    quiet: o.QuietOption = False,
) -> None:
    """Newton-Schulz in every precision: error, difference from fp32 and time; buffers and traffic beside."""
    check_torch()
    from memplan.lab.matrices import precision as lab

    seeds, widths = chosen_seeds(seed), width or list(lab.WIDTHS)
    chosen, which = names or list(lab.PRECISIONS), products or list(lab.PRODUCTS)
    document = experiment_document(
        "precision",
        lab.parts(seeds, widths, chosen, which),
        lambda told: lab.run(seeds, told, widths, chosen, which, iterations, schedule, device.value),
        device=device.value,
        threads=threads,
        out=out,
        plot=plot,
        quiet=quiet,
    )
    raise typer.Exit(emit(document, form, as_json, output, quiet))


def variance(
    width: WidthOption = 512,
    samples: SamplesOption = 100,
    noise: NoiseOption = 0.5,
    iterations: IterationsOption = 5,
    seed: SeedsOption = None,
    device: DeviceOption = Device.cpu,
    threads: ThreadsOption = 0,
    out: OutOption = None,
    plot: PlotOption = None,
    as_json: o.JsonOption = False,
    form: o.FormatOption = o.OutputFormat.table,
    output: o.OutputOption = None,
    quiet: o.QuietOption = False,
) -> None:
    """What orthogonalising noisy gradients does to their variance: the notes' table, and what it leaves out."""
    check_torch()
    from memplan.lab.matrices import variance as lab

    seeds = chosen_seeds(seed)
    document = experiment_document(
        "variance",
        lab.parts(seeds),
        lambda told: lab.run(seeds, told, width, samples, iterations, noise, device.value),
        device=device.value,
        threads=threads,
        out=out,
        plot=plot,
        quiet=quiet,
    )
    raise typer.Exit(emit(document, form, as_json, output, quiet))


def add_matrix_commands(lab: typer.Typer) -> None:
    """Add the commands to ``memplan lab``."""
    for command in (orthogonality, precision, variance):
        lab.command(command.__name__)(command)


def _shape(text: str) -> tuple[int, int]:
    """Return rows and columns of ``512`` or ``512x1024``."""
    sides = re.fullmatch(r"(\d{1,9})(?:x(\d{1,9}))?", text.strip())
    if sides is None:
        raise UnitError(f"--size: expected ROWS or ROWSxCOLUMNS, such as 512 or 512x1024, got {text!r}")
    return int(sides[1]), int(sides[2] or sides[1])
