"""``memplan emit``: a starting file for a trainer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import memplan
from memplan.cli.grouped_command import command, without
from memplan.cli.option_groups import DeviceOptions, ModelOptions, OutputOptions, option
from memplan.cli.output import deliver
from memplan.cli.training_options import TrainingOptions, job_options


@dataclass(frozen=True, slots=True)
class EmitOptions:
    """Whose file to write."""

    trainer: Annotated[
        str, option("File", "--as TRAINER", "Whose keys: axolotl, trl, llama-factory, torchtitan, deepspeed.")
    ] = "trl"


@command(example="memplan emit llama-8b --as axolotl --qlora -b 2 -s 4k --gpu rtx4090 -o axolotl.yaml")
def emit_command(
    model: Annotated[ModelOptions, without("beside")],
    device: Annotated[DeviceOptions, without("profile")],
    training: Annotated[TrainingOptions, without("stack")],
    file: EmitOptions,
    output: Annotated[OutputOptions, without("as_json", "form", "units", "quiet")],
) -> int:
    """How do I say that in my trainer's file? A starting file that reads back to the same bytes.

    Exit code 0: it is written; 3: that trainer has no keys for it.
    """
    options = job_options(output, training, model, device)
    deliver(memplan.emit(model.model, file.trainer, **options), output.file)
    return 0
