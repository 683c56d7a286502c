"""Records the life of every storage while a training step runs."""

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from memplan.allocator.pools import Turn
from memplan.trace.recording.composed_kernels import composed_bytes, storage_bytes
from memplan.trace.recording.engine_caution import is_in_place
from memplan.trace.recording.repeated_operators import RepeatedOperators
from memplan.trace.recording.trace_result import LATER_MICRO_STEP, Component
from memplan.trace.recording.workspaces import (
    CUBLASLT_WORKSPACE_BYTES,
    LAST_RESULT_FIRST,
    LIBRARIES,
    MATRIX_PRODUCTS,
    is_fused_bias,
    kernel_workspaces,
)

_TORCH = torch.__path__[0]
_KERNELS = str(Path(__file__).parent.with_name("pretended_cuda"))
"""Where operators are written again, whose lines explain nothing about a model."""


@dataclass(slots=True)
class Record:
    """What is known of one storage so far; the component is decided when the trace is complete.

    Attributes:
        in_layer: Whether a layer made it, in forward or in backward, so that it holds no logits however wide it is.
    """

    bytes: int
    operation: str
    mark: int
    line: tuple[CodeType, int] | None
    shape: tuple[int, ...]
    component: Component | None = None
    name: str = ""
    stream: int = 0
    in_layer: bool = False


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operator's results, and every storage's death through a weak reference.

    Args:
        device: Type of the device whose storages count; ``meta`` in a trace.
        skipped_files: Files whose lines are not the model's code.
        cublas_bytes: Size of a cuBLAS workspace, one for forward and one for backward; 0 for none.
        workspaces: Whether memory that kernels of CUDA allocate inside themselves is added.
    """

    def __init__(
        self, device: str = "meta", skipped_files: Iterable[str] = (), *, cublas_bytes: int = 0, workspaces: bool = True
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.records: list[Record] = []
        self.events: list[tuple[bool, int]] = []
        self.marks: list[tuple[int, str, bool]] = [(0, "setup", False)]
        self.steady_from, self.steady_mark = 0, 0
        self.forward_spans: list[tuple[int, int]] = []
        self.turns: list[Turn] = []
        self._device, self._cublas, self._workspaces = device, cublas_bytes, workspaces
        self._skipped = {__file__, *skipped_files}
        self._user_code: dict[CodeType, bool] = {}
        self._alive: dict[int, tuple[int, weakref.ref[torch.UntypedStorage], int]] = {}
        self._host: dict[int, tuple[torch.UntypedStorage, int]] = {}
        self._copied = self._most_copied = 0
        self._spans: list[int] = []
        self._streams: dict[torch.cpu.Stream, int] = {torch.cpu.current_stream(): 0}
        self._backward = self._in_layer = False
        self._with_workspace: set[tuple[bool, str, int]] = set()
        self._operators = RepeatedOperators()

    # Reports of the step.

    def next_step(self) -> None:
        """Begin a step; the last one is reported."""
        self.steady_from, self.steady_mark = len(self.events), len(self.marks)

    def instant(self, name: str, *, backward: bool = False, later: bool = False) -> None:
        """Begin a part of the step; those of a ``later`` micro-step are one."""
        self._backward = backward
        self.marks.append((len(self.events), LATER_MICRO_STEP if later else name, backward))

    @property
    def now(self) -> str:
        """Name of the instant that runs."""
        return self.marks[-1][1]

    def forward_begins(self) -> None:
        """Note that forward begins; what is made from now on and outlives it are activations."""
        self._spans.append(len(self.events))

    def forward_ends(self) -> None:
        """Note that forward ends."""
        self.forward_spans.append((self._spans.pop(), len(self.events)))

    def section(self, name: str) -> None:
        """Note that forward enters a part of the model."""
        self._in_layer = name.startswith("layer")

    def backward_reaches(self, tensor: Tensor, instant: str) -> None:
        """Begin ``instant`` when the gradient of ``tensor`` is known; a later micro-step is one instant."""
        if tensor.requires_grad and not self._backward:
            later = self.now == LATER_MICRO_STEP
            tensor.register_hook(lambda _: self._reached(instant, later))  # type: ignore[no-untyped-call]

    def _reached(self, instant: str, later: bool) -> None:
        self.section(instant)
        if not later:
            self.instant(instant, backward=True)

    def recomputing(self, begins: bool) -> None:
        """Treat what a checkpointed part makes in backward as activations."""
        if not self._backward:
            return
        if begins:
            self.forward_begins()
        else:
            self.forward_ends()

    def weight_copy(self, tensor: Tensor) -> None:
        """Book a copy of a weight as a temporary, though it may outlive forward."""
        self.mark(tensor, "temporaries")

    def mark(self, tensor: Tensor, component: Component, name: str = "") -> None:
        """Book the storage of ``tensor`` under ``component``."""
        if component == "optimizer_states" and tensor.device.type != self._device:
            self.on_host(tensor)
        index = self._see(tensor, "given")
        if index is not None:
            self.records[index].component = component
            self.records[index].name = name or self.records[index].name

    def has_seen(self, tensor: Tensor) -> bool:
        """Tell whether the storage of ``tensor`` is one that was recorded, and as large."""
        storage = tensor.untyped_storage()
        known = self._alive.get(storage._cdata)
        return known is not None and known[1]() is storage and known[2] == storage.nbytes()

    def book_apart(self, tensor: Tensor, component: Component) -> None:
        """Book a tensor where it stands for one in host memory, which no tensor does here."""

    def on_host(self, tensor: Tensor) -> None:
        """Leave the storage of ``tensor`` out: it stands for host memory, whatever its device is called.

        A reference to the storage is kept, so that no other takes its address. One number may stand for the whole tensor.
        """
        storage = tensor.untyped_storage()
        self._host[storage._cdata] = storage, max(storage.nbytes(), tensor.numel() * tensor.element_size())

    def without_memory(self, tensor: Tensor) -> None:
        """Let go of the storage of ``tensor``, which is on ``meta`` on a real device too."""
        self._freed(tensor.untyped_storage()._cdata)

    @property
    def host_bytes(self) -> int:
        """Bytes of optimizer states in host memory, and of the most activations that were there at a time."""
        return sum(size for _, size in self._host.values()) + self._most_copied

    def copied_out(self, size: int) -> None:
        """Note that so many bytes of activations come into host memory; less than none leave it."""
        self._copied += size
        self._most_copied = max(self._most_copied, self._copied)

    # Results of operators.

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types
        name = func.__name__
        if self._backward and is_in_place(func, args):
            self._inside(name, args, args[0])
            return args[0]
        result = self._operators.result(func, args, kwargs or {})
        if isinstance(result, Tensor):
            behind = storage_bytes(name, args)
            if behind is not None:
                result.untyped_storage().resize_(behind)
            self._see(result, name)
        elif isinstance(result, tuple | list):
            for item in reversed(result) if name in LAST_RESULT_FIRST else result:
                if isinstance(item, Tensor):
                    self._see(item, name)
        if self._cublas and name in MATRIX_PRODUCTS:
            sizes = (
                (self._cublas, CUBLASLT_WORKSPACE_BYTES) if is_fused_bias(name, args, kwargs or {}) else (self._cublas,)
            )
            for library, size in zip(LIBRARIES, sizes, strict=False):
                place = (self._backward, library, self._stream())
                if place not in self._with_workspace:
                    self._with_workspace.add(place)
                    self._born(size, library, (), "library_workspaces")
        self._inside(name, args, result)
        return result

    def _see(self, tensor: Tensor, operation: str) -> int | None:
        """Return the index of the tensor's storage, which is recorded if it is new."""
        if tensor.device.type != self._device:
            return None
        if tensor.layout is not torch.strided:
            return self._see_parts(tensor, operation)
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._host:
            return None
        known = self._alive.get(key)
        size = storage.nbytes()
        if known is not None:
            if known[2] == size:
                return known[0]
            self._freed(key)
        index = self._born(size, operation, tuple(tensor.shape))
        self._alive[key] = (index, weakref.ref(storage, lambda _: self._freed(key)), size)
        return index

    def _see_parts(self, tensor: Tensor, operation: str) -> int | None:
        """Record the indices and the values of a sparse tensor; return the index of the latter."""
        if tensor.layout is not torch.sparse_coo:
            return None
        self._see(tensor._indices(), operation)
        return self._see(tensor._values(), operation)

    def _born(self, size: int, operation: str, shape: tuple[int, ...], component: Component | None = None) -> int:
        index = len(self.records)
        mark, stream = len(self.marks) - 1, self._stream()
        self.records.append(Record(size, operation, mark, self._line(), shape, component, "", stream, self._in_layer))
        self.events.append((True, index))
        return index

    def _freed(self, key: int) -> None:
        known = self._alive.pop(key, None)
        if known is not None:
            self.events.append((False, known[0]))

    def _inside(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        """Record what a kernel takes for itself and gives back, what it took last first."""
        sizes = composed_bytes(name, args, result) + (kernel_workspaces(name, args) if self._workspaces else [])
        taken = [self._born(size, f"{name} (workspace)", (), "temporaries") for size in sizes]
        self.events.extend((False, index) for index in reversed(taken))

    def _stream(self) -> int:
        """Return the number of the stream that operators run on: those of the CPU stand for a card's."""
        return self._streams.setdefault(torch.cpu.current_stream(), len(self._streams))

    def _line(self) -> tuple[CodeType, int] | None:
        """Return the innermost line of code that is neither torch's nor the tracer's."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            user = self._user_code.get(code)
            if user is None:
                file = code.co_filename
                user = not file.startswith((_TORCH, _KERNELS, "<")) and file not in self._skipped
                self._user_code[code] = user
            if user:
                return code, frame.f_lineno
            frame = frame.f_back
        return None
