"""The events of what comes after backward: clipping, the updates, and averages."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from memplan.catalog.update_classes import BUNDLED, NO_UPDATE, UNTRACED, UPDATE_CLASSES
from memplan.step.events import bundled_events
from memplan.step.events.event_stream import EventStream
from memplan.step.events.model_tensors import ModelTensors
from memplan.step.states.muon_batches import ALONE, alike, muon_batches
from memplan.step.states.muon_scratch import state_pieces
from memplan.step.states.optimizer_scratch import (
    FOREACH_CHUNK_ELEMENTS,
    handed_over,
    master_of,
    store_bytes,
    stored_names,
)
from memplan.step.states.parallel_shards import Named
from memplan.step.states.update_algorithms import RULES, is_in_second_group, kinds, makes_nothing, scratch_of
from memplan.step.step_inputs import StepInputs
from memplan.step.tensors.tensor_states import TensorStates
from memplan.step.tensors.update_kernels import has_fused_kernel, is_exempt, is_on_device, slot_bytes, slots_of_class
from memplan.training.resolved import FLOAT_BYTES
from memplan.units import ceil_div

_EARLY = frozenset({BUNDLED, UNTRACED})
"""Classes whose states are there before the first step; others make them in it."""


class Updates:
    """Updates of a model's weights, by one optimizer after the other.

    Args:
        stream: Where events are written to.
        pieces: What is stepped in place of the weights, with names; None for these.
    """

    __slots__ = (
        "_alone",
        "_by_name",
        "_groups",
        "_inputs",
        "_known",
        "_second",
        "_setup",
        "_sizes",
        "_stored",
        "_stream",
        "_tensors",
    )

    def __init__(
        self, stream: EventStream, inputs: StepInputs, tensors: ModelTensors, pieces: Sequence[Named] | None = None
    ) -> None:
        self._stream, self._inputs, self._setup, self._tensors = stream, inputs, inputs.setup, tensors
        self._second = is_in_second_group(self._setup)
        alone = inputs.setup.config.gradients.lifetime == "layer"
        stepped = tensors.trained if pieces is None else pieces
        groups: dict[str, list[Named]] = {}
        for name, entry in [(name, entry) for name, entry in stepped if entry.stepper is not None]:
            groups.setdefault(name if alone else entry.optimizer_name, []).append((name, entry))
        self._groups = sorted(groups.values(), key=lambda group: group[0][1].optimizer.takes == "all")
        self._stored = stored_names(inputs.setup, inputs.states.tensors)
        self._by_name = dict(stepped)
        self._alone: set[str] = set()
        self._known: dict[int, tuple[Sequence[int], Sequence[int]]] = {}
        self._sizes: dict[int, Sequence[int]] = {}

    def divide(self, part: Callable[[str], int]) -> None:
        """Step parts of the model one after the other, each by optimizers of its own; ``part`` says which one a weight is of."""
        parts = sorted({part(name) for name in self._by_name})
        groups = [[pair for pair in group if part(pair[0]) == own] for own in parts for group in self._groups]
        self._groups = [group for group in groups if group]

    def make_early_states(self) -> None:
        """Allocate the states that an optimizer makes when it is made."""
        for group in self._groups:
            if group[0][1].stepper in _EARLY:
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
            self._update(group, gradients, first=first and group[0][1].stepper not in _EARLY)

    def update_alone(self, name: str, *, first: bool) -> None:
        """Write the events of updating one tensor, which makes its states where it is the first time."""
        entry = self._by_name[name]
        self._update([(name, entry)], {}, first=first and entry.stepper not in _EARLY)

    def use_up(self, name: str, gradient: int) -> None:
        """Write the events of updating one weight inside backward, and of letting its gradient go.

        Args:
            name: The weight's, with the number of its layer.
            gradient: Storage of its gradient as it was formed.
        """
        entry, stream, formed = self._by_name[name], self._stream, [gradient]
        own = self._setup.config.compute_dtype if entry.quantized else entry.format_name
        stream.of("gradients")
        if entry.gradient_bytes != stream.sizes[gradient] or entry.gradient_name != own:
            scale = 0 if self._setup.gradient is None else self._setup.gradient.tensor_bytes
            formed.insert(0, stream.allocate(entry.gradient_bytes - scale))
            stream.of("temporaries")
            stream.passing(*[store_bytes(self._setup, entry) // 2] * 2)
            if not entry.quantized and handed_over(self._setup, entry):
                stream.free(formed.pop())
        stream.of("temporaries")
        if entry.stepper not in _EARLY and name not in self._alone:
            self._update([(name, entry)], {}, first=True)
        else:
            self._update_again(name, entry)
        self._alone.add(name)
        stream.free_all(formed)

    def _update_again(self, name: str, entry: TensorStates) -> None:
        """Write the events of updating a weight that has its states: the same for all that are stored alike."""
        stream = self._stream
        if id(entry) not in self._known:
            storages, start = len(stream.sizes), len(stream.codes)
            self._update([(name, entry)], {}, first=False)
            codes = [code - 2 * storages for code in stream.codes[start:]]
            self._known[id(entry)] = stream.sizes[storages:], codes
        else:
            stream.repeat(*self._known[id(entry)])

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
        for place in range(len(group)):
            self._make_state(group, place)

    def _make_state(self, group: Sequence[Named], place: int) -> None:
        """Allocate the states of one tensor; what all share comes with the first that needs it."""
        entry = group[place][1]
        self._stream.of("optimizer_states")
        if id(entry) not in self._sizes:
            self._sizes[id(entry)] = self._state_sizes(entry)
        self._stream.allocate_all(self._sizes[id(entry)])
        if _shares(entry) and not any(_shares(other) for _, other in group[:place]):
            self._stream.allocate(entry.optimizer.shared_bytes)
        self._stream.of("temporaries")

    def _state_sizes(self, entry: TensorStates) -> list[int]:
        """Return the bytes of each state tensor on the device."""
        if self._setup.offloads_states or entry.stepper in (None, NO_UPDATE):
            return []
        optimizer, shape = entry.optimizer, entry.tensor.shape
        own = FLOAT_BYTES.get(self._setup.config.master_weights, 0) or entry.element_bytes
        fused = self._setup.profile.optimizer == "fused" and has_fused_kernel(optimizer, entry.stepper or "")
        slots = optimizer.exempt_slots if is_exempt(optimizer, shape) else optimizer.slots
        sizes = [
            (slot, slot_bytes(slot, shape, own))
            for slot in slots_of_class(entry.stepper or "", slots)
            if slot.dimensions != ("more" if len(shape) < 2 else "one") and is_on_device(slot, shape, fused)
        ]
        bundled = entry.stepper == BUNDLED
        return [piece for slot, size in sizes for piece in (state_pieces(slot, size) if bundled else [size])]

    # ---------------------------------------------------------------- what an update takes for itself
    def _update(self, group: Sequence[Named], gradients: dict[str, int], *, first: bool) -> None:
        """Write what the update of a group allocates and frees, the casts of gradients for master weights included.

        Args:
            gradients: As :meth:`step` takes them.
            first: Whether it makes the states of its tensors.
        """
        group = sorted(group, key=lambda item: self._second(item[1]))
        masters = self._masters(group)
        name, kind = self._setup.config.master_weights, group[0][1].stepper or ""
        entries = [entry if name == "none" else master_of(entry, name) for _, entry in group]
        make = partial(self._make_state, group) if first else makes_nothing
        rule = RULES.get(UPDATE_CLASSES[kind].form) if kind in UPDATE_CLASSES else None
        if kind == BUNDLED:
            self._bundled(group, entries, gradients)
        elif rule is not None:
            rule.write(self._stream, entries, self._setup.profile.optimizer, make)
        else:
            self._stated(group, entries, make)
        self._stream.free_all(masters)

    def _stated(self, group: Sequence[Named], entries: Sequence[TensorStates], make: Callable[[int], None]) -> None:
        """Write what an optimizer's entry states: copies of all tensors at once, the rest tensor by tensor."""
        for place in range(len(group)):
            make(place)
        first = entries[0]
        at_once = first.optimizer.scratch.all_tensors if first.stepper == first.optimizer.implementation else 0
        sizes = [entry.tensor.elements * FLOAT_BYTES[entry.format_name] for entry in entries]
        copies = self._stream.allocate_all(sizes * at_once)
        for entry in kinds(entries):
            alone = [entry.of(replace(entry.tensor, count=1))]
            scratch = scratch_of(entry.optimizer, entry.stepper or "", alone, self._setup.profile.optimizer)[0]
            self._stream.passing(scratch - at_once * entry.tensor.elements * FLOAT_BYTES[entry.format_name])
        self._stream.free_all(reversed(copies))

    def _bundled(self, group: Sequence[Named], entries: Sequence[TensorStates], gradients: dict[str, int]) -> None:
        """Update tensor by tensor, or in batches; of those that are alike the first shows what all take and give back."""
        seen: set[tuple[object, ...]] = set()
        batches = muon_batches(self._setup, ((entry, 1) for entry in entries), self._stored)
        for (name, own), entry in zip(group, entries, strict=True):
            batch = batches.get(alike(entry), ALONE)
            kind = (entry.tensor.role if batch is ALONE else "", entry.tensor.shape, entry.tensor.divided)
            if kind not in seen:
                seen.add(kind)
                if batch.ranks > 1:
                    bundled_events.updated_in_rounds(self._stream, self._setup, entry, batch)
                elif batch.together > 1:
                    bundled_events.updated_together(self._stream, self._setup, entry, batch.together)
                if batch.some_alone:
                    bundled_events.updated(self._stream, self._setup, entry)
            if own.tensor.name in self._stored and name in gradients:
                self._stream.free(gradients.pop(name))


def _shares(entry: TensorStates) -> bool:
    """Whether a tensor needs what its optimizer holds once for all."""
    return entry.optimizer.shared_bytes > 0 and not is_exempt(entry.optimizer, entry.tensor.shape)
