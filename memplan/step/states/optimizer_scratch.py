"""Temporaries of the optimizer step: what an update allocates beyond what it keeps."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from memplan.catalog.update_classes import BUNDLED, NO_UPDATE, STACKED
from memplan.documents.frozen_values import dataclass
from memplan.model.inventory import Role
from memplan.step.states.muon_batches import ALONE, Alike, MuonBatch, alike, batch_phases, muon_batches, round_phases
from memplan.step.states.muon_scratch import CHUNK_ELEMENTS, COLUMN_CHUNK, adamw_sizes, decoding_sizes, muon_phases
from memplan.step.states.stacked_updates import stacked_scratch
from memplan.step.states.update_algorithms import is_in_second_group, run_of, scratch_of
from memplan.step.tensors.tensor_states import TensorStates
from memplan.training.resolved import FLOAT_BYTES, TrainingSetup
from memplan.units import ceil_div


@dataclass(frozen=True, slots=True)
class Temporaries:
    """Scratch memory of an update, and the formula that it came from."""

    bytes: int  # Less the gradients that updates before it have used up
    formula: str
    used_up: int = 0  # Bytes of these


NOTHING = Temporaries(0, "0: in place")
ON_HOST = Temporaries(0, "0: the optimizer steps in host memory")


def step_temporaries(setup: TrainingSetup, tensors: Iterable[TensorStates]) -> Temporaries:
    """Return the largest scratch memory of an optimizer step over all trainable tensors.

    Optimizers step one after the other, Muon first, so the largest of them counts. Where the bundled
    optimizer keeps gradients in stores, it frees each one after its update, and the freed bytes are
    subtracted from the scratch of the updates that follow.
    """
    if setup.config.gradients.lifetime == "layer":
        return max((tensor_temporaries(setup, entry) for entry in trained_kinds(tensors)), key=_size)
    tensors = tuple(tensors)
    if any(entry.stepper == STACKED for entry in tensors):
        return Temporaries(*stacked_scratch(tensors, setup.config.parallel.data))
    result, free = NOTHING, 0
    for group in sorted(_groups(tensors).values(), key=lambda group: group[0].optimizer.takes == "all"):
        stored = _stored(setup, group)
        if _steps_by_tensor(setup, group):
            before = dict(zip(map(_kind, reversed(group)), reversed(_stored_before(group, stored)), strict=True))
            batches = _batches(setup, group, stored)
            for entry in trained_kinds(group):  # the first of a kind: more is used up before the others
                result = max(result, _less(_bundled(setup, entry, batches), free + before[_kind(entry)]), key=_size)
        else:
            result = max(result, _less(_group_temporaries(setup, group), free), key=_size)
        free += sum(size * entry.tensor.count for entry, size in zip(group, stored, strict=True))
    return result


def trained_kinds(tensors: Iterable[TensorStates]) -> list[TensorStates]:
    """Return the trained tensors, of those that share a role and a shape the first: their updates are alike."""
    result: dict[tuple[Role, tuple[int, ...], tuple[int, ...]], TensorStates] = {}
    for entry in tensors:
        if entry.stepper is not None:
            result.setdefault(_kind(entry), entry)
    return list(result.values())


def _kind(entry: TensorStates) -> tuple[Role, tuple[int, ...], tuple[int, ...]]:
    return entry.tensor.role, entry.tensor.shape, entry.tensor.divided


def _groups(tensors: Iterable[TensorStates]) -> dict[str, list[TensorStates]]:
    """Return the trained tensors by optimizer."""
    groups: dict[str, list[TensorStates]] = {}
    for entry in tensors:
        if entry.stepper is not None:
            groups.setdefault(entry.optimizer_name, []).append(entry)
    return groups


def emptied_names(setup: TrainingSetup, tensors: Iterable[TensorStates]) -> frozenset[str]:
    """Return the tensors whose gradients a step takes away, though it leaves others."""
    if setup.config.zero_gradients == "fill":
        return stored_names(setup, tensors)
    return frozenset(entry.tensor.name for entry in tensors if entry.stepper is not None)


def stored_names(setup: TrainingSetup, tensors: Iterable[TensorStates]) -> frozenset[str]:
    """Return the tensors whose gradients stand in a store of the bundled optimizer, which the step empties."""
    groups = ((group, _stored(setup, group)) for group in _groups(tensors).values())
    return frozenset(
        entry.tensor.name for group, sizes in groups for entry, size in zip(group, sizes, strict=True) if size
    )


def _less(item: Temporaries, free: int) -> Temporaries:
    return Temporaries(max(0, item.bytes - free), item.formula, min(item.bytes, free))


def _steps_by_tensor(setup: TrainingSetup, group: list[TensorStates]) -> bool:
    """Whether the bundled optimizer steps the weights of a group: one tensor after the other."""
    return group[0].stepper == BUNDLED and setup.config.master_weights == "none"


def _stored(setup: TrainingSetup, group: list[TensorStates]) -> list[int]:
    """Return the bytes of each gradient that stands in a store of the bundled optimizer, 0 for others.

    Coded weights have stores, in bf16 unless told otherwise; then, or where a gradient is converted, all have.
    """
    if not _steps_by_tensor(setup, group):
        return [0] * len(group)
    every = any(_converted(entry) or (entry.coded_as is not None and entry.gradient_name != "bf16") for entry in group)
    return [entry.gradient_bytes if every or entry.coded_as else 0 for entry in group]


def handed_over(setup: TrainingSetup, entry: TensorStates) -> bool:
    """Whether the bundled optimizer moves a parameter's gradient into a store, and lets go of the one formed."""
    return entry.trainable and _converted(entry) and _stored(setup, [entry])[0] > 0


