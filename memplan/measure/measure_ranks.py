"""Measure one of several processes on the CPU that divide a model by torch's ``fully_shard``, over gloo.

What a rank takes is counted as for one process, less what gloo copies for itself.
"""

import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from memplan.measure.measure_cpu import measure_cpu
from memplan.measure.measured import Measurement, Progress
from memplan.measure.task import Task
from memplan.trace.ranks.sharded_trace import ShardedSession

LONGEST = timedelta(days=1)
"""Of a collective: whoever started the processes waits for a word of them, and ends all."""

SETTLES_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class RankTask:
    """What one of several processes measures."""

    task: Task
    rank: int
    meeting: str  # Path of a file by which they find each other, which is not there yet
    alloc_conf: str = ""  # As :class:`memplan.measure.task.Task` has it; the CPU has none

    def measured(self, progress: Progress) -> Measurement:
        """Return what the bundled loop's steps take of this rank's memory."""
        ranks = self.task.setup.config.parallel.shards
        progress("waiting for the other processes")
        dist.init_process_group("gloo", f"file://{self.meeting}", LONGEST, ranks, self.rank)
        with warnings.catch_warnings(), _settled_exchanges():
            # Logits are a view, as of any linear layer; nothing changes them in place.
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
            return measure_cpu(self.task, progress, _sharded)


def _sharded(task: Task) -> ShardedSession:
    """Return the job of this rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    session = ShardedSession(task.model.spec, task.setup, mesh, "cpu", "cpu")
    for module in session.model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(_Gathers())
            module.set_custom_reduce_scatter(_Reduces())
    return session


class _Gathers(DefaultAllGather):
    """torch's own gathering, which returns when gloo has let go of both buffers."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        """Gather at once: without streams there is nothing to run beside it."""
        del async_op
        with _let_go(output_tensor, input_tensor):
            super().__call__(output_tensor, input_tensor, group)


class _Reduces(DefaultReduceScatter):
    """torch's own reduction, which returns when gloo has let go of both buffers."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        """Reduce at once."""
        del async_op
        with _let_go(output_tensor, input_tensor):
            return super().__call__(output_tensor, input_tensor, group, op)


@contextmanager
def _settled_exchanges() -> Iterator[None]:
    """Let the bundled optimizer's collectives return when gloo has let go of what was sent."""
    names = ("all_to_all_single", "all_reduce")
    collectives = {name: getattr(dist, name) for name in names}

    def settled(collective: Any) -> Any:
        def call(*args: Any, **options: Any) -> None:
            with _let_go(*(arg for arg in args if isinstance(arg, torch.Tensor))):
                collective(*args, **options)

        return call

    for name, collective in collectives.items():
        setattr(dist, name, settled(collective))
    try:
        yield
    finally:
        for name, collective in collectives.items():
            setattr(dist, name, collective)


@contextmanager
def _let_go(*tensors: Tensor) -> Iterator[None]:
    """Wait at the end until nobody has the tensors or their storages who did not before.

    gloo's thread lets go of what it has sent a moment after the collective has returned, untold where it is the last.
    """
    before = _users(tensors)
    yield
    deadline = time.monotonic() + SETTLES_SECONDS
    while _users(tensors) > before:
        if time.monotonic() > deadline:
            raise RuntimeError("gloo keeps a buffer that it has sent")
        time.sleep(0)


def _users(tensors: tuple[Any, ...]) -> int:
    """Count who has the tensors: in C++ themselves and their storages, and in Python, which C++ lets go of last."""
    storages: int = sum(torch._C._storage_Use_Count(t.untyped_storage()._cdata) for t in tensors)
    return storages + sum(int(t._use_count()) + sys.getrefcount(t) for t in tensors)
