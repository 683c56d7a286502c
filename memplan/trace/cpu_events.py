"""The same training step on real CPU memory, as torch's own allocator reports it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch._C._profiler import _EventType
from torch.profiler import record_function

from memplan.trace.recording.trace_result import LATER_MICRO_STEP, Component

if TYPE_CHECKING:
    from torch import Tensor

MARK = "memplan instant: "
NEXT_STEP = "next step"


class Marker:
    """Writes each instant into the profile, and books nothing."""

    def __init__(self) -> None:
        self._backward = False
        self.now = ""

    def next_step(self) -> None:
        """Begin a step; the last one is reported."""
        self.instant(NEXT_STEP)

    def instant(self, name: str, *, backward: bool = False) -> None:
        """Begin a part of the step."""
        self._backward, self.now = backward, name
        with record_function(MARK + name):
            pass

    def backward_reaches(self, tensor: Tensor, instant: str) -> None:
        """Begin ``instant`` when the gradient of ``tensor`` is known; a later micro-step is one instant."""
        if tensor.requires_grad and not self._backward and self.now != LATER_MICRO_STEP:
            tensor.register_hook(lambda _: self.instant(instant, backward=True))  # type: ignore[no-untyped-call]

    def forward_begins(self) -> None:
        """Do nothing."""

    def forward_ends(self) -> None:
        """Do nothing."""

    def section(self, name: str) -> None:
        """Do nothing."""

    def recomputing(self, begins: bool) -> None:
        """Do nothing."""

    def weight_copy(self, tensor: Tensor) -> None:
        """Do nothing."""

    def mark(self, tensor: Tensor, component: Component, name: str = "") -> None:
        """Do nothing."""

    def on_host(self, tensor: Tensor) -> None:
        """Do nothing: the CPU's allocator cannot tell host from device."""


def peaks_of(tree: list[Any]) -> dict[str, int]:
    """Return the largest sum of allocations by instant, of the last step."""
    total, instant = 0, NEXT_STEP
    peaks: dict[str, int] = {}
    for _, what in sorted(moments(tree), key=lambda moment: moment[0]):
        if isinstance(what, int):
            total += what
        else:
            instant = what
            if instant == NEXT_STEP:
                peaks = {}
        peaks[instant] = max(peaks.get(instant, 0), total)
    peaks.pop(NEXT_STEP, None)
    return peaks


def moments(tree: list[Any]) -> Iterator[tuple[int, int | str]]:
    """Yield (time, bytes allocated or freed) and (time, name of the instant that begins)."""
    waiting = list(tree)
    while waiting:
        event = waiting.pop()
        if event.tag == _EventType.Allocation:
            yield event.start_time_ns, event.extra_fields.alloc_size
        else:
            if event.name.startswith(MARK):
                yield event.start_time_ns, event.name.removeprefix(MARK)
            waiting.extend(event.children)
