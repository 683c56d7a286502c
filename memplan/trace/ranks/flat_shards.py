"""torch's FullyShardedDataParallel (FSDP1) on ``meta`` tensors: its own code runs, and nothing is sent anywhere."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.fsdp import _common_utils, _flat_param, _init_utils, _runtime_utils, fully_sharded_data_parallel

from memplan.catalog.config_keys.parallel_keys import Parallel
from memplan.trace.ranks.fully_shard import META, ShardedRecorder
from memplan.trace.ranks.replicated import process_group


class _Stream(torch.cpu.Stream):
    """A stream without a device, which has nothing to wait for."""

    def synchronize(self) -> None:
        """Do nothing."""


class _Event(torch.cpu.Event):
    """An event without a device."""


_CURRENT = _Stream()
_HANDLE = SimpleNamespace(
    is_available=lambda: True,
    Stream=_Stream,
    Event=_Event,
    stream=torch.cpu.stream,
    current_stream=lambda *_: _CURRENT,
    current_device=lambda: META,
    synchronize=lambda *_: None,
)
"""What FSDP1 asks of a device, for one without memory."""


@contextmanager
def flat_shards(parallel: Parallel, recorder: ShardedRecorder) -> Iterator[None]:
    """Let FSDP1 shard over ranks that are not there, a group on each machine, with what it allocates told to ``recorder``."""
    handle = SimpleNamespace(**vars(_HANDLE), device_count=lambda: parallel.shards)
    changed: list[tuple[Any, str, Any]] = [
        (_common_utils._FSDPDeviceHandle, "from_device", classmethod(lambda _, __: handle)),
        (fully_sharded_data_parallel, "_init_device_handle", lambda state, *_: _with_handle(state, handle)),
        (_init_utils, "_need_to_materialize_module", lambda *_: (False, False)),
        (_init_utils, "_move_module_to_device", lambda *_: None),
        (_init_utils, "_get_compute_device", lambda *_: META),
        (
            _flat_param,
            "_data_ptr_allocated",
            lambda tensor: tensor.untyped_storage().size() > 0,
        ),  # all have one address
        (_runtime_utils, "_catch_all_reshard", _catch_all_reshard),
        (_runtime_utils, "_accumulate_sharded_grad", _marked(_runtime_utils._accumulate_sharded_grad, recorder)),
    ]
    with ExitStack() as around:
        around.enter_context(process_group(parallel.data, recorder.rank))
        for owner, name, value in changed:
            around.enter_context(patch.object(owner, name, value))
        around.enter_context(recorder.following())
        yield


def _with_handle(state: Any, handle: Any) -> Any:
    """Return a unit's state with what it asks of a device."""
    state._device_handle = handle
    return state


def _marked(accumulate: Any, recorder: ShardedRecorder) -> Any:
    """Return what gives a unit its piece of the gradient, told to ``recorder``."""

    def accumulated(*given: Any) -> Any:
        piece = accumulate(*given)
        recorder.mark(piece, "gradients")
        return piece

    return accumulated


def _catch_all_reshard(state: Any) -> None:
    """Let go of what is still gathered at the end of backward, which torch tells by addresses; without memory all have one."""
    handle = state._handle
    if handle and handle.flat_param.data.numel() != handle.flat_param._local_shard.numel():
        _runtime_utils._reshard(state, handle, _runtime_utils._should_free_in_backward(state, handle))
