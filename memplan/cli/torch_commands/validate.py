"""``memplan validate``: predicted beside measured, on this machine and for good."""

from __future__ import annotations

import signal
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from memplan.cli.grouped_command import command
from memplan.cli.option_groups import ModelOptions, OutputOptions, option
from memplan.cli.output import emit
from memplan.cli.training_options import TrainingOptions
from memplan.documents.frozen_values import dataclass
from memplan.documents.writing import say

_VALIDATE = "Validate"
EXIT_INTERRUPTED = 130


class DeviceChoice(StrEnum):
    """What runs the training steps."""

    cuda = "cuda"
    cpu = "cpu"


@dataclass(frozen=True, slots=True)
class ValidateOptions:
    """What is measured and how, or which records are read instead."""

    device: Annotated[
        DeviceChoice | None, option(_VALIDATE, "--device KIND", "cuda or cpu; the GPU where there is one.")
    ] = None
    small: Annotated[
        bool | None,
        option(_VALIDATE, "--small/--whole", "Cut the model to 2 layers of width 256 (as on the CPU), or not."),
    ] = None
    steps: Annotated[
        int, option(_VALIDATE, "--steps N", "Training steps; the first is not counted.", min=2, max=100)
    ] = 3
    processes: Annotated[
        int, option(_VALIDATE, "--processes N", "Processes on the CPU that share the model (FSDP2).", min=1, max=8)
    ] = 1
    patience: Annotated[int, option(_VALIDATE, "--patience N", "Seconds without progress that end a run.", min=1)] = 600
    record: Annotated[
        Path | None, option(_VALIDATE, "--record FILE", "Write the measurement; a folder with --plan.")
    ] = None
    replay: Annotated[
        Path | None, option(_VALIDATE, "--replay DIR|FILE", "Check records against today's predictions instead.")
    ] = None
    plan: Annotated[bool, option(_VALIDATE, "--plan", "Run what is not yet recorded of the device's whole plan.")] = (
        False
    )
    calibrate: Annotated[
        Path | None, option(_VALIDATE, "--calibrate DIR|FILE", "What records say of a machine; -o FILE is a --profile.")
    ] = None
    alloc_conf: Annotated[str, option(_VALIDATE, "--alloc-conf CONF", "As PYTORCH_CUDA_ALLOC_CONF.")] = ""


@command(example="memplan validate smollm2-135m --config muon --device cpu")
def validate_command(
    model: ModelOptions, validate: ValidateOptions, training: TrainingOptions, output: OutputOptions
) -> int:
    """Is that true here? Real training steps: predicted, traced and measured.

    Exit code 0: all agrees; 1: something does not; 3: nothing was measured.
    """
    from memplan.library.validation_runs import ValidateRequest, validate_document

    request = ValidateRequest(
        model=model.model,
        shapes=model.shapes,
        config=training.chosen or "tier1",
        overrides=training.overrides(),
        device=None if validate.device is None else validate.device.value,
        small=validate.small,
        steps=validate.steps,
        processes=validate.processes,
        patience=validate.patience,
        record=validate.record,
        replay=validate.replay,
        plan=validate.plan,
        calibrate=validate.calibrate,
        alloc_conf=validate.alloc_conf,
        command=" ".join(["memplan", *sys.argv[1:]]),
        quiet=output.quiet,
    )
    before = signal.signal(signal.SIGTERM, _interrupted)
    try:
        document = validate_document(request, output.catalog(), output.unit)
    except KeyboardInterrupt:
        say("interrupted; nothing is left running")
        return EXIT_INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)
    return emit(document, output)


def _interrupted(*_: Any) -> None:
    """Treat a request to end as an interrupt, so that everything is cleaned up."""
    raise KeyboardInterrupt
