"""``memplan compare``: configs and GPUs side by side; ``memplan recommend``: what to train with, for each GPU."""

from typing import Annotated

import memplan
from memplan.cli.grid_options import GridOptions
from memplan.cli.grouped_command import command, without
from memplan.cli.option_groups import (
    DEVICE,
    TRAINING,
    DetailOptions,
    DeviceOptions,
    ModelOptions,
    OutputOptions,
    PlotOptions,
    VerdictOptions,
    option,
)
from memplan.cli.output import Waiting, show
from memplan.cli.training_options import TrainingOptions, job_options


@command(example="memplan compare llama-8b -c qlora -c tier3 --gpu rtx4090")
def compare_command(
    *,
    model: ModelOptions,
    gpu: Annotated[
        list[str] | None, option(DEVICE, "--gpu -g NAME", "A GPU of the catalog, or local; repeat it for each.")
    ] = None,
    configs: Annotated[
        list[str] | None, option(TRAINING, "--config -c NAME|FILE", "A training config; repeat it for each.")
    ] = None,
    device: Annotated[DeviceOptions, without("gpu", "profile")],
    training: Annotated[TrainingOptions, without("config", "qlora", "lora", "full")],
    grid: Annotated[GridOptions, without("rank")],
    verdict: VerdictOptions,
    plot: PlotOptions,
    detail: DetailOptions,
    output: OutputOptions,
) -> int:
    """How do these compare? Configs and GPUs side by side, component by component, differences marked.

    Without --config: qlora, lora and bf16-adamw; a trainer's file comes first. Exit code 0: at least one fits; 1: none does.
    """
    from memplan.library.lookup.trainer_files import is_trainer_file

    own = [model.model] if model.model is not None and is_trainer_file(model.model) else []
    every = [*own, *(configs or ["qlora", "lora", "bf16-adamw"])]
    options = job_options(output, grid.over(training), model, grid.counted(device), configs=tuple(every))
    answer = memplan.compare(model.model, every, on=gpu or (), **options)
    return show(answer, output, verdict, plot, detail)


@command(example="memplan recommend --gpu rtx4090")
def recommend_command(
    device: Annotated[DeviceOptions, without("profile")],
    training: Annotated[
        TrainingOptions, without("config", "qlora", "lora", "full", "lora_rank", "optimizer", "settings")
    ],
    detail: DetailOptions,
    output: OutputOptions,
) -> int:
    """What should I train with on this GPU? The largest recent model for adapters, for all weights, as an experiment.

    Derived from the catalog and the evidence; -v adds the precision of Newton-Schulz and what nobody has measured.
    Without --gpu: every GPU.
    """
    with Waiting("recommend") as waiting:
        answer = memplan.suggest_configs(progress=waiting, **job_options(output, training, device=device))
    return show(answer, output, detail=detail)
