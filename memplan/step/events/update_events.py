"""The events of what comes after backward: clipping, the updates, and averages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from memplan.catalog.update_classes import BUNDLED, NO_UPDATE, UNTRACED, UPDATE_CLASSES
from memplan.step.events.event_stream import EventStream
from memplan.step.events.model_tensors import ModelTensors, Named
from memplan.step.states.model_states import TensorStates, is_exempt, slot_bytes
from memplan.step.states.muon_scratch import (
    COLUMN_CHUNK,
    chunk_elements,
    moment_chunk_bytes,
    staged_bytes,
    weight_chunk_bytes,
)
from memplan.step.states.optimizer_scratch import (
    FOREACH_CHUNK_ELEMENTS,
    master_of,
    stored_names,
    tensor_temporaries,
)
from memplan.step.states.update_algorithms import scratch_of
from memplan.step.states.update_kernels import has_fused_kernel, kept_slots
from memplan.step.step_inputs import StepInputs
from memplan.training.resolved import FLOAT_BYTES
from memplan.units import ceil_div

_EARLY = frozenset({BUNDLED, UNTRACED})
"""Classes whose states are there before the first step; others make them in it."""


class Updates:
    """Updates of a model's weights, by one optimizer after the other.

    Args:
        stream: What events are written to.
        inputs: What a step depends on.
        tensors: The model's tensors.
    """

    __slots__ = ("_groups", "_inputs", "_setup", "_stored", "_stream", "_tensors")

    def __init__(self, stream: EventStream, inputs: StepInputs, tensors: ModelTensors) -> None:
        self._stream, self._inputs, self._setup, self._tensors = stream, inputs, inputs.setup, tensors
        groups: dict[str, list[Named]] = {}
        for name, entry in tensors.trained:
            groups.setdefault(entry.optimizer_name, []).append((name, entry))
        self._groups = sorted(groups.values(), key=lambda group: group[0][1].optimizer.takes == "all")
        self._stored = stored_names(inputs.setup, inputs.states.tensors)

    def make_early_states(self) -> None:
        """Allocate the states that an optimizer makes when it is made; all, where updates are inside backward."""
        alone = self._setup.config.gradients.lifetime == "layer"
        for group in self._groups:
            if alone or group[0][1].stepper in _EARLY:
                self._make_states(group)

    def clip(self) -> None:
        """Write the events of clipping by the norm of all gradients."""
        trained = self._tensors.trained
        widths = [4 if e.gradient_bytes == 4 * e.tensor.elements else 2 for _, e in trained]
        chunks = max((ceil_div(e.tensor.elements, FOREACH_CHUNK_ELEMENTS) for _, e in trained), default=0)
        norms = self._stream.allocate_all(widths)
        self._stream.passing(4 * len(trained) * chunks)
        self._stream.passing(sum(widths), max(widths, default=0))
        self._stream.free_all(norms)

    def step(self, gradients: dict[str, int], *, first: bool) -> None:
        """Write the events of all updates; stores of the bundled optimizer let their gradients go.

        Args:
            gradients: Storage of each gradient that stays, by the name of its weight.
            first: Whether states are to be made that a step makes.
        """
        for group in self._groups:
            masters = self._masters(group)
            if first and group[0][1].stepper not in _EARLY:
                self._make_states(group)
            self._update(group, gradients)
            self._stream.free_all(masters)

    def average(self) -> None:
        """Write the events of moving the averaged weights."""
        name = self._setup.config.weight_average
        if name == "none" or self._setup.config.gradients.lifetime == "layer":
            return
        for _, entry in self._tensors.trained:
            own = self._setup.config.compute_dtype if entry.quantized else entry.format_name
            decoded = [entry.tensor.elements * self._setup.compute_bytes] if entry.quantized else []
            self._stream.passing(*decoded, *([] if own == name else [entry.tensor.elements * FLOAT_BYTES[name]]))

    def _masters(self, group: Sequence[Named]) -> list[int]:
        """Cast the gradients of a group for its master weights; return the casts."""
        name = self._setup.config.master_weights
        if name == "none":
            return []
        return self._stream.allocate_all(
            [e.tensor.elements * FLOAT_BYTES[name] for _, e in group if e.gradient_name != name]
        )

    def _make_states(self, group: Sequence[Named]) -> None:
        """Allocate the states of each tensor of a group."""
        self._stream.of("optimizer_states")
        for _, entry in group:
            self._stream.allocate_all(self._state_sizes(entry))
        shared = [e for _, e in group if not is_exempt(e.optimizer, e.tensor.shape)]
        once = self._setup.config.gradients.lifetime == "step"
        self._stream.allocate_all([e.optimizer.shared_bytes for e in (shared[:1] if once else shared)])
        self._stream.of("temporaries")

    def _state_sizes(self, entry: TensorStates) -> list[int]:
        """Return the bytes of each state tensor on the device."""
        if self._setup.offloads_states or entry.stepper in (None, NO_UPDATE):
            return []
        optimizer, shape = entry.optimizer, entry.tensor.shape
        own = FLOAT_BYTES.get(self._setup.config.master_weights, 0) or entry.element_bytes
        fused = self._setup.profile.optimizer == "fused" and has_fused_kernel(optimizer, entry.stepper or "")
        slots = optimizer.exempt_slots if is_exempt(optimizer, shape) else optimizer.slots
        return [
            slot_bytes(slot, shape, own)
            for slot in kept_slots(entry.stepper or "", slots)
            if slot.dimensions != ("more" if len(shape) < 2 else "one")
            and (slot.device == "device" or (slot.device == "device-if-fused" and fused))
        ]

    # ---------------------------------------------------------------- what an update takes for itself
    def _update(self, group: Sequence[Named], gradients: dict[str, int]) -> None:
        """Write what the update of a group allocates and frees."""
        kind = group[0][1].stepper
        if kind == BUNDLED:
            self._bundled(group, gradients)
            return
        entries = [entry if self._setup.config.master_weights == "none" else self._master(entry) for _, entry in group]
        form = UPDATE_CLASSES[kind].form if kind is not None and kind in UPDATE_CLASSES else ""
        rule = _FORMS.get(form)
        if rule is None:
            for entry in _kinds(entries):
                alone = [entry.of(replace(entry.tensor, count=1))]
                self._stream.passing(scratch_of(entry.optimizer, kind or "", alone, self._setup.profile.optimizer)[0])
            return
        rule(self._stream, entries, self._setup.profile.optimizer)

    def _master(self, entry: TensorStates) -> TensorStates:
        return master_of(entry, self._setup.config.master_weights)

    def _bundled(self, group: Sequence[Named], gradients: dict[str, int]) -> None:
        """Update tensor by tensor; of those that are alike the first shows what all take and give back."""
        seen: set[tuple[object, ...]] = set()
        for name, entry in group:
            kind = (entry.tensor.role, entry.tensor.shape)
            if kind not in seen:
                seen.add(kind)
                (self._orthogonalised if entry.optimizer.orthogonalises else self._in_chunks)(entry)
            if entry.tensor.name in self._stored and name in gradients:
                self._stream.free(gradients.pop(name))

    def _orthogonalised(self, entry: TensorStates) -> None:
        """Write what Muon takes: its update, then chunks of momentum, Newton-Schulz, and chunks of the weight."""
        elements = entry.tensor.elements
        m, n = sorted(entry.tensor.shape[-2:])
        c, fast = min(COLUMN_CHUNK, n), self._setup.profile.newton_schulz == "fast"
        own = self._stream.allocate_all([] if entry.gradient_name == "bf16" else [2 * elements])
        k = chunk_elements(elements, entry.optimizer.slots[0].block_elements)
        staged = [staged_bytes(entry, k)] if self._setup.offloads_states else []
        self._stream.passing(*_pieces(moment_chunk_bytes(entry), 4 * k), *staged)
        self._stream.passing(*[2 * m * m] * (2 if fast else 1), *[2 * m * c] * (1 if fast else 2))
        self._stream.passing(*_pieces(weight_chunk_bytes(entry), 4 * chunk_elements(elements, 1)))
        self._stream.free_all(own)

    def _in_chunks(self, entry: TensorStates) -> None:
        """Write what the bundled AdamW takes: chunks of moments, of the gradient and of the weight."""
        size = tensor_temporaries(self._setup, entry).bytes
        self._stream.passing(*_pieces(size, 4 * chunk_elements(entry.tensor.elements, 1)))


def _pieces(size: int, piece: int) -> list[int]:
    """Return ``size`` as whole pieces, and the rest."""
    whole, rest = divmod(size, piece)
    return [piece] * whole + ([rest] if rest else [])


def _kinds(entries: Sequence[TensorStates]) -> list[TensorStates]:
    """Return the first of the tensors that are alike."""
    return list({(entry.tensor.role, entry.tensor.shape): entry for entry in reversed(entries)}.values())[::-1]


def _bytes(entry: TensorStates) -> int:
    return entry.tensor.elements * FLOAT_BYTES[entry.format_name]


def _in_place(stream: EventStream, entries: Sequence[TensorStates], kernel: str) -> None:
    """Write nothing."""
    del stream, entries, kernel


def _adamw(stream: EventStream, entries: Sequence[TensorStates], kernel: str) -> None:
    """Write the square roots of torch.optim.AdamW, all at once or one after the other with a quotient.

    Source:
        torch/optim/adam.py (v2.13.0), ``_multi_tensor_adam`` and ``_single_tensor_adam``.
    """
    if kernel == "fused":
        return
    if kernel == "foreach":
        stream.passing(*map(_bytes, entries))
        return
    before: list[int] = []
    for entry in entries:
        root, quotient = stream.allocate_all([_bytes(entry)] * 2)
        stream.free_all([root, *before])
        before = [quotient]
    stream.free_all(before)


def _torch_muon(stream: EventStream, entries: Sequence[TensorStates], kernel: str) -> None:
    """Write what torch.optim.Muon takes for each matrix (torch/optim/_muon.py, v2.13.0)."""
    del kernel
    for entry in entries:
        m, n = sorted(entry.tensor.shape)
        stream.passing(FLOAT_BYTES[entry.format_name] * m * n, *[2 * m * n] * 2, *[2 * m * m] * 2)


def _lion(stream: EventStream, entries: Sequence[TensorStates], kernel: str) -> None:
    """Write the copy of each momentum, and its sum with the gradient (lion_pytorch/lion_pytorch.py, 0.2.5)."""
    del kernel
    for entry in entries:
        stream.passing(*[_bytes(entry)] * 2)


_FORMS: Mapping[str, Callable[[EventStream, Sequence[TensorStates], str], None]] = {
    "adamw": _adamw,
    "in-place": _in_place,
    "lion": _lion,
    "torch-muon": _torch_muon,
}
