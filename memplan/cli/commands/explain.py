"""``memplan explain``: why this number, so that it can be redone by hand."""

from __future__ import annotations

import memplan
from memplan.cli.grouped_command import command
from memplan.cli.option_groups import DeviceOptions, ModelOptions, OutputOptions
from memplan.cli.output import emit
from memplan.cli.training_options import TrainingOptions, job_options


@command(example="memplan explain llama-8b --config tier1 --gpu rtx4090")
def explain_command(
    model: ModelOptions, device: DeviceOptions, training: TrainingOptions, output: OutputOptions
) -> int:
    """Why this number? Every formula with its values put in, and its source.

    Without --config: bf16-adamw. Without --gpu: an RTX 4090, which decides only the allowances.
    """
    options = job_options(output, training, model, device)
    if device.gpu is None and device.gpu_memory is None:
        options["gpu"] = "rtx4090"
    return emit(memplan.plan(model.model, **options).explanation(output.unit), output)
