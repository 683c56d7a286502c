"""``memplan recommend``: which config and which Newton-Schulz precision, for each GPU."""

from __future__ import annotations

from typing import Annotated

import memplan
from memplan.cli.grouped_command import command, without
from memplan.cli.option_groups import DetailOptions, DeviceOptions, OutputOptions
from memplan.cli.output import emit
from memplan.cli.training_options import TrainingOptions, job_options


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
    answer = memplan.suggest_configs(**job_options(output, training, device=device))
    return emit(answer.document(output.unit, full=output.whole), output, detail)
