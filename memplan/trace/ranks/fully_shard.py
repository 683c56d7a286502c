"""torch's ``fully_shard`` (FSDP2) on ``meta`` tensors: its own code runs, nothing is sent anywhere.

One process plays rank 0 of a group of any size. Collectives are replaced, through the interface that
torch has for that, by ones that allocate what the real ones do and move nothing.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

from memplan.catalog.config_keys.parallel_keys import Parallel
from memplan.trace.pretended_cuda.fake_devices import all_replaced, replaced
from memplan.trace.recording.recorder import Recorder
from memplan.trace.recording.trace_result import Component

META = torch.device("meta")


_WAIT, _WRAP = torch.ops._c10d_functional.wait_tensor.default, torch.ops._c10d_functional._wrap_tensor_autograd.default
"""Operators whose results are their inputs, but on ``meta`` (torch/distributed/_functional_collectives.py, v2.13.0)."""


def local(tensor: Tensor) -> Tensor:
    """Return the part of a distributed tensor that this rank holds, and any other tensor as it is."""
    tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return tensor.elem if isinstance(tensor, AsyncCollectiveTensor) else tensor


class Allocates:
    """A collective that allocates its buffers and moves nothing."""

    recorder: Recorder | None = None  # Books what is allocated as communication; None books nothing

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a buffer, as ``DefaultAllocMixin`` in torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py."""
        buffer = torch.empty(*size, dtype=dtype, device=device)
        if self.recorder is not None:
            self.recorder.mark(buffer, "communication")
        return buffer

    def __call__(self, *args: object, **kwargs: object) -> None:
        """Do nothing: without values there is nothing to send."""


class ShardedRecorder(Recorder):  # type: ignore[no-untyped-call]
    """A recorder that also follows distributed tensors, storages that are emptied and filled again, and those set apart.

    What is set apart stands for host memory, and so does what operators make of it alone.
    """

    rank = 0  # Which of the ranks that shard a model is followed

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._apart: dict[int, torch.UntypedStorage] = {}
        self._booked: dict[Component, dict[int, int]] = {}
        self._told: bool | None = None

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Leave distributed tensors to their own dispatch, which comes back with local ones; waiting forms no tensor."""
        if any(issubclass(kind, DTensor | AsyncCollectiveTensor) for kind in types):
            return NotImplemented
        if self.suspended:
            return func(*args, **(kwargs or {}))
        if func is _WAIT or func is _WRAP:
            return args[0] if func is _WAIT else AsyncCollectiveTensor(args[0])
        if not self._apart or self._told is not None:
            return super().__torch_dispatch__(func, types, args, kwargs)
        given = [item for item in tree_leaves((args, kwargs)) if isinstance(item, Tensor)]
        with self.setting_apart(bool(given) and all(self.is_apart(item) for item in given)):
            return super().__torch_dispatch__(func, types, args, kwargs)

    def next_step(self) -> None:
        """Begin a step, whose gradients are others."""
        super().next_step()
        self._booked.pop("gradients", None)

    def mark(self, tensor: Tensor, component: Component, name: str = "") -> None:
        """Book the storage of ``tensor`` under ``component``, on the device or apart."""
        if self.is_apart(tensor):
            self.book_apart(tensor, component)
        else:
            super().mark(tensor, component, name)

    def book_apart(self, tensor: Tensor, component: Component) -> None:
        """Book a tensor where it stands for one in host memory."""
        if self.is_apart(tensor):
            storage = local(tensor).untyped_storage()
            self._booked.setdefault(component, {})[storage._cdata] = storage.nbytes()

    @property
    def host_bytes(self) -> int:
        """Bytes of all that was booked in host memory."""
        return super().host_bytes + sum(sum(sizes.values()) for sizes in self._booked.values())

    def set_apart(self, tensor: Tensor) -> None:
        """Let a tensor stand for one in host memory."""
        storage = local(tensor).untyped_storage()
        self._freed(storage._cdata)
        self._apart[storage._cdata] = storage

    def is_apart(self, tensor: Tensor) -> bool:
        """Tell whether a tensor stands for one in host memory."""
        return bool(self._apart) and local(tensor).untyped_storage()._cdata in self._apart

    @contextmanager
    def setting_apart(self, apart: bool) -> Iterator[None]:
        """Set apart whatever is made meanwhile, or nothing of it, whatever it is made of."""
        before, self._told = self._told, apart
        try:
            yield
        finally:
            self._told = before

    def _inside(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        if not self._told:  # the CPU's kernels take none
            super()._inside(name, args, result)

    def _see(self, tensor: Tensor, operation: str) -> int | None:
        own = local(tensor)
        if self._told and own.untyped_storage()._cdata not in self._alive:
            self.set_apart(own)
        return None if self.suspended or self.is_apart(own) else super()._see(own, operation)

    suspended = False

    def _counts(self, storage: torch.UntypedStorage) -> bool:
        """Tell whether a storage is on the device whose storages count."""
        return storage.device.type == self._device

    @contextmanager
    def following(self) -> Iterator[None]:
        """See storages change their size, and not see what propagating a sharding runs on stand-ins."""
        resize, propagate = torch.UntypedStorage.resize_, ShardingPropagator._propagate_tensor_meta_non_cached

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            self._freed(storage._cdata)
            result = resize(storage, size)
            if size and self._counts(storage):
                index = self._born(size, "gathered", (size,), "communication")
                key = storage._cdata
                self._alive[key] = (index, weakref.ref(storage, lambda _: self._freed(key)), size)
            return result

        def unseen(*args: Any, **kwargs: Any) -> Any:
            self.suspended = True
            try:
                return propagate(*args, **kwargs)
            finally:
                self.suspended = False

        storages, propagation = {"resize_": resized}, {"_propagate_tensor_meta_non_cached": unseen}
        with replaced(torch.UntypedStorage, storages), replaced(ShardingPropagator, propagation):
            yield


@contextmanager
def process_group(*degrees: int, rank: int = 0) -> Iterator[DeviceMesh]:
    """Set up a mesh of so many ranks in each dimension, of which this process is one and the only one."""
    if dist.is_initialized():
        raise RuntimeError("a process group exists already")
    dist.init_process_group("fake", rank=rank, world_size=prod(degrees), store=FakeStore())
    try:
        with _without_device():
            yield init_device_mesh("cpu", degrees, mesh_dim_names=("replicate", "shard")[-len(degrees) :])
    finally:
        dist.destroy_process_group()


@contextmanager
def _without_device() -> Iterator[None]:
    """Let FSDP2 run on ``meta`` tensors, with the CPU's streams and events, which do nothing."""
    owner: Any = _fsdp_param_group
    reduce = owner.foreach_reduce
    answers: list[tuple[Any, dict[str, Any]]] = [
        (_fsdp_collectives, {"_get_device_handle": lambda _: torch.cpu}),
        (owner, {"_get_device_handle": lambda _: torch.cpu, "foreach_reduce": lambda *a: _with_event(*reduce(*a))}),
        (FSDPParamGroup, {"_validate_no_meta_params": lambda _: None}),
    ]
    with all_replaced(answers):
        yield


