"""A library's own offloading of activations on tensors without memory: copies in host memory are counted, and streams do nothing.

torchtune's module and TRL's ask ``torch`` for streams, for tensors of the CPU's and for the address of a storage. Here each is
given a stand-in for it, which answers those, and torch itself in all else.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from memplan.trace.recording.recorder import Recorder

META = "meta"


class _HostCopy:
    """What stands for a tensor in host memory: its shape, of which a tensor on the device can be made again."""

    def __init__(self, recorder: Recorder, like: Tensor) -> None:
        self._like = (tuple(like.shape), tuple(like.stride()), like.dtype)
        size = like.numel() * like.element_size()
        recorder.copied_out(size)
        weakref.finalize(self, recorder.copied_out, -size)

    def copy_(self, _: Tensor, **__: Any) -> "_HostCopy":
        """Do nothing."""
        return self

    def to(self, *_: Any, **__: Any) -> Tensor:
        """Return a tensor of the same shape on the device."""
        shape, stride, dtype = self._like
        return torch.empty_strided(shape, stride, dtype=dtype, device=META)


class _Stream:
    """A stream or an event: whatever is called, nothing happens."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: _Stream()


class _Torch:
    """torch, for a module that offloads activations."""

    def __init__(self, recorder: Recorder) -> None:
        runtime = {name: lambda *_, **__: _Stream() for name in ("Stream", "default_stream", "current_stream")}
        self.cuda = SimpleNamespace(**runtime, stream=lambda _: nullcontext(), empty_cache=lambda: None)
        self.accelerator = SimpleNamespace(current_accelerator=lambda: SimpleNamespace(type=META))
        self.get_device_module = lambda _: self.cuda
        self._recorder = recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty_like(self, like: Tensor, **_: Any) -> _HostCopy:
        """Return a copy in host memory, which is all that such a module asks it for."""
        return _HostCopy(self._recorder, like)

    def empty(self, size: int, *, dtype: torch.dtype, **_: Any) -> _HostCopy:
        """Return the same of so many elements."""
        return _HostCopy(self._recorder, torch.empty(size, dtype=dtype, device=META))


@contextmanager
def host_copies(module: ModuleType, recorder: Recorder) -> Iterator[None]:
    """Let a module that offloads activations count what it copies into host memory."""
    with (
        patch.object(module, "torch", _Torch(recorder)),
        patch.object(Tensor, "record_stream", lambda *_: None),
        # all storages without memory have one address, which TRL tells them apart by
        patch.object(torch.UntypedStorage, "data_ptr", lambda storage: storage._cdata),
    ):
        yield


@contextmanager
def copied_inputs(recorder: Recorder) -> Iterator[None]:
    """Let tensors that ``Tensor.to`` moves to the CPU be counted there, and come back: one number stands for each on the CPU."""
    own: Any = Tensor.to

    def to(tensor: Tensor, *where: Any, **options: Any) -> Tensor:
        if where == ("cpu",) and tensor.is_meta:
            copy = torch.zeros((), dtype=tensor.dtype, device="cpu").expand(tensor.shape)
            size = tensor.numel() * tensor.element_size()
            recorder.copied_out(size)
            weakref.finalize(copy.untyped_storage(), recorder.copied_out, -size)
            return copy
        if where == ("cuda",) and not tensor.is_meta:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=META)
        moved: Tensor = own(tensor, *where, **options)
        return moved

    with patch.object(Tensor, "to", to):
        yield
