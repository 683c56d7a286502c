"""The events of updates as they are published, each told in the order in which its code allocates and frees.

A rule is given the tensors, the kernel that a config asks for, and what makes the states of one tensor in the first step,
which it calls where its code does. Python keeps what a variable of its loop names until the next tensor replaces it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod

from memplan.catalog.entries import Form
from memplan.catalog.kernel_profiles import OptimizerKernel
from memplan.step.events.event_stream import EventStream
from memplan.step.tensors.tensor_states import TensorStates
from memplan.training.resolved import FLOAT_BYTES

MakeStates = Callable[[int], None]
"""Makes the states of the tensor of that place, where it has none."""

Rule = Callable[[EventStream, Sequence[TensorStates], OptimizerKernel, MakeStates], None]


class _Variables:
    """Variables of a loop: each keeps its storage until another is assigned to it."""

    def __init__(self, stream: EventStream) -> None:
        self._stream = stream
        self._storages: dict[str, int] = {}

    def assign(self, name: str, storage: int) -> None:
        """Let a variable name a storage, and let go of the one that it named."""
        if name in self._storages:
            self._stream.free(self._storages[name])
        self._storages[name] = storage

    def end(self) -> None:
        """Let go of all, the first that was named first."""
        self._stream.free_all(self._storages.values())


def _bytes(entry: TensorStates) -> int:
    return entry.tensor.elements * FLOAT_BYTES[entry.format_name]


def kinds(entries: Sequence[TensorStates]) -> list[TensorStates]:
    """Return the first of the tensors that are alike."""
    return list({(entry.tensor.role, entry.tensor.shape): entry for entry in reversed(entries)}.values())[::-1]


def _made(entries: Sequence[TensorStates], make: MakeStates) -> None:
    """Make the states of all tensors, as optimizers do that gather a group before they update it."""
    for place in range(len(entries)):
        make(place)


def _in_place(stream: EventStream, entries: Sequence[TensorStates], kernel: OptimizerKernel, make: MakeStates) -> None:
    """Write nothing but states."""
    del stream, kernel
    _made(entries, make)


def _adamw(stream: EventStream, entries: Sequence[TensorStates], kernel: OptimizerKernel, make: MakeStates) -> None:
    """Write the square roots of torch.optim.AdamW, all at once or one after the other with a quotient.

    Source:
        torch/optim/adam.py (v2.13.0), ``_multi_tensor_adam`` and ``_single_tensor_adam``.
    """
    _made(entries, make)
    if kernel == "foreach":
        stream.passing(*map(_bytes, entries))
    elif kernel == "for-loop":
        variables = _Variables(stream)
        for entry in entries:
            root, quotient = stream.allocate_all([_bytes(entry)] * 2)
            stream.free(root)
            variables.assign("denom", quotient)
        variables.end()


def _torch_muon(
    stream: EventStream, entries: Sequence[TensorStates], kernel: OptimizerKernel, make: MakeStates
) -> None:
    """Write what torch.optim.Muon takes for each matrix (torch/optim/_muon.py, v2.13.0)."""
    del kernel
    _made(entries, make)
    for entry in kinds(entries):
        m, n = sorted(entry.tensor.shape)
        stream.passing(FLOAT_BYTES[entry.format_name] * m * n, *[2 * m * n] * 2, *[2 * m * m] * 2)


def _lion(stream: EventStream, entries: Sequence[TensorStates], kernel: OptimizerKernel, make: MakeStates) -> None:
    """Write the copy of each momentum, and its sum with the gradient (lion_pytorch/lion_pytorch.py, 0.2.5)."""
    del kernel
    for place, entry in enumerate(entries):
        make(place)
        copy, total = stream.allocate_all([_bytes(entry)] * 2)
        stream.free_all([copy, total])


def _adafactor(stream: EventStream, entries: Sequence[TensorStates], kernel: OptimizerKernel, make: MakeStates) -> None:
    """Write what torch.optim.Adafactor takes (torch/optim/_adafactor.py, v2.13.0, ``_single_tensor_adafactor``)."""
    del kernel
    _made(entries, make)
    variables = _Variables(stream)
    for entry in entries:
        size, shape, one = _bytes(entry), entry.tensor.shape, FLOAT_BYTES[entry.format_name]
        stream.passing(one)  # the weight's norm
        if len(shape) > 1:
            variables.assign("row_mean", stream.allocate(size // shape[-1]))
            variables.assign("col_mean", stream.allocate(size // shape[-2]))
            variables.assign("var_estimate", stream.allocate(size))
            stream.passing(one * prod(shape[:-2]))
        else:
            variables.assign("grad_squared", stream.allocate(size))
            variables.assign("var_estimate", stream.allocate(size))
        stream.passing(one)  # the update's norm; the update is the estimate itself
    variables.end()


def _adam_mini(stream: EventStream, entries: Sequence[TensorStates], kernel: OptimizerKernel, make: MakeStates) -> None:
    """Write what Adam-mini takes (adam_mini/adam_mini.py, 1.1.1, ``Adam_mini.step``)."""
    del kernel
    variables = _Variables(stream)
    for place, entry in enumerate(entries):
        make(place)
        size, shape = _bytes(entry), entry.tensor.shape
        rows = size // shape[-1] if len(shape) > 1 else FLOAT_BYTES[entry.format_name]
        square, squared = stream.allocate_all([size, rows])
        stream.free(square)
        variables.assign("squared", squared)
        if len(shape) == 1:
            variables.assign("squared", stream.allocate(rows))
        for name in ("divisor", "stepsize"):
            passing, result = stream.allocate_all([rows] * 2)
            stream.free(passing)
            variables.assign(name, result)
        variables.assign("update", stream.allocate(size))
        stream.passing(size)
    variables.end()


RULES: Mapping[Form, Rule] = {
    "adafactor": _adafactor,
    "adam-mini": _adam_mini,
    "adamw": _adamw,
    "in-place": _in_place,
    "lion": _lion,
    "torch-muon": _torch_muon,
}
"""Every form but ``copies`` and ``untraced``, and ``chunks`` (:mod:`memplan.step.events.bundled_events`)."""
