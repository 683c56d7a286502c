"""What the bundled optimizer takes for one chunk of a tensor, and the tables of coded weights."""

from __future__ import annotations

from memplan.step.states.model_states import TensorStates, slot_bytes
from memplan.units import round_up

CHUNK_ELEMENTS = 2**20
"""Elements that the bundled optimizer takes at a time (memplan/muon, ``chunk_elements``)."""

COLUMN_CHUNK = 512
"""Columns that streamed Newton-Schulz takes at a time (memplan/muon, ``ns_chunk_columns``)."""


CODING: dict[str, tuple[int, int, int]] = {
    "q8-0": (32, 268, 32_768),
    "q4-0": (32, 285, 32_768),
    "iq3-xxs": (256, 137_412, 256),
    "iq2-xxs": (256, 71_364, 256),
    "iq2-xs": (256, 136_964, 256),
    "iq2-s": (256, 268_036, 128),
}
"""Codec -> (elements of a block, bytes per block while codes are sought, blocks at a time).

With stochastic rounding, without which coded weights do not train. Source: memplan/muon/weights/weight_formats.py, measured.
"""

DECODING: dict[str, tuple[int, int, int]] = {
    "q8-0": (32, 6, 0),
    "q4-0": (32, 16, 0),
    "iq3-xxs": (256, 2496, 32),
    "iq2-xxs": (256, 2368, 32),
    "iq2-xs": (256, 2432, 32),
    "iq2-s": (256, 2432, 32),
}
"""Codec -> (elements of a block, bytes per block while it is decoded, bytes once). Source: as above."""

GRID_TABLE_BYTES: dict[str, int] = {
    "iq3-xxs": 256 * (4 + 1 + 256) * 4,
    "iq2-xxs": 256 * (8 + 1 + 256) * 4,
    "iq2-xs": 512 * (8 + 1 + 512) * 4,
    "iq2-s": 1024 * (8 + 1 + 1024) * 4,
}
"""Codec -> bytes in fp32 of its grid, of half the squared length of each point, and of the distances between any two
(memplan/muon/weights/grid_formats.py)."""


def moment_chunk_bytes(entry: TensorStates) -> int:
    """Return what updating a momentum takes for one chunk: fp32 numbers, and codes being formed."""
    slot = entry.optimizer.slots[0]
    block = slot.block_elements
    k = chunk_elements(entry.tensor.elements, block)
    if block == 1:
        return 4 * k + (0 if slot.block_bytes == 4 else 4 * k)
    packed = slot.block_bytes - 4 < block
    return 4 * k + (5 if packed else 4) * k + 4 * k // block


def staged_bytes(entry: TensorStates, k: int) -> int:
    """Return the buffers through which a state in host memory passes: two stretches of k elements that take turns.

    Formula:
        ``ceil(min(2 k, n) / block_elements) * block_bytes``, summed over the state's slots.

    Source:
        memplan/muon/updates/offload.py and ``_staged_bytes`` in memplan/muon/byte_model.py, measured.
    """
    optimizer, elements = entry.optimizer, entry.tensor.elements
    slots = optimizer.exempt_slots if elements < optimizer.exempt_below else optimizer.slots
    held = (min(2 * k, elements),)
    return sum(slot_bytes(slot, held, entry.element_bytes) for slot in slots if slot.layout == "elementwise")


def weight_block(entry: TensorStates) -> int:
    """Return the elements of a block of a weight, where chunks of it begin and end."""
    return 1 if entry.codec is None else CODING[entry.codec][0]


def weight_scratch_bytes(entry: TensorStates, k: int) -> int:
    """Return what writing k updated elements of a weight takes: an fp32 copy of all but fp32, and codes being formed."""
    if entry.codec is not None:
        block, per_block, at_once = CODING[entry.codec]
        return 4 * k + per_block * min(min(k, entry.tensor.elements) // block, at_once)
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
    if entry.codec is None:
        return 0
    block, per_block, once = DECODING[entry.codec]
    columns = entry.tensor.shape[-1]
    rows = min(max(CHUNK_ELEMENTS // columns, 1), entry.tensor.elements // columns)
    exact = 0 if compute_bytes == 4 else 4 * rows * columns
    return exact + per_block * min(rows * columns, CHUNK_ELEMENTS) // block + once


def chunk_elements(elements: int, block: int) -> int:
    """Return the elements of one chunk: whole blocks, at least one."""
    return min(max(CHUNK_ELEMENTS // block, 1) * block, round_up(elements, block))
