"""``memplan fit``: will this job fit on that GPU?"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import memplan
from memplan.cli.grid_options import GridOptions
from memplan.cli.grouped_command import command
from memplan.cli.option_groups import (
    DetailOptions,
    DeviceOptions,
    ModelOptions,
    OutputOptions,
    PlotOptions,
    VerdictOptions,
)
from memplan.cli.output import draw, emit, refuse_picture, show, shows_screen
from memplan.cli.training_options import MethodOptions, TrainingOptions, job_options
from memplan.errors import CannotAnswerError, InvalidFileError

if TYPE_CHECKING:
    from memplan.library.job_options import JobOptions


@command(example="memplan fit llama-8b --gpu rtx4090 --qlora -b 2 -s 4k")
def fit_command(
    model: ModelOptions,
    device: DeviceOptions,
    training: TrainingOptions,
    method: MethodOptions,
    grid: GridOptions,
    verdict: VerdictOptions,
    plot: PlotOptions,
    detail: DetailOptions,
    output: OutputOptions,
) -> int:
    """Will this training job fit on that GPU? Without --config: the usual methods.

    Exit code 0: it fits (or is TIGHT, without --strict); 1: it does not; 3: that cannot be said.
    """
    device = grid.counted(device)
    if _serves(method, training.settings or []):
        refuse_picture(plot, "serving has")
        _refuse_training_options(model, device, training, grid)
        return _served(model, device, method, verdict, output, detail)
    options = job_options(output, grid.over(training), model, device)
    if method.method not in (None, "pretrain"):
        options["set"] = [*(options["set"] or ()), f"method.stage={method.method}"]
    if grid.divides(model.model, options):
        return _divided(model, options, grid, plot, verdict, output, detail)
    if grid.rank != "worst":
        return _ranks(model, options, grid, plot, verdict, output)
    if options["config"] is None:
        every = memplan.fit(model.model, **options)
        if not shows_screen(output, detail):
            return show(every, output, verdict, plot)
        draw(every, plot)
        return emit(every.overview(output.unit, strict=verdict.strict), output, detail)
    if shows_screen(output, detail):
        from memplan.library.answers.planned_job import plan_at_a_glance as planned
    else:
        planned = memplan.plan
    return show(planned(model.model, **options), output, verdict, plot, detail)


def _divided(
    model: ModelOptions,
    options: JobOptions,
    grid: GridOptions,
    plot: PlotOptions,
    verdict: VerdictOptions,
    output: OutputOptions,
    detail: DetailOptions,
) -> int:
    """Answer for a model that is divided among GPUs."""
    from memplan.library.runs.gridded_model import plan_grid

    refuse_picture(plot, "a divided model has")
    return show(plan_grid(model.model, rank=grid.rank, **options), output, verdict, detail=detail)


def _ranks(
    model: ModelOptions,
    options: JobOptions,
    grid: GridOptions,
    plot: PlotOptions,
    verdict: VerdictOptions,
    output: OutputOptions,
) -> int:
    """Answer for the ranks of a job that several GPUs share."""
    if (options["gpus"] or 1) == 1 and options["config"] is None:
        raise InvalidFileError(["--rank chooses among several GPUs: add --gpus"])
    refuse_picture(plot, "ranks have")
    return show(memplan.plan_ranks(model.model, rank=grid.rank, **options), output, verdict)


def _serves(method: MethodOptions, settings: list[str]) -> bool:
    """Tell whether serving is asked for."""
    if method.method is not None:
        from memplan.library.runs.served_model import refuse_method

        refuse_method(method.method, settings)
    if method.method == "inference":
        return True
    given = [name for name in method.__slots__[1:] if getattr(method, name) is not None]
    if given:
        raise InvalidFileError(
            [f"--{given[0].replace('_', '-')} applies to --method inference only; for training use -b and -s"]
        )
    return False


def _refuse_training_options(
    model: ModelOptions, device: DeviceOptions, training: TrainingOptions, grid: GridOptions
) -> None:
    """Refuse what serving takes no account of."""
    if training != TrainingOptions():
        raise InvalidFileError(
            [
                "--method inference takes no options of training: set the number of sequences with --concurrency, their length "
                "with --context, and the weights' format with --weights"
            ]
        )
    given = {
        "--with": model.beside,
        "--trainer-version": model.trainer_version,
        "--profile": device.profile,
        "--host-memory": device.host_memory,
    }
    names = [name for name, value in given.items() if value is not None]
    if names:
        raise InvalidFileError([f"--method inference: {' and '.join(names)} would have no effect; leave out"])
    if grid.tp not in (None, 1) and device.gpus == 1:
        raise InvalidFileError([f"--method inference: --tp {grid.tp} takes --gpus {grid.tp}"])
    if replace(grid, tp=None, nodes=None, gpus_per_node=None) != GridOptions() or grid.tp not in (None, device.gpus):
        raise CannotAnswerError(
            "--method inference: GPUs share a model's matrices (--gpus N, or --tp N); other ways of serving are not modelled"
        )


def _served(
    model: ModelOptions,
    device: DeviceOptions,
    method: MethodOptions,
    verdict: VerdictOptions,
    output: OutputOptions,
    detail: DetailOptions,
) -> int:
    """Answer for a model that is served."""
    from memplan.library.lookup import find_model
    from memplan.library.runs.served_model import InferenceOptions, serve

    given = {name: value for name in method.__slots__[1:] if (value := getattr(method, name)) is not None}
    options = InferenceOptions(**given)
    catalog = output.catalog()
    answer = serve(
        find_model(model.model, model.shapes, catalog), options, catalog, device.gpu, device.gpu_memory, device.gpus
    )
    return show(answer, output, verdict, detail=detail)
