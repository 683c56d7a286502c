"""Experiments of ``memplan lab`` that train: what formats of few bits do to learning."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

from memplan.cli.grouped_command import add_command, command, with_defaults, without
from memplan.cli.lab.experiment_options import RunOptions
from memplan.cli.lab.learning_options import SizeOptions, answer, names_option
from memplan.cli.lab.matched_command import matched_8bit
from memplan.cli.option_groups import OutputOptions, option
from memplan.library.lookup import open_catalog

if TYPE_CHECKING:
    import typer

    from memplan.lab.learning.variants import Task

LabOutput = Annotated[OutputOptions, without("units", "catalog_path")]


class Problem(StrEnum):
    """What to learn."""

    teacher_student = "teacher-student"
    language_model = "language-model"


@dataclass(frozen=True, slots=True)
class MomentumOptions:
    """What is compared."""

    momentum: Annotated[list[str] | None, names_option("--momentum", "A format of momentum, beside fp32")] = None
    problem: Annotated[
        list[Problem] | None,
        option("Compared", "--problem NAME", f"{' or '.join(Problem)}; repeatable, both by default."),
    ] = None


@dataclass(frozen=True, slots=True)
class WeightsOptions:
    """What is compared."""

    weights: Annotated[list[str] | None, names_option("--weights", "A format of weights, beside fp32")] = None


@dataclass(frozen=True, slots=True)
class GradientOptions:
    """What is compared."""

    gradient: Annotated[list[str] | None, names_option("--gradient", "A way to keep gradients, beside fp32")] = None


@dataclass(frozen=True, slots=True)
class MomentOptions:
    """What is compared."""

    moment: Annotated[list[str] | None, names_option("--moment", "A way to store the second moment, beside fp32")] = (
        None
    )


@command(example="memplan lab dynamic-range --steps 20 --seed 0")
def dynamic_range(
    size: Annotated[SizeOptions, with_defaults(steps=150, layers=4)], run: RunOptions, output: LabOutput
) -> int:
    """Measure what Adam's second moment, Muon's momentum and Newton-Schulz' X span while a model learns."""

    def task(seeds: tuple[int, ...]) -> Task:
        from memplan.lab.learning.dynamic_range import dynamic_range as experiment

        return experiment(open_catalog(None), size.size(), seeds, run.device.value)

    return answer("dynamic-range", task, run, output)


@command(example="memplan lab momentum-bits --momentum int4 --problem teacher-student")
def momentum_bits(compared: MomentumOptions, size: SizeOptions, run: RunOptions, output: LabOutput) -> int:
    """Measure loss against bits, codebook, block and rounding of Muon's momentum, the notes' quantiser included."""

    def task(seeds: tuple[int, ...]) -> Task:
        from memplan.lab.learning.momentum_bits import momentum_bits as experiment

        problems = tuple(one.value for one in compared.problem or ())
        momentum = tuple(compared.momentum or ())
        return experiment(open_catalog(None), size.size(), seeds, momentum, problems, run.device.value)

    return answer("momentum-bits", task, run, output)


@command(example="memplan lab weight-bits --steps 20 --seed 0")
def weight_bits(
    compared: WeightsOptions,
    size: Annotated[SizeOptions, with_defaults(steps=100, layers=1, hidden=256, intermediate=256)],
    run: RunOptions,
    output: LabOutput,
) -> int:
    """Measure loss against format and rounding of the weights, which have no master copy."""

    def task(seeds: tuple[int, ...]) -> Task:
        from memplan.lab.learning.weight_bits import weight_bits as experiment

        return experiment(open_catalog(None), size.size(), seeds, tuple(compared.weights or ()), run.device.value)

    return answer("weight-bits", task, run, output)


@command(example="memplan lab gradient-dtype --steps 20 --seed 0")
def gradient_dtype(compared: GradientOptions, size: SizeOptions, run: RunOptions, output: LabOutput) -> int:
    """Measure loss against the dtype of gradients between backward and step, with a scale and by a plain cast."""

    def task(seeds: tuple[int, ...]) -> Task:
        from memplan.lab.learning.gradient_dtype import gradient_dtype as experiment

        return experiment(open_catalog(None), size.size(), seeds, tuple(compared.gradient or ()), run.device.value)

    return answer("gradient-dtype", task, run, output)


@command(example="memplan lab adam-bits --steps 20 --seed 0")
def adam_bits(compared: MomentOptions, size: SizeOptions, run: RunOptions, output: LabOutput) -> int:
    """Measure loss against bits, levels and range of Adam's second moment, the notes' quantiser included."""

    def task(seeds: tuple[int, ...]) -> Task:
        from memplan.lab.learning.adam_bits import adam_bits as experiment

        return experiment(open_catalog(None), size.size(), seeds, tuple(compared.moment or ()), run.device.value)

    return answer("adam-bits", task, run, output)


def add_learning_commands(lab: typer.Typer) -> None:
    """Add the commands to ``memplan lab``."""
    for function in (dynamic_range, momentum_bits, weight_bits, gradient_dtype, adam_bits, matched_8bit):
        add_command(lab, function.__name__.replace("_", "-"), function)
