"""``memplan explain``: why this number, so that it can be redone by hand; ``memplan why``: why a run was out of memory."""

import sys
from pathlib import Path
from typing import Annotated

import memplan
from memplan.cli.grouped_command import command
from memplan.cli.option_groups import OUTPUT, DeviceOptions, ModelOptions, OutputOptions, option
from memplan.cli.output import emit
from memplan.cli.training_options import TrainingOptions, job_options
from memplan.documents.writing import say


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


LOGS = (".log", ".txt", ".out", ".err")
"""Endings of files that are torch's message and no model, where they stand in its place."""


@command(example="memplan why llama-8b --config lora --message train.log")
def why_command(
    *,
    model: ModelOptions,
    message: Annotated[
        Path, option(OUTPUT, "--message FILE", "A log with torch's message, or - for standard input.")
    ] = Path("-"),
    device: DeviceOptions,
    training: TrainingOptions,
    output: OutputOptions,
) -> int:
    """Why was it out of memory? Torch's message, read beside the plan of the job.

    Without MODEL, or with a log in its place: what the message alone tells. Without --gpu: a GPU of the capacity
    that it names.
    """
    options = job_options(output, training, model, device)
    job, log = model.model, message
    if job is not None and log == Path("-") and job.endswith(LOGS):
        log, job = Path(job), None
    if log == Path("-") and sys.stdin.isatty():
        say("paste torch's message, then press Ctrl-D")
    return emit(memplan.why(job, file=log, **options).document(output.unit), output)