def _converted(entry: TensorStates) -> bool:
    """Whether a parameter's gradient is kept in another dtype than its own."""
    return not entry.quantized and entry.gradient_name != entry.format_name


def _stored_before(group: list[TensorStates], stored: list[int]) -> list[int]:
    """Return, for the first of each tensor's copies, the stored gradients that are used up before it."""
    result: list[int] = []
    before_run = in_run = done = 0
    for index, (entry, size) in enumerate(zip(group, stored, strict=True)):
        if index and run_of(group[index - 1]) != run_of(entry):
            before_run += in_run
            in_run, done = 0, before_run
        result.append(done)
        done += size
        in_run += size * entry.tensor.count
    return result


def store_bytes(setup: TrainingSetup, entry: TensorStates, *, stored: bool = False) -> int:
    """Return the scratch memory of rounding into, or adding to, a gradient store of the bundled optimizer.

    Args:
        stored: Whether it has one in any case, as all of an optimizer's weights have where one of them needs its own.

    Formula:
        Two chunks of fp32, and two fp32 numbers where the store has a scale.

    Source:
        ``add_workspace_bytes`` in memplan/muon/stores/gradient_stores.py, measured.
    """
    if not entry.trainable or not (stored or entry.coded_as or _converted(entry)):
        return 0
    if not _steps_by_tensor(setup, [entry]) and entry.gradient_bytes >= 2 * entry.tensor.elements:
        return 0  # a tensor of its own, which further gradients are added to in place
    scale = 8 if setup.gradient is not None and setup.gradient.tensor_bytes else 0
    return 8 * min(CHUNK_ELEMENTS, entry.tensor.elements) + scale


def _size(item: Temporaries) -> int:
    return item.bytes


def tensor_temporaries(setup: TrainingSetup, entry: TensorStates) -> Temporaries:
    """Return the scratch memory of updating one tensor alone."""
    return _group_temporaries(setup, [entry.of(replace(entry.tensor, count=1))])


def _group_temporaries(setup: TrainingSetup, group: list[TensorStates]) -> Temporaries:
    return (_with_masters if setup.config.master_weights != "none" else _update)(setup, group)


