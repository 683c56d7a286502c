"""One process of a job on several GPUs: its groups send nothing, and torch's own code around them runs.

A script joins its group as under ``torchrun``. Every group is torch's ``fake`` one, whose collectives leave what they
are given as it is; buffers that FSDP2, DistributedDataParallel or the script make for them are those of a real run.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch.distributed import device_mesh, distributed_c10d
from torch.distributed.tensor import DTensor, _dispatch
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel, distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

from memplan.dryrun.terms.outcome import Ranks
from memplan.dryrun.watching.live_recorder import LiveRecorder
from memplan.trace.pretended_cuda.fake_devices import replaced
from memplan.trace.pretended_cuda.idle_kernels import Idle
from memplan.trace.ranks.fully_shard import ShardedRecorder
from memplan.trace.ranks.replicated import booked_buckets, unsent

PLACES = ("device", "is_cuda", "is_cpu", "is_meta")
"""What tells where a tensor is, which C++ would answer of a distributed one."""
BACKENDS = "cpu:fake,cuda:fake,meta:fake"
COLLECTIVES = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_to_all", "all_to_all_single", "broadcast", "reduce",
    "reduce_scatter", "reduce_scatter_tensor",
)  # fmt: skip
"""What a script may go on beside: the first argument of each is what it writes into."""


class RankRecorder(LiveRecorder, ShardedRecorder):  # type: ignore[no-untyped-call]
    """A live recorder that follows the parts of distributed tensors, and storages that change their size."""

    def _counts(self, storage: torch.UntypedStorage) -> bool:
        return storage.device.type == "meta"


@contextmanager
def pretended_ranks(ranks: Ranks, recorder: RankRecorder) -> Iterator[None]:
    """Let a script find itself one of several processes while it runs inside.

    Args:
        ranks: How many there are, and which one it is.
    """
    capable = dist.Backend.backend_capability["fake"]
    capable += [device for device in ("meta",) if device not in capable]
    with ExitStack() as stack:
        stack.enter_context(replaced_variables(ranks.environment))
        for module in (dist, distributed_c10d, device_mesh):
            for name, function in _group_calls(ranks).items():
                if hasattr(module, name):
                    stack.enter_context(replaced(module, {name: function}))
        stack.enter_context(replaced(DistributedDataParallel, _replica_calls(recorder)))
        stack.enter_context(replaced(distributed, {"_verify_param_shape_across_processes": lambda *_: True}))
        stack.enter_context(replaced(_dispatch, {"run_dtensor_rng_op": _drawn}))
        stack.enter_context(replaced(DTensor, {name: _of_the_part(name) for name in PLACES}))
        stack.enter_context(recorder.following())
        yield


@contextmanager
def replaced_variables(values: dict[str, str]) -> Iterator[None]:
    """Set variables of the environment while what is inside runs."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _group_calls(processes: Ranks) -> dict[str, Callable[..., Any]]:
    """Return what makes groups, and tells of them."""
    join, make = distributed_c10d.init_process_group, distributed_c10d.new_group
    requested = ["nccl"]

    def joined(backend: Any = None, *_: Any, **__: Any) -> None:
        requested[0] = str(backend or requested[0])
        join(BACKENDS, rank=processes.rank, world_size=processes.count, store=FakeStore())
        group: Any = dist.group.WORLD
        group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)

    def made(ranks: Any = None, *_: Any, group_desc: Any = None, **__: Any) -> Any:
        return make(ranks, backend=BACKENDS, group_desc=group_desc)

    def gathered_by_all(object_list: list[Any], obj: Any, *_: Any, **__: Any) -> None:
        object_list[:] = [obj] * len(object_list)

    def gathered(obj: Any, object_gather_list: list[Any] | None = None, *_: Any, **__: Any) -> None:
        gathered_by_all(object_gather_list or [], obj)

    def scattered(
        scatter_object_output_list: list[Any], scatter_object_input_list: list[Any] | None = None, *_: Any, **__: Any
    ) -> None:
        given = scatter_object_input_list
        scatter_object_output_list[0] = given[processes.rank] if given else None

    return {
        **{name: _with_result(getattr(distributed_c10d, name)) for name in COLLECTIVES},
        "init_process_group": joined,
        "new_group": made,
        "all_gather_object": gathered_by_all,
        "gather_object": gathered,
        "broadcast_object_list": lambda *_, **__: None,
        "scatter_object_list": scattered,
        "get_backend": lambda *_: requested[0],
        "is_nccl_available": lambda: True,
    }


def _with_result(collective: Callable[..., Any]) -> Callable[..., Any]:
    """Return a collective whose future has what was written, as NCCL's has: hooks of DistributedDataParallel go on from it."""
    first = next(iter(signature(collective).parameters))

    def sent(*args: Any, **options: Any) -> Any:
        if collective(*args, **options) is None:
            return None
        done: Future[Any] = Future()
        done.set_result([args[0] if args else options[first]])
        return _create_work_from_future(done)

    return sent


def _of_the_part(name: str) -> property:
    return property(lambda tensor: getattr(tensor._local_tensor, name))


def _drawn(_start: int, _end: int, operator: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Run an operator that draws random numbers; the state of the generator is no memory of the GPU's."""
    return operator(*args, **options)


def _replica_calls(recorder: LiveRecorder) -> dict[str, Callable[..., Any]]:
    """Return DistributedDataParallel's own methods, which tell a recorder what their buckets are."""
    made, forward = DistributedDataParallel.__init__, DistributedDataParallel.forward
    hook = DistributedDataParallel.register_comm_hook

    def init(replica: Any, *args: Any, **options: Any) -> None:
        with booked_buckets(recorder):
            made(replica, *args, **options)
        replica.logger = Idle()

    def hooked(replica: Any, state: Any, own: Any) -> None:
        replica.sends = True
        hook(replica, state, own)

    def run(replica: Any, *args: Any, **options: Any) -> Any:
        if not hasattr(replica, "sends"):
            hooked(replica, None, unsent)
        with booked_buckets(recorder):  # torch makes its buckets anew just here
            replica.reducer._rebuild_buckets()
        return forward(replica, *args, **options)  # type: ignore[no-untyped-call]

    return {"__init__": init, "forward": run, "register_comm_hook": hooked}
