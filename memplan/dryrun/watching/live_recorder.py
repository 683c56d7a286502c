"""The recorder of a dry run: every storage on the pretended GPU, and what the caching allocator does with it at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any

from torch._library.custom_ops import OPDEFS

from memplan.allocator.caching_allocator import CachingAllocator
from memplan.allocator.results import AllocationError, OutOfMemory
from memplan.allocator.settings import AllocatorSettings
from memplan.dryrun.terms.outcome import Card, RunsOut
from memplan.dryrun.terms.script_lines import ScriptLines
from memplan.trace.recording.recorder import Recorder
from memplan.trace.recording.repeated_operators import RepeatedOperators
from memplan.trace.recording.trace_result import Component
from memplan.units import format_bytes

LOSSES = ("unsloth_zoo::fused_linear_", "unsloth_zoo_fused_preference")
"""Beginnings of the names of operators written in Python that allocate much inside: they run as they are, and not their forms."""


class Unrepeated(RepeatedOperators):
    """Runs every operator: torch's fake tensors keep what they derive from shapes themselves."""

    def result(self, func: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Return what the operator returns."""
        return func(*args, **options)


class LiveRecorder(Recorder):  # type: ignore[no-untyped-call]
    """Tells a simulated allocator of every birth and death, and notes the first request that the card cannot hold.

    Args:
        lines: Tells which line of the script is running.
        settings: Of the allocator.
        workspaces: Whether memory that kernels of CUDA allocate inside themselves is added.
    """

    def __init__(
        self,
        card: Card,
        lines: ScriptLines,
        settings: AllocatorSettings | None = None,
        *,
        cublas_bytes: int = 0,
        workspaces: bool = True,
    ) -> None:
        super().__init__("cuda", cublas_bytes=cublas_bytes, workspaces=workspaces)
        self.card, self.lines = card, lines
        self._operators = Unrepeated()
        self.allocator = CachingAllocator(settings, card.capacity_bytes)
        self.step = 0
        self.step_marks: list[tuple[int, int]] = [(0, 0)]
        self.runs_out: RunsOut | None = None

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "_schema", None)
        if name is not None and name.name.startswith(LOSSES):
            with self:
                return OPDEFS[name.name]._init_fn(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def next_step(self) -> None:
        """Begin a step."""
        super().next_step()
        self.step += 1
        self.step_marks.append((self.steady_from, self.steady_mark))

    def _line(self) -> tuple[CodeType, int] | None:
        return self.lines.place()

    def _born(self, size: int, operation: str, shape: tuple[int, ...], component: Component | None = None) -> int:
        index = super()._born(size, operation, shape, component)
        try:
            self.allocator.malloc(index, size)
        except AllocationError as error:
            self._note(error.out_of_memory, size, operation)
            self.allocator.allow(None)
            self.allocator.malloc(index, size)
        return index

    def _freed(self, key: int) -> None:
        known = self._alive.get(key)
        super()._freed(key)
        if known is not None:
            self.allocator.free(known[0])

    def _inside(self, name: str, args: tuple[object, ...]) -> None:
        before = len(self.events)
        super()._inside(name, args)
        for allocates, index in self.events[before:]:
            if not allocates:
                self.allocator.free(index)

    def _note(self, why: OutOfMemory, size: int, operation: str) -> None:
        total = self.card.total_bytes
        free = max(0, self.card.capacity_bytes - why.reserved_bytes)
        # c10/cuda/CUDACachingAllocator.cpp (v2.13.0), ``malloc``: what torch says, with what it says of this process.
        message = (
            f"CUDA out of memory. Tried to allocate {format_bytes(why.segment_bytes)}. GPU 0 has a total capacity of "
            f"{format_bytes(total)} of which {format_bytes(free)} is free. Including non-PyTorch memory, this process has "
            f"{format_bytes(total - free)} memory in use. Of the allocated memory {format_bytes(why.allocated_bytes)} is "
            f"allocated by PyTorch, and {format_bytes(why.unusable_bytes)} is reserved by PyTorch but unallocated."
        )
        instant = self.marks[-1][1]
        self.runs_out = RunsOut(self.step, instant, operation, self.lines.current(), size, message)
