"""``memplan recommend``: which config and which Newton-Schulz precision, for each GPU."""

from __future__ import annotations

from typing import Annotated

import memplan
from memplan.cli.grouped_command import command, without
from memplan.cli.option_groups import DeviceOptions, OutputOptions
from memplan.cli.output import emit
from memplan.cli.training_options import TrainingOptions, job_options


@command(example="memplan recommend --gpu rtx4090")
def recommend_command(
    device: Annotated[DeviceOptions, without("profile")],
    training: Annotated[
        TrainingOptions, without("config", "qlora", "lora", "full", "lora_rank", "optimizer", "settings")
    ],
    output: OutputOptions,
) -> int:
    """What should I train with on this GPU? The config that holds the most, and the precision of Newton-Schulz.

    Derived from the catalog and the evidence; what no measurement covers is said. Without --gpu: every GPU.
    """
    answer = memplan.suggest_configs(**job_options(output, training, device=device))
    return emit(answer.document(output.unit, full=output.whole), output)
