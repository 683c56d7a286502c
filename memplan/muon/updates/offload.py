"""States on the CPU while the parameters are on a device: pinned memory, copies that overlap with work."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from memplan.muon.state_codecs.codecs import codec_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from memplan.muon.state_codecs.codecs import Codec
    from memplan.muon.updates.handles import Handle
    from memplan.muon.updates.steps import State


class Stager(Protocol):
    """Brings a stretch of state to where the update runs, and back."""

    def fetch(self, state: State, start: int, count: int) -> tuple[State, int]:
        """Return tensors that hold the stretch, and the stretch's start in them."""

    def flush(self, state: State, start: int, count: int) -> None:
        """Write the stretch, which was changed, back into ``state``."""

    def finish(self) -> None:
        """Give memory back after the last stretch."""


class InPlace:
    """State on the device of the update: nothing to do."""

    def fetch(self, state: State, start: int, count: int) -> tuple[State, int]:
        """Return the state itself."""
        del count
        return state, start

    def flush(self, state: State, start: int, count: int) -> None:
        """Do nothing."""

    def finish(self) -> None:
        """Do nothing."""


class Offloaded:
    """State on the CPU; buffers on the device alternate, so that the next copy overlaps with the update.

    On CUDA copies run in a stream of their own, from and to pinned memory. The buffers are taken
    with the first stretch and given back by ``finish``: however far the host runs ahead of the
    device, there are no more of them. One object serves one parameter's step.

    Args:
        names: The tensors of the state that lie on the CPU.
        block_elements: Elements of a block of the state, which tells bytes from elements.
        length: Elements of a stretch, whole blocks.
        elements: Elements of the whole state.
        device: Where the update runs.
        buffers: How many take turns; ``buffers_on`` has the usual number.
    """

    def __init__(
        self, names: Iterable[str], block_elements: int, length: int, elements: int, device: torch.device, buffers: int
    ) -> None:
        self._names, self._block = tuple(names), block_elements
        self._length, self._elements, self._device, self._count = length, elements, device, buffers
        self._stream = copy_stream(device) if device.type == "cuda" else None
        self._buffers: list[State] = []
        self._ready: dict[int, torch.cuda.Event] = {}

    def fetch(self, state: State, start: int, count: int) -> tuple[State, int]:
        """Return device tensors with the stretch at 0, and start the next stretch's copy."""
        turn = start // self._length
        if not self._buffers:
            self._take_buffers(state)
        if self._stream is None:
            self._copy_in(state, turn)
        else:
            if turn == 0:
                self._copy_in(state, 0)
            torch.cuda.current_stream(self._device).wait_event(self._ready.pop(turn))
            if start + count < self._elements:
                self._copy_in(state, turn + 1)
        return self._buffers[turn % self._count], 0

    def flush(self, state: State, start: int, count: int) -> None:
        """Copy the changed stretch back to the CPU; on CUDA once the update is through with it."""
        del count
        turn = start // self._length
        if self._stream is None:
            self._copy_out(state, turn)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._copy_out(state, turn)

    def finish(self) -> None:
        """Give the buffers back; what runs in their memory next waits for the last copy."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._buffers = []

    def _take_buffers(self, state: State) -> None:
        """Take one buffer for each of the first stretches; of a short state that is fewer, or a shorter last one."""
        for turn in range(min(self._count, -(-self._elements // self._length))):
            parts = self._parts(state, turn)
            self._buffers.append({name: torch.empty_like(part, device=self._device) for name, part in parts.items()})
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def _copy_in(self, state: State, turn: int) -> None:
        buffer = self._buffers[turn % self._count]
        if self._stream is None:
            for name, part in self._parts(state, turn).items():
                buffer[name][: part.numel()].copy_(part)
            return
        with torch.cuda.stream(self._stream):
            for name, part in self._parts(state, turn).items():
                buffer[name][: part.numel()].copy_(part, non_blocking=True)
            self._ready[turn] = self._stream.record_event()

    def _copy_out(self, state: State, turn: int) -> None:
        buffer = self._buffers[turn % self._count]
        for name, part in self._parts(state, turn).items():
            part.copy_(buffer[name][: part.numel()], non_blocking=self._stream is not None)

    def _parts(self, state: State, turn: int) -> State:
        """Return the stretch of each tensor that lies on the CPU, flat."""
        first, last = turn * self._length, min((turn + 1) * self._length, self._elements)
        blocks = -(-self._elements // self._block)
        parts: State = {}
        for name in self._names:
            flat: Tensor = state[name].view(-1)
            each = flat.numel() // blocks
            parts[name] = flat[first // self._block * each : -(-last // self._block) * each]
        return parts


def staged_bytes(handle: Handle, group: Mapping[str, Any], codecs: Iterable[Codec], length: int, device: str) -> int:
    """Return the bytes of the buffers of offloaded state: a stretch on the CPU, two that take turns on a device.

    Args:
        handle: The parameter.
        group: Its group's options.
        codecs: Of its states.
        length: Elements of a stretch.
        device: Type of the parameter's device.
    """
    if not group["offload"]:
        return 0
    staged_elements = min(length * buffers_on(torch.device(device)), handle.shape.numel())
    return sum(codec_bytes(codec, staged_elements) for codec in codecs)


def buffers_on(device: torch.device) -> int:
    """Return how many buffers take turns: one where copies cannot overlap with work, else two."""
    return 1 if device.type == "cpu" else 2


def stager_of(handle: Handle, state: State, codec: Codec, length: int, buffers: int) -> Stager:
    """Return the stager of a parameter's state.

    Args:
        handle: The parameter.
        state: Its state; the step and the other half of a split weight stay where they are.
        codec: Format of the state.
        length: Elements of a stretch, whole blocks.
        buffers: How many alternate; 0 where the state is on the device.
    """
    if not buffers:
        return InPlace()
    names = [name for name in state if name not in ("step", "mantissa")]
    return Offloaded(names, codec.block_elements, length, handle.shape.numel(), handle.key.device, buffers)


@lru_cache(maxsize=16)
def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the one stream of ``device`` in which state is copied, so that copies keep their order."""
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream


def finish_copies(device: torch.device) -> None:
    """Wait until offloaded state has arrived on the CPU."""
    if device.type == "cuda":
        copy_stream(device).synchronize()


def home_of(device: torch.device) -> torch.device:
    """Return the device of the offloaded state of a parameter on ``device``; ``meta`` stays ``meta``."""
    return device if device.type == "meta" else torch.device("cpu")


def pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """Return ``tensor``, which is at home, pinned where ``device`` can copy from pinned memory."""
    return tensor.pin_memory() if device.type == "cuda" else tensor