def _update(setup: TrainingSetup, group: list[TensorStates]) -> Temporaries:
    """Return the scratch memory of an update of the weights themselves."""
    kind = group[0].stepper
    if kind == BUNDLED:
        batches = _batches(setup, group, [0] * len(group))
        return max((_bundled(setup, entry, batches) for entry in trained_kinds(group)), key=_size)
    assert kind is not None
    if kind == NO_UPDATE:
        return NOTHING
    group = sorted(group, key=is_in_second_group(setup))
    return Temporaries(*scratch_of(group[0].optimizer, kind, group, setup.profile.optimizer))


def _batches(setup: TrainingSetup, group: list[TensorStates], stored: list[int]) -> dict[Alike, MuonBatch]:
    names = [entry.tensor.name for entry, size in zip(group, stored, strict=True) if size]
    return muon_batches(setup, ((entry, entry.tensor.count) for entry in group), names)


def most_together(setup: TrainingSetup, tensors: Iterable[TensorStates]) -> int:
    """Return how many matrices the bundled Muon updates together at most; 1 where each is updated by itself."""
    if setup.config.gradients.lifetime == "layer":
        return 1  # each as soon as its gradient is there
    groups = [group for group in _groups(tensors).values() if group[0].stepper == BUNDLED]
    result = [_batches(setup, group, _stored(setup, group)) for group in groups]
    return max((batch.together for batches in result for batch in batches.values()), default=1)


def _bundled(setup: TrainingSetup, entry: TensorStates, batches: Mapping[Alike, MuonBatch]) -> Temporaries:
    """Return the scratch memory of updating the tensors that are like one, in batches where they are."""
    if not entry.optimizer.orthogonalises:
        return _chunked(setup, entry)
    batch = batches.get(alike(entry), ALONE)
    if batch.ranks > 1:
        shape = " x ".join(map(str, entry.tensor.divided or entry.tensor.shape))
        shared = "divided" if entry.tensor.divided else "shared"
        text = f"{batch.together} matrices of {shape}, {shared} among {batch.ranks} ranks, at a time"
        return Temporaries(round_phases(setup, entry, batch).bytes, text)
    alone = _muon(setup, entry) if batch.some_alone else NOTHING
    if batch.together == 1:
        return alone
    size = batch_phases(setup, entry, batch.together).bytes
    text = f"{batch.together} matrices of {' x '.join(map(str, entry.tensor.shape))} at a time (muon_batch_bytes)"
    return max(alone, Temporaries(size, text), key=_size)


def _with_masters(setup: TrainingSetup, group: list[TensorStates]) -> Temporaries:
    """Return the scratch memory of an update of master weights: all gradients are cast to their dtype first."""
    name = setup.config.master_weights
    of_kind = {_kind(entry): master_of(entry, name) for entry in trained_kinds(group)}
    masters = [of_kind[_kind(entry)].of(entry.tensor) for entry in group]
    casts = sum(
        master.gradient_bytes * entry.tensor.count
        for entry, master in zip(group, masters, strict=True)
        if entry.gradient_name != name
    )
    update = _update(setup, masters)
    return Temporaries(casts + update.bytes, f"gradients cast to {name}, and {update.formula}")


def master_of(entry: TensorStates, name: str) -> TensorStates:
    """Return the master weight of a tensor, and its gradient, in place of the weight."""
    width = FLOAT_BYTES[name]
    size = entry.tensor.elements * width
    return replace(
        entry, format_name=name, element_bytes=width, formed_bytes=size, gradient_bytes=size, gradient_name=name
    )


