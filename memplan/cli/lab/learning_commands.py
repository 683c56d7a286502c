"""Experiments of ``memplan lab`` that train: what formats of few bits do to learning."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from memplan.cli import option_groups as o
from memplan.cli.lab.experiment_options import PANEL, OutOption, PlotOption, SeedsOption
from memplan.cli.lab.learning_options import (
    BatchOption,
    Device,
    DeviceOption,
    GradientOption,
    HeadsOption,
    HiddenOption,
    IntermediateOption,
    LayersOption,
    LearningRun,
    LengthOption,
    MomentOption,
    MomentumOption,
    StepsOption,
    ThreadsOption,
    WeightsOption,
    answer,
)
from memplan.cli.lab.matched_command import matched_8bit
from memplan.library.lookup import open_catalog

if TYPE_CHECKING:
    from memplan.lab.learning.variants import Task


class Problem(StrEnum):
    """What to learn."""

    teacher_student = "teacher-student"
    language_model = "language-model"


def dynamic_range(
    steps: StepsOption = 150,
    seed: SeedsOption = None,
    batch: BatchOption = 8,
    length: LengthOption = 128,
    layers: LayersOption = 4,
    hidden: HiddenOption = 128,
    heads: HeadsOption = 4,
    intermediate: IntermediateOption = 352,
    device: DeviceOption = Device.cpu,
    threads: ThreadsOption = 0,
    out: OutOption = None,
    plot: PlotOption = None,
    as_json: o.JsonOption = False,
    form: o.FormatOption = o.OutputFormat.table,
    output: o.OutputOption = None,
    quiet: o.QuietOption = False,
) -> None:
    """Measure what Adam's second moment, Muon's momentum and Newton-Schulz' X span while a model learns."""

    def task(seeds: tuple[int, ...]) -> Task:
        from memplan.lab.learning.dynamic_range import dynamic_range as experiment
        from memplan.lab.learning.variants import Size

        size = Size(layers, hidden, heads, intermediate, 256, batch, length, steps)
        return experiment(open_catalog(None), size, seeds, device.value)

    answer("dynamic-range", task, LearningRun(seed, device, threads, out, plot, as_json, form, output, quiet))


def momentum_bits(
    momentum: MomentumOption = None,
    problem: Annotated[
        list[Problem] | None,
        typer.Option("--problem", help="What to learn; repeatable, both by default.", rich_help_panel=PANEL),
    ] = None,
    steps: StepsOption = 120,
    seed: SeedsOption = None,
    batch: BatchOption = 8,
    length: LengthOption = 128,
    layers: LayersOption = 2,
    hidden: HiddenOption = 128,
    heads: HeadsOption = 4,
    intermediate: IntermediateOption = 352,
    device: DeviceOption = Device.cpu,
    threads: ThreadsOption = 0,
    out: OutOption = None,
    plot: PlotOption = None,
    as_json: o.JsonOption = False,
    form: o.FormatOption = o.OutputFormat.table,
    output: o.OutputOption = None,
    quiet: o.QuietOption = False,
) -> None:
    """Measure loss against bits, codebook, block and rounding of Muon's momentum, the notes' quantiser included."""

    def task(seeds: tuple[int, ...]) -> Task:
        from memplan.lab.learning.momentum_bits import momentum_bits as experiment
        from memplan.lab.learning.variants import Size

        size = Size(layers, hidden, heads, intermediate, 256, batch, length, steps)
        problems = tuple(one.value for one in problem or ())
        return experiment(open_catalog(None), size, seeds, tuple(momentum or ()), problems, device.value)

    answer("momentum-bits", task, LearningRun(seed, device, threads, out, plot, as_json, form, output, quiet))


