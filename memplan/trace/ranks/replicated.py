"""Trace one rank of data-parallel training with replicas: torch's own DistributedDataParallel on ``meta`` tensors."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from memplan.model.model import Model
from memplan.model.spec import ModelSpec
from memplan.trace.jobs import optimizers
from memplan.trace.jobs.bundled_optimizer import short_loops
from memplan.trace.jobs.reference_job import Session, skipped_files
from memplan.trace.pretended_cuda.cuda_kernels import cuda_operators
from memplan.trace.pretended_cuda.idle_kernels import Idle
from memplan.trace.recording.assembly import assembled
from memplan.trace.recording.recorder import Recorder
from memplan.trace.recording.trace_result import Trace
from memplan.trace.recording.workspaces import cublas_workspace_bytes
from memplan.training.resolved import TrainingSetup

STEPS = 3
"""Buckets are made anew when the second step begins, in the order in which gradients came; the third is steady."""

_COPY = torch.ops.aten.copy_.default


class UnfilledHostTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps what a host tensor holds where it would be filled from ``meta``: sizes of buckets are read back."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func is _COPY and args[1].is_meta and not args[0].is_meta:
            return args[0]
        return func(*args, **(kwargs or {}))


class Replica(DistributedDataParallel):
    """A model inside DistributedDataParallel whose buckets are booked, and sent nowhere.

    Args:
        options: Of DistributedDataParallel.
    """

    def __init__(self, module: nn.Module, recorder: Recorder, **options: Any) -> None:
        # sizes of parameters, which ranks compare, are read back
        compared = patch("torch.nn.parallel.distributed._verify_param_shape_across_processes")
        with booked_buckets(recorder), compared:
            super().__init__(module, **options)
        self.register_comm_hook(None, unsent)
        self.logger = Idle()  # torch's own cannot time a device without memory
        self.recorder = recorder

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Run the model; torch would make new buckets just here too."""
        with booked_buckets(self.recorder):
            self.reducer._rebuild_buckets()
        return super().forward(*inputs, **options)  # type: ignore[no-untyped-call]


class ReplicatedSession(Session):
    """A reference model in training inside DistributedDataParallel, with torch's default buckets."""

    def __init__(self, spec: ModelSpec, setup: TrainingSetup, recorder: Recorder) -> None:
        super().__init__(spec, setup)
        self.watch(recorder)
        with recorder:
            # codes are buffers of the reference model, and frozen parameters of the libraries', which are never sent
            self.replica = Replica(self.model, recorder, forward_sync_buffers=False)

    def loss(self) -> Tensor:
        """Return the loss of one micro-batch."""
        batch = self.batch
        loss: Tensor = self.replica(batch.ids, batch.targets, batch.tables, batch.positions)
        return loss


@contextmanager
def booked_buckets(recorder: Recorder) -> Iterator[None]:
    """Book what is made as communication."""
    before = len(recorder.records)
    yield
    for record in recorder.records[before:]:
        record.component = "communication"


def unsent(state: object, bucket: GradBucket) -> Future[Tensor]:
    """Return a bucket as it is, in the form of a hook of DistributedDataParallel: without values there is nothing to send."""
    del state
    done: Future[Tensor] = Future()
    done.set_result(bucket.buffer())
    return done


# torch compares the annotations themselves, not their names.
unsent.__annotations__ = {"bucket": GradBucket, "return": Future[Tensor]}


@contextmanager
def process_group(ranks: int, rank: int = 0) -> Iterator[None]:
    """Set up a group of so many ranks, of which this process is one, and there is no other."""
    if "meta" not in dist.Backend.backend_capability["fake"]:
        dist.Backend.backend_capability["fake"].append("meta")
    dist.init_process_group("cpu:fake,meta:fake", rank=rank, world_size=ranks, store=FakeStore())
    group: Any = dist.group.WORLD
    group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    try:
        yield
    finally:
        dist.destroy_process_group()


def trace_replicated(
    model: Model, setup: TrainingSetup, *, compute_capability: str | None = None, workspaces: bool = True
) -> Trace:
    """Return the trace of one rank under ``zero_stage: 0``, whose last step is reported."""
    cublas = cublas_workspace_bytes(compute_capability) if compute_capability else 0
    recorder = Recorder(
        "meta",
        (__file__, str(Path(__file__).parent.with_name("tracer.py")), *skipped_files()),
        cublas_bytes=cublas,
        workspaces=workspaces,
    )
    with process_group(setup.config.parallel.data):
        with UnfilledHostTensors():  # type: ignore[no-untyped-call]
            session = ReplicatedSession(model.spec, setup, recorder)
        with UnfilledHostTensors(), optimizers.cuda_optimizer_paths(), cuda_operators(), short_loops(), recorder:  # type: ignore[no-untyped-call]
            for _ in range(STEPS):
                recorder.next_step()
                session.step(recorder)
    return assembled(recorder, model.spec.vocab_size, session.notes)