def _muon(setup: TrainingSetup, entry: TensorStates) -> Temporaries:
    """Return Muon's scratch memory for one matrix."""
    phases = muon_phases(setup, entry)
    extra = f" + {phases.update:,} for the update" if phases.update else ""
    if phases.chunk_bytes > sum(phases.workspace):
        return Temporaries(phases.bytes, f"momentum and weight in chunks of {CHUNK_ELEMENTS:,} elements{extra}")
    m, n = sorted(entry.tensor.shape[-2:])
    squares, chunks = (4, 2) if setup.profile.newton_schulz == "fast" else (2, 4)
    text = f"{squares} m^2 + {chunks} m c{extra}, m = {m}, n = {n}, c = {min(COLUMN_CHUNK, n)}"
    return Temporaries(phases.bytes, text)


def _chunked(setup: TrainingSetup, entry: TensorStates) -> Temporaries:
    """Return the scratch memory of the bundled AdamW."""
    k, own, coding = adamw_sizes(setup, entry)
    text = f"the largest tensor in chunks of {k:,} elements"
    staged = ", and two stretches of its states" if setup.offloads_states else ""
    return Temporaries(sum(own) + sum(coding), f"{text}{staged}")


def average_bytes(setup: TrainingSetup, tensors: Iterable[TensorStates]) -> int:
    """Return the scratch memory of moving the averaged weights: one weight in the average's dtype, decoded first.

    The weight that was decoded before it is still named then.
    """
    name = setup.config.weight_average
    trained = [entry for entry in tensors if entry.trainable]
    decoded = [entry.tensor.elements * setup.compute_bytes if entry.quantized else 0 for entry in trained]
    result = 0
    for entry, current, previous in zip(trained, decoded, [0, *decoded], strict=False):
        own = setup.config.compute_dtype if entry.quantized else entry.format_name
        cast = 0 if own == name else entry.tensor.elements * FLOAT_BYTES[name]
        decoding = previous + sum(decoding_sizes(entry, setup.compute_bytes)) if entry.quantized else 0
        result = max(result, current + max(cast, decoding))
    return result


FOREACH_CHUNK_ELEMENTS = 2**16
"""Elements whose norm one block of ``_foreach_norm`` takes (aten/src/ATen/native/cuda/MultiTensorApply.cuh)."""


def clipping_bytes(tensors: Iterable[TensorStates]) -> int:
    """Return the scratch memory of ``clip_grad_norm_``.

    One norm per tensor, and the larger of: partial norms in fp32, for each tensor as many as the
    largest has chunks; the stack of the norms, and their norm.

    Source:
        torch/nn/utils/clip_grad.py (v2.13.0), ``_get_total_norm``; aten/src/ATen/native/cuda/ForeachReduceOp.cu.
    """
    trained = [entry for entry in tensors if entry.trainable]
    if not trained:
        return 0
    count = sum(entry.tensor.count for entry in trained)
    widths = [(e.tensor.count, 4 if e.gradient_bytes == 4 * e.tensor.elements else 2) for e in trained]
    norms = sum(count * width for count, width in widths)
    chunks = max(ceil_div(entry.tensor.elements, FOREACH_CHUNK_ELEMENTS) for entry in trained)
    return norms + max(4 * count * chunks, norms + max(width for _, width in widths))


def sharded_clipping_bytes(tensors: Iterable[TensorStates]) -> int:
    """Return the scratch memory of ``clip_grad_norm_`` over shards that are distributed tensors.

    Formula:
        Of each tensor, the larger of: its norm and partial norms in fp32, as many as the largest shard has chunks;
        five norms: its own, a distributed tensor of it, what is reduced of that, their stack's part, and the stack again.

    Source:
        As :func:`clipping_bytes`; torch/distributed/tensor/_ops/_math_ops.py (v2.13.0), ``_foreach_norm``; traced.
    """
    trained = [entry for entry in tensors if entry.trainable]
    if not trained:
        return 0
    chunks = max(ceil_div(entry.tensor.elements, FOREACH_CHUNK_ELEMENTS) for entry in trained)
    widths = [(e.tensor.count, 4 if e.gradient_bytes == 4 * e.tensor.elements else 2) for e in trained]
    return sum(count * max(width + 4 * chunks, 5 * width) for count, width in widths)
