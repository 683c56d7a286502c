"""What accelerate makes of Trainer's model on several GPUs, on a process group that sends nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType

from memplan.errors import CannotAnswerError
from memplan.step.states.parallel_shards import is_sharded
from memplan.trace.ranks.replicated import HostKept, Replica, process_group
from memplan.trace.recording.recorder import Recorder
from memplan.training.resolved import TrainingSetup


@contextmanager
def several_gpus(recorder: Recorder, setup: TrainingSetup) -> Iterator[None]:
    """Let accelerate take this process for the first of a setup's ranks, and its own code prepare the model."""
    parallel = setup.config.parallel
    if parallel.data == 1:
        yield
        return
    if is_sharded(parallel):
        raise CannotAnswerError("parallel.zero_stage: the code of a stack is traced with replicas only")
    made = torch.nn.parallel.DistributedDataParallel

    class Recorded(Replica):
        def __init__(self, module: Any, **options: Any) -> None:
            super().__init__(module, recorder, **options)

    torch.nn.parallel.DistributedDataParallel = Recorded  # type: ignore[assignment, misc]
    kind = Accelerator.distributed_type
    Accelerator.distributed_type = property(lambda _: DistributedType.MULTI_CPU)
    try:
        with process_group(parallel.data), HostKept():  # type: ignore[no-untyped-call]
            yield
    finally:
        torch.nn.parallel.DistributedDataParallel = made  # type: ignore[misc]
        Accelerator.distributed_type = kind