def _with_event(*reduced: Any) -> tuple[Any, ...]:
    """Return what ``foreach_reduce`` does, with the event of the reduction among groups, which is asked for off the CPU."""
    return (*reduced[:5], torch.cpu.Event(), *reduced[6:])


def shard(units: Sequence[nn.Module | list[nn.Module]], mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    """Shard each unit, the last of which is the root; several modules stay gathered."""
    for modules in units:
        stays = {"reshard_after_forward": False} if isinstance(modules, list) else {}
        fully_shard(modules, mesh=mesh, mp_policy=policy, **stays)  # type: ignore[call-overload]


def mesh_degrees(parallel: Parallel) -> tuple[int, ...]:
    """Return the groups that each divide everything, if there are several, and the ranks of each."""
    return (parallel.replicate, parallel.shards) if parallel.replicate > 1 else (parallel.shards,)


@contextmanager
def sharding(owner: Any, degrees: Sequence[int], recorder: ShardedRecorder, rank: int = 0) -> Iterator[DeviceMesh]:
    """Let a library's ``fully_shard``, which it has from ``owner``, shard over a mesh of ranks that are not there."""
    collective, made = Allocates(), owner.fully_shard
    collective.recorder = recorder
    with process_group(*degrees, rank=rank + recorder.rank) as mesh:

        def sharded(module: Any, **options: Any) -> Any:
            result = made(module, **{**options, "mesh": options.get("mesh") or mesh})
            on_meta(module, collective)
            return result

        with replaced(owner, {"fully_shard": sharded}), recorder.following():
            yield mesh


def on_meta(modules: nn.Module | Sequence[nn.Module], collective: Allocates) -> None:
    """Let a unit's buffers lie where its parameters do, and its collectives move nothing."""
    unit = modules if isinstance(modules, nn.Module) else modules[0]
    assert isinstance(unit, FSDPModule)
    for group in unit._get_fsdp_state()._fsdp_param_groups:  # several of them have no setter of their own
        group._all_gather_comm = group._reduce_scatter_comm = collective  # type: ignore[assignment]
        group.device = META
        for parameter in group.fsdp_params:
            parameter.device = META


def gathered(root: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the whole parameters that collectives fill, which exist from the first forward on."""
    for unit in root.modules():
        if isinstance(unit, FSDPModule):
            for group in unit._get_fsdp_state()._fsdp_param_groups:
                yield from (parameter._unsharded_param for parameter in group.fsdp_params)
