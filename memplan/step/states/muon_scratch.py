"""What the bundled optimizer takes for one chunk of a tensor, and the tables of coded weights."""

from __future__ import annotations

from memplan.catalog.entries import CodecScratch, StateSlot, StorageFormat
from memplan.step.tensors.state_slots import slot_bytes
from memplan.step.tensors.tensor_states import TensorStates
from memplan.units import round_up

CHUNK_ELEMENTS = 2**20
"""Elements that the bundled optimizer takes at a time (memplan/muon, ``chunk_elements``)."""

COLUMN_CHUNK = 512
"""Columns that streamed Newton-Schulz takes at a time (memplan/muon, ``ns_chunk_columns``)."""


def moment_chunk_bytes(entry: TensorStates) -> int:
    """Return what updating a momentum takes for one chunk: fp32 numbers, and codes being formed."""
    slot = entry.optimizer.slots[0]
    block = slot.block_elements
    k = chunk_elements(entry.tensor.elements, block)
    if block == 1:
        return 4 * k + (0 if slot.block_bytes == 4 else 4 * k)
    return 4 * k + 4 * k + 4 * k // block + index_bytes(slot) * k + slot.codebook_bytes


def index_bytes(slot: StateSlot) -> int:
    """Return the bytes of a code while codes are formed: 4 where they are looked up, 1 where they are packed, else none.

    Source:
        ``scratch`` in memplan/muon/state_codecs/codecs.py and block_codecs.py.
    """
    if slot.codebook_bytes:
        return 4
    return 1 if slot.block_bytes - slot.scale_bytes < slot.block_elements else 0


def staged_bytes(entry: TensorStates, k: int) -> int:
    """Return the buffers through which a state in host memory passes: two stretches of k elements that take turns.

    Formula:
        ``ceil(min(2 k, n) / block_elements) * block_bytes``, summed over the state's slots.

    Source:
        memplan/muon/updates/offload.py and ``_staged_bytes`` in memplan/muon/byte_model.py, measured.
    """
    optimizer, elements = entry.optimizer, entry.tensor.elements
    slots = optimizer.exempt_slots if elements < optimizer.exempt_below else optimizer.slots
    resident = (min(2 * k, elements),)
    return sum(slot_bytes(slot, resident, entry.element_bytes) for slot in slots if slot.layout == "elementwise")


def weight_block(entry: TensorStates) -> int:
    """Return the elements of a block of a weight, where chunks of it begin and end."""
    return 1 if entry.coded_as is None else entry.coded_as.block_elements


def weight_scratch_bytes(entry: TensorStates, k: int) -> int:
    """Return what writing k updated elements of a weight takes: an fp32 copy of all but fp32, and codes being formed."""
    if entry.coded_as is not None:
        scratch = codec_scratch(entry.coded_as)
        blocks = min(k, entry.tensor.elements) // entry.coded_as.block_elements
        return 4 * k + scratch.coding_bytes * min(blocks, scratch.blocks_at_once)
    return 0 if entry.format_name == "fp32" else 4 * k


def weight_chunk_bytes(entry: TensorStates) -> int:
    """Return what updating a weight takes for one chunk: an update in fp32, and what writing it takes."""
    k = chunk_elements(entry.tensor.elements, weight_block(entry))
    return 4 * k + weight_scratch_bytes(entry, k)


def decoding_bytes(entry: TensorStates, compute_bytes: int) -> int:
    """Return what decoding a weight for a product takes besides the decoded copy: some rows at a time, in fp32.

    Source:
        ``dequantise_bytes`` in memplan/muon/weights/quantised.py, measured.
    """
    if entry.coded_as is None:
        return 0
    scratch = codec_scratch(entry.coded_as)
    exact = decoding_rows_bytes(entry, compute_bytes)
    decoded = min(_rows_at_once(entry) * entry.tensor.shape[-1], CHUNK_ELEMENTS)
    return exact + scratch.decoding_bytes * decoded // entry.coded_as.block_elements + scratch.once_bytes


def decoding_rows_bytes(entry: TensorStates, compute_bytes: int) -> int:
    """Return the fp32 rows that a weight is decoded into, some at a time, where products are not in fp32."""
    if entry.coded_as is None or compute_bytes == 4:
        return 0
    return 4 * _rows_at_once(entry) * entry.tensor.shape[-1]


def _rows_at_once(entry: TensorStates) -> int:
    columns = entry.tensor.shape[-1]
    return min(max(CHUNK_ELEMENTS // columns, 1), entry.tensor.elements // columns)


def codec_scratch(layout: StorageFormat) -> CodecScratch:
    """Return what the codec of a format takes."""
    assert layout.codec_scratch is not None  # required of coded formats (memplan/catalog/entry_checks.py)
    return layout.codec_scratch


def chunk_elements(elements: int, block: int) -> int:
    """Return the elements of one chunk: whole blocks, at least one."""
    return min(max(CHUNK_ELEMENTS // block, 1) * block, round_up(elements, block))
