"""``memplan fit``: will this job fit on that GPU?"""

from __future__ import annotations

import memplan
from memplan.cli.grouped_command import command
from memplan.cli.option_groups import (
    DetailOptions,
    DeviceOptions,
    ModelOptions,
    OutputOptions,
    PlotOptions,
    VerdictOptions,
)
from memplan.cli.output import draw, emit, shows_screen
from memplan.cli.training_options import TrainingOptions, job_options


@command(example="memplan fit llama-8b --gpu rtx4090 --qlora -b 2 -s 4k")
def fit_command(
    model: ModelOptions,
    device: DeviceOptions,
    training: TrainingOptions,
    verdict: VerdictOptions,
    plot: PlotOptions,
    detail: DetailOptions,
    output: OutputOptions,
) -> int:
    """Will this training job fit on that GPU? Without --config: the methods that people choose from.

    Exit code 0: it fits (or is TIGHT, without --strict); 1: it does not.
    """
    options = job_options(output, training, model, device)
    if options["config"] is None:
        every = memplan.fit(model.model, **options)
        draw(every, plot)
        if shows_screen(output, detail):
            return emit(every.overview(output.unit, strict=verdict.strict), output, detail)
        return emit(every.document(output.unit, strict=verdict.strict, full=output.whole), output)
    answer = memplan.plan(model.model, **options)
    draw(answer, plot)
    return emit(answer.document(output.unit, strict=verdict.strict, full=output.whole), output, detail)
