"""The recorder of a dry run: every storage on the pretended GPU, what the allocator does with it at once, and what a script makes of an end."""

import ast
import linecache
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from types import CodeType, FrameType
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS

from memplan.allocator.pools import Turn
from memplan.allocator.results import AllocationError, OutOfMemory
from memplan.allocator.settings import AllocatorSettings
from memplan.dryrun.terms.outcome import Card, RunsOut
from memplan.dryrun.terms.script_lines import ScriptLines
from memplan.dryrun.watching.counted_allocator import CountedAllocator
from memplan.trace.recording.recorder import Recorder
from memplan.trace.recording.repeated_operators import RepeatedOperators
from memplan.trace.recording.trace_result import Component
from memplan.units import format_bytes

_LIBRARIES = ("accelerate/utils/memory.py", "lightning/pytorch/tuner/", "pytorch_lightning/tuner/")
"""Whose handlers try again with a smaller batch."""
_CATCHES = frozenset({"OutOfMemoryError", "RuntimeError", "Exception", "BaseException", ""})
"""What takes the error by its class; the empty name is ``except`` without one."""
_MEANS_MEMORY = ("memory", "oom", "batch_size")
"""One of these is in what a handler of more than that one error does about it."""


def is_handled(frame: FrameType | None, is_own: Callable[[str], bool]) -> bool:
    """Tell whether ``torch.OutOfMemoryError``, raised where a frame is now, would be handled and not end the script.

    Args:
        frame: The innermost frame.
        is_own: Whether a file is the script's own.
    """
    while frame is not None:
        file = frame.f_code.co_filename
        if (is_own(file) or any(name in file for name in _LIBRARIES)) and _has_handler(file, frame.f_lineno):
            return True
        frame = frame.f_back
    return False


@cache
def _has_handler(file: str, line: int) -> bool:
    return any(
        node.body[0].lineno <= line <= (node.body[-1].end_lineno or 0) and any(map(_handles, node.handlers))
        for node in _attempts(file)
    )


@cache
def _attempts(file: str) -> tuple[ast.Try, ...]:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ()
    return tuple(node for node in ast.walk(tree) if isinstance(node, ast.Try))


def _handles(handler: ast.ExceptHandler) -> bool:
    """Tell whether a handler takes the error and goes on: one that ends by raising it again only says what happened."""
    names = set(_names(handler.type))
    if not names & _CATCHES or isinstance(handler.body[-1], ast.Raise) or _ends_script(handler.body[-1]):
        return False
    text = " ".join(map(ast.unparse, handler.body)).lower()
    return "OutOfMemoryError" in names or any(word in text for word in _MEANS_MEMORY)


def _names(node: ast.expr | None) -> Iterator[str]:
    if isinstance(node, ast.Tuple):
        for item in node.elts:
            yield from _names(item)
    elif node is None:
        yield ""
    else:
        yield ast.unparse(node).rpartition(".")[2]


def _ends_script(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and ast.unparse(statement).startswith(("sys.exit(", "exit(", "os._exit("))


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
        self.allocator = CountedAllocator(settings, card.capacity_bytes)
        self.step = 0
        self.step_marks: list[tuple[int, int]] = [(0, 0)]
        self.runs_out: RunsOut | None = None
        self.handled: list[RunsOut] = []
        self.current_stream: Callable[[], int] = lambda: 0
        self.on_replay: Callable[[bool], None] = lambda _: None
        self.on_failure: Callable[[], None] = lambda: None
        self.capturing = 0
        self.captures = 0
        self.captured_update = False
        self._graphs_of: Counter[int] = Counter()

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

    # Places: streams, and the pools of graphs.

    def begin_capture(self, pool: int | None) -> int:
        """Let a private pool serve what is requested on the current stream from now on; return its number."""
        self.capturing = 1 + max(self._graphs_of, default=0) if pool is None else pool
        self._graphs_of[self.capturing] += 1
        self.captured_update = False
        return self.capturing

    def new_pool(self) -> int:
        """Return the number of a private pool that nothing uses yet."""
        number = 1 + max(self._graphs_of, default=0)
        self._graphs_of[number] = 0
        return number

    def end_capture(self) -> bool:
        """Let the script's ordinary pool serve requests again; return whether an optimizer was stepped in between."""
        self.capturing = 0
        self.captures += 1
        return self.captured_update

    def drop_pool(self, pool: int) -> None:
        """Note that a graph which used a pool is gone."""
        self._graphs_of[pool] -= 1
        if not self._graphs_of[pool]:
            self._turn(Turn(len(self.events), "drop", pool=pool))

    def replays(self, updates: bool) -> None:
        """Note that a graph is launched, and whether it holds an optimizer's step."""
        self.on_replay(updates)

    def release_cached(self) -> None:
        """Give back what is cached, as ``torch.cuda.empty_cache`` does."""
        self._turn(Turn(len(self.events), "release"))

    def _turn(self, turn: Turn) -> None:
        self.turns.append(turn)
        self.allocator.turn(turn)

    def _stream(self) -> int:
        return self.current_stream()

    def _born(self, size: int, operation: str, shape: tuple[int, ...], component: Component | None = None) -> int:
        place = self.current_stream(), self.capturing
        if place != (self.allocator.stream, self.allocator.pool):
            self._turn(Turn(len(self.events), "place", *place))
        index = super()._born(size, operation, shape, component)
        try:
            self.allocator.malloc(index, size)
        except AllocationError as error:
            self.allocator.failed += 1
            failed = self._failure(error.out_of_memory, size, operation)
            if self.runs_out is None and is_handled(sys._getframe(1), self.lines.is_own):
                self._undo()
                self.handled.append(failed)
                raise torch.OutOfMemoryError(failed.message) from None
            self.runs_out = self.runs_out or failed
            self.allocator.allow(None)
            self.allocator.malloc(index, size)
        return index

    def _undo(self) -> None:
        """Forget the last birth, which failed after all that was cached had been given back."""
        self.records.pop()
        self.events.pop()
        self.turns.append(Turn(len(self.events), "release"))
        self.on_failure()

    def _freed(self, key: int) -> None:
        known = self._alive.get(key)
        super()._freed(key)
        if known is not None:
            self.allocator.free(known[0])

    def _inside(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        before = len(self.events)
        super()._inside(name, args, result)
        for allocates, index in self.events[before:]:
            if not allocates:
                self.allocator.free(index)

    def _failure(self, why: OutOfMemory, size: int, operation: str) -> RunsOut:
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
        return RunsOut(self.step, instant, operation, self.lines.current(), size, message)