def weight_bits(
    weights: WeightsOption = None,
    steps: StepsOption = 100,
    seed: SeedsOption = None,
    batch: BatchOption = 8,
    length: LengthOption = 128,
    layers: LayersOption = 1,
    hidden: HiddenOption = 256,
    heads: HeadsOption = 4,
    intermediate: IntermediateOption = 256,
    device: DeviceOption = Device.cpu,
    threads: ThreadsOption = 0,
    out: OutOption = None,
    plot: PlotOption = None,
    as_json: o.JsonOption = False,
    form: o.FormatOption = o.OutputFormat.table,
    output: o.OutputOption = None,
    quiet: o.QuietOption = False,
) -> None:
    """Measure loss against format and rounding of the weights, which have no master copy."""

    def task(seeds: tuple[int, ...]) -> Task:
        from memplan.lab.learning.variants import Size
        from memplan.lab.learning.weight_bits import weight_bits as experiment

        size = Size(layers, hidden, heads, intermediate, 256, batch, length, steps)
        return experiment(open_catalog(None), size, seeds, tuple(weights or ()), device.value)

    answer("weight-bits", task, LearningRun(seed, device, threads, out, plot, as_json, form, output, quiet))


def gradient_dtype(
    gradient: GradientOption = None,
    steps: StepsOption = 120,
    seed: SeedsOption = None,
    batch: BatchOption = 8,
    length: LengthOption = 128,
    layers: LayersOption = 2,
    hidden: HiddenOption = 128,
    heads: HeadsOption = 4,
    intermediate: IntermediateOption = 352,
    device: DeviceOption = Device.cpu,
    threads: ThreadsOption = 0,
    out: OutOption = None,
    plot: PlotOption = None,
    as_json: o.JsonOption = False,
    form: o.FormatOption = o.OutputFormat.table,
    output: o.OutputOption = None,
    quiet: o.QuietOption = False,
) -> None:
    """Measure loss against the dtype of gradients between backward and step, with a scale and by a plain cast."""

    def task(seeds: tuple[int, ...]) -> Task:
        from memplan.lab.learning.gradient_dtype import gradient_dtype as experiment
        from memplan.lab.learning.variants import Size

        size = Size(layers, hidden, heads, intermediate, 256, batch, length, steps)
        return experiment(open_catalog(None), size, seeds, tuple(gradient or ()), device.value)

    answer("gradient-dtype", task, LearningRun(seed, device, threads, out, plot, as_json, form, output, quiet))


def adam_bits(
    moment: MomentOption = None,
    steps: StepsOption = 120,
    seed: SeedsOption = None,
    batch: BatchOption = 8,
    length: LengthOption = 128,
    layers: LayersOption = 2,
    hidden: HiddenOption = 128,
    heads: HeadsOption = 4,
    intermediate: IntermediateOption = 352,
    device: DeviceOption = Device.cpu,
    threads: ThreadsOption = 0,
    out: OutOption = None,
    plot: PlotOption = None,
    as_json: o.JsonOption = False,
    form: o.FormatOption = o.OutputFormat.table,
    output: o.OutputOption = None,
    quiet: o.QuietOption = False,
) -> None:
    """Measure loss against bits, levels and range of Adam's second moment, the notes' quantiser included."""

    def task(seeds: tuple[int, ...]) -> Task:
        from memplan.lab.learning.adam_bits import adam_bits as experiment
        from memplan.lab.learning.variants import Size

        size = Size(layers, hidden, heads, intermediate, 256, batch, length, steps)
        return experiment(open_catalog(None), size, seeds, tuple(moment or ()), device.value)

    answer("adam-bits", task, LearningRun(seed, device, threads, out, plot, as_json, form, output, quiet))


def add_learning_commands(lab: typer.Typer) -> None:
    """Add the commands to ``memplan lab``."""
    for name, command in (
        ("dynamic-range", dynamic_range),
        ("momentum-bits", momentum_bits),
        ("weight-bits", weight_bits),
        ("gradient-dtype", gradient_dtype),
        ("adam-bits", adam_bits),
        ("matched-8bit", matched_8bit),
    ):
        lab.command(name)(command)
