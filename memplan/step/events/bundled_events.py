"""The events of the bundled optimizer's update of one tensor: a codec's scratch, Newton-Schulz, and the weight's chunks.

Every turn of a loop over chunks takes and gives back the same memory, so that the first stands for all.

Source: memplan/muon/updates/steps.py, memplan/muon/orthogonalisation/newton_schulz.py.
"""

from __future__ import annotations

from collections.abc import Iterable

from memplan.catalog.entries import StateSlot
from memplan.step.events.event_stream import EventStream
from memplan.step.states.muon_batches import batch_phases
from memplan.step.states.muon_scratch import COLUMN_CHUNK, chunk_elements, codec_scratch, index_bytes, weight_block
from memplan.step.tensors.state_slots import is_exempt
from memplan.step.tensors.tensor_states import TensorStates
from memplan.training.resolved import TrainingSetup
from memplan.units import ceil_div


def updated(stream: EventStream, setup: TrainingSetup, entry: TensorStates) -> None:
    """Write what the update of one tensor allocates and frees."""
    (_orthogonalised if entry.optimizer.orthogonalises else _in_chunks)(stream, setup, entry)


def updated_together(stream: EventStream, setup: TrainingSetup, entry: TensorStates, count: int) -> None:
    """Write what the update of ``count`` matrices together allocates and frees."""
    phases = batch_phases(setup, entry, count)
    update = stream.allocate(phases.update)
    stream.free_all(stream.allocate_all(list(phases.momentum)))
    norms, exact, norm = stream.allocate_all(list(phases.norms))
    stream.free_all([exact, norms, norm])
    for sizes in (phases.workspace, phases.weights):
        stream.free_all(stream.allocate_all(list(sizes)))
    stream.free(update)


def state_pieces(slot: StateSlot, size: int) -> list[int]:
    """Return the tensors that hold a state of ``size`` bytes: codes and scales are two."""
    if slot.block_elements == 1:
        return [size]
    scales = size // slot.block_bytes * slot.scale_bytes
    return [size - scales, scales]


def _orthogonalised(stream: EventStream, setup: TrainingSetup, entry: TensorStates) -> None:
    """Write what Muon takes for a matrix: its update unless the gradient serves, and three phases one after another."""
    elements, slots = entry.tensor.elements, _moments(entry)
    k = chunk_elements(elements, slots[0].block_elements)
    update = stream.allocate_all([] if entry.gradient_name == "bf16" else [2 * elements])
    _release(stream, stream.allocate_all([*_codec_sizes(slots[0], k), 4 * k, *_staged_sizes(setup, entry, k)]))
    rows = entry.tensor.shape[-2]
    norms, exact, norm = stream.allocate_all([2 * rows, 4 * rows, 4])
    stream.free_all([exact, norms, norm])
    m, n = sorted(entry.tensor.shape[-2:])
    square, chunk = 2 * m * m, 2 * m * min(COLUMN_CHUNK, n)
    workspace = [square, square, chunk] if setup.profile.newton_schulz == "fast" else [square, chunk, chunk]
    stream.free_all(stream.allocate_all(workspace))
    block = chunk_elements(elements, weight_block(entry))
    own = stream.allocate_all([4 * block, *_weight_sizes(entry, block)])
    stream.passing(*_coding_sizes(entry, block))
    stream.free_all([*own, *update])


def _in_chunks(stream: EventStream, setup: TrainingSetup, entry: TensorStates) -> None:
    """Write what AdamW takes for a tensor: scratch of both moments' codecs, a chunk of the gradient, and the weight's."""
    slots = _moments(entry)
    k = chunk_elements(entry.tensor.elements, max(slots[0].block_elements, weight_block(entry)))
    codecs = [size for slot in slots for size in _codec_sizes(slot, k)]
    own = stream.allocate_all([*codecs, 4 * k, *_weight_sizes(entry, k), *_staged_sizes(setup, entry, k)])
    stream.passing(*_coding_sizes(entry, k))
    _release(stream, own)


def _release(stream: EventStream, storages: list[int]) -> None:
    """Free scratch: scales, codes, and then values, of which the last turn still has views."""
    stream.free_all(sorted(storages, key=stream.sizes.__getitem__))


def _moments(entry: TensorStates) -> list[StateSlot]:
    """Return the states of a tensor that have an element for each of its own."""
    optimizer = entry.optimizer
    slots = optimizer.exempt_slots if is_exempt(optimizer, entry.tensor.shape) else optimizer.slots
    return [slot for slot in slots if slot.layout == "elementwise"]


def _codec_sizes(slot: StateSlot, k: int) -> list[int]:
    """Return the scratch of a codec for k elements: codes being formed, values, scales and a codebook of n levels.

    Floats need nothing for fp32, and values for bf16.
    """
    if slot.block_elements == 1:
        return [] if slot.block_bytes == 4 else [4 * k]
    codes, values = index_bytes(slot) * k, [4 * k, 4 * (k // slot.block_elements)]
    if not slot.codebook_bytes:
        return [codes, *values] if codes else values
    boundaries = (slot.codebook_bytes - 4) // 2  # of 2 n - 1 numbers, n - 1
    return [slot.codebook_bytes - boundaries, *values, codes, boundaries]


def _weight_sizes(entry: TensorStates, k: int) -> list[int]:
    """Return the exact copy of k elements of a weight that is not fp32."""
    return [] if entry.coded_as is None and entry.format_name == "fp32" else [4 * k]


def _coding_sizes(entry: TensorStates, k: int) -> list[int]:
    """Return what coding k elements again takes: two tables as wide as powers of two, and what is narrow beside them.

    Source:
        ``TEMPORARIES`` in memplan/muon/weights/weight_formats.py, with stochastic rounding.
    """
    if entry.coded_as is None:
        return []
    scratch = codec_scratch(entry.coded_as)
    blocks = min(min(k, entry.tensor.elements) // entry.coded_as.block_elements, scratch.blocks_at_once)
    table = 2 ** (scratch.coding_bytes.bit_length() - 2) if scratch.coding_bytes > 1 else 0
    return [table * blocks, table * blocks, (scratch.coding_bytes - 2 * table) * blocks]


def _staged_sizes(setup: TrainingSetup, entry: TensorStates, k: int) -> list[int]:
    """Return the buffers that states in host memory pass through: two stretches of k elements, of a short state less."""
    if not setup.offloads_states:
        return []
    elements = entry.tensor.elements
    stretches = [min(k, elements), min(k, elements - k)][: min(2, ceil_div(elements, k))]
    return [size for stretch in stretches for size in _stretch_sizes(_moments(entry), stretch)]


def _stretch_sizes(slots: Iterable[StateSlot], elements: int) -> list[int]:
    """Return the tensors of a stretch of states."""
    return [
        size
        for slot in slots
        for size in state_pieces(slot, ceil_div(elements, slot.block_elements) * slot.block_bytes)
    ]
