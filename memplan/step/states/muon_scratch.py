"""What the bundled optimizer takes for one tensor, allocation by allocation, and the tables of coded weights.

Every turn of a loop over chunks takes and gives back the same memory, so that the first stands for all.
"""

from collections.abc import Iterable
from math import isqrt

from memplan.catalog.entries import CodecScratch, StateSlot, StorageFormat
from memplan.documents.frozen_values import dataclass
from memplan.step.tapes.linear_forms import DECODED_ELEMENTS
from memplan.step.tensors.tensor_states import TensorStates
from memplan.step.tensors.update_kernels import is_exempt
from memplan.training.resolved import TrainingSetup
from memplan.units import ceil_div, round_up

CHUNK_ELEMENTS = 2**20
"""Elements that the bundled optimizer takes at a time (memplan/muon, ``chunk_elements``)."""

COLUMN_CHUNK = 512
"""Columns that streamed Newton-Schulz takes at a time (memplan/muon, ``ns_chunk_columns``)."""


def index_bytes(slot: StateSlot) -> int:
    """Return the bytes of a code while codes are formed: 4 where they are looked up, 1 where they are packed, else none.

    Source:
        ``scratch`` in memplan/muon/state_codecs/codecs.py and block_codecs.py.
    """
    if slot.codebook_bytes:
        return 4
    return 1 if slot.block_bytes - slot.scale_bytes < slot.block_elements else 0


def weight_block(entry: TensorStates) -> int:
    """Return the elements of a block of a weight, where chunks of it begin and end."""
    return 1 if entry.coded_as is None else entry.coded_as.block_elements


@dataclass(frozen=True, slots=True)
class MuonPhases:
    """Bytes of the tensors that an update by Muon allocates, in order; each phase gives all of its own back."""

    update: int  # What is orthogonalised, in bf16; it lives through all phases. 0 where the gradient serves
    # Codes of all; their codec's scratch; gradients in fp32; values in fp32 of a bf16 momentum.
    momentum: tuple[int, ...]
    norms: tuple[int, ...]  # Of rows, in bf16 and in fp32, and of matrices
    workspace: tuple[int, ...]  # Of Newton-Schulz
    weights: tuple[int, ...]  # Updates in fp32, and weights that are not fp32
    coding: tuple[int, ...] = ()  # What coding weights again takes beside these

    @property
    def chunk_bytes(self) -> int:
        """The most that is there besides the update while momentum or weights are changed."""
        return max(sum(self.momentum), sum(self.weights) + sum(self.coding))

    @property
    def bytes(self) -> int:
        """The most that is there at once."""
        return self.update + max(self.chunk_bytes, sum(self.norms), sum(self.workspace))


def muon_phases(setup: TrainingSetup, entry: TensorStates) -> MuonPhases:
    """Return what Muon takes for one matrix, the larger side being ``n`` and the smaller ``m``.

    Formula:
        Own + the largest of the momentum's chunk, Newton-Schulz, and the weight's chunk. Own is 0
        where the gradient is bf16 and serves as workspace, else 2 bytes for each element. Newton-Schulz takes
        ``min``: 2 m^2 + 2 m min(2 c, n) where c < m, ``fast``: 4 m^2 + 2 m c, with column chunks of c = 512. The momentum's
        chunk includes two stretches of a momentum in host memory.

    Source:
        memplan/muon/updates/steps.py, memplan/muon/orthogonalisation/newton_schulz.py, measured.
    """
    elements, rows, slots = entry.tensor.elements, entry.tensor.shape[-2], _moments(entry)
    k = chunk_elements(elements, slots[0].block_elements)
    block = chunk_elements(elements, weight_block(entry))
    return MuonPhases(
        update=0 if entry.gradient_name == "bf16" else 2 * elements,
        momentum=(*_codec_sizes(slots[0], k), 4 * k, *_staged_sizes(setup, entry, k)),
        norms=(2 * rows, 4 * rows, 4),
        workspace=newton_schulz_sizes(setup, entry),
        weights=(4 * block, *_weight_sizes(entry, block)),
        coding=_coding_sizes(entry, block),
    )


def newton_schulz_sizes(setup: TrainingSetup, entry: TensorStates, count: int = 1) -> tuple[int, ...]:
    """Return the workspace of orthogonalising ``count`` matrices like one together."""
    m, n = sorted(entry.tensor.shape[-2:])
    square, column = 2 * count * m * m, 2 * count * m
    if is_minimal(setup.profile.newton_schulz, m):
        return square, column * min(2 * COLUMN_CHUNK, n)
    return square, square, column * min(COLUMN_CHUNK, n)


def is_minimal(kind: str, m: int) -> bool:
    """Tell whether Newton-Schulz keeps one square matrix of ``m`` and a chunk of twice the columns, the less of both ways."""
    return kind == "min" and m > COLUMN_CHUNK


def adamw_sizes(setup: TrainingSetup, entry: TensorStates) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Return what the bundled AdamW takes, which goes through a tensor in chunks of k elements.

    Returns:
        k, a number of whole blocks of moments and weight; scratch of both moments' codecs, a chunk of the gradient, the
        weight's and two stretches of moments in host memory; and what coding the weight again takes besides.

    Source:
        memplan/muon/updates/steps.py, measured.
    """
    slots = _moments(entry)
    k = chunk_elements(entry.tensor.elements, max(slots[0].block_elements, weight_block(entry)))
    codecs = [size for slot in slots for size in _codec_sizes(slot, k)]
    own = (*codecs, 4 * k, *_weight_sizes(entry, k), *_staged_sizes(setup, entry, k))
    return k, own, _coding_sizes(entry, k)


def state_pieces(slot: StateSlot, size: int) -> list[int]:
    """Return the tensors that hold a state of ``size`` bytes: codes and scales are two."""
    if slot.block_elements == 1:
        return [size]
    scales = size // slot.block_bytes * slot.scale_bytes
    return [size - scales, scales]


def _moments(entry: TensorStates) -> list[StateSlot]:
    """Return the states of a tensor that have an element for each of its own."""
    optimizer = entry.optimizer
    exempt = is_exempt(optimizer, entry.tensor.shape, entry.tensor.divided)
    slots = optimizer.exempt_slots if exempt else optimizer.slots
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


def _coding_sizes(entry: TensorStates, k: int) -> tuple[int, ...]:
    """Return what coding k elements again takes: two tables as wide as powers of two, and what is narrow beside them.

    What a grid's codes are sought with has an fp32 number of each element at most, and is cut into such tensors.
    """
    # Source: ``TEMPORARIES`` in memplan/muon/weights/weight_formats.py, with stochastic rounding.
    if entry.coded_as is None:
        return ()
    scratch = codec_scratch(entry.coded_as)
    blocks = min(min(k, entry.tensor.elements) // entry.coded_as.block_elements, scratch.blocks_at_once)
    table = (1 << scratch.coding_bytes.bit_length()) >> 2
    values = 4 * entry.coded_as.block_elements
    pieces, rest = divmod(scratch.coding_bytes - 2 * table, values)
    return (table * blocks, table * blocks, *[values * blocks] * pieces, rest * blocks)


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


def decoding_sizes(entry: TensorStates, compute_bytes: int) -> tuple[int, ...]:
    """Return what decoding a weight for a product takes besides the decoded copy: some rows at a time, in fp32, and what decodes them.

    Source:
        ``dequantise_bytes`` in memplan/muon/weights/quantised.py, measured.
    """
    columns = entry.tensor.shape[-1]
    rows = min(max(DECODED_ELEMENTS // columns, 1), entry.tensor.elements // columns)
    each, once = row_decoding(entry, compute_bytes)
    return tuple([size for size in (*[rows * size for size in each], once) if size])


def row_decoding(entry: TensorStates, compute_bytes: int) -> tuple[tuple[int, ...], int]:
    """Return what decoding takes for each row that is decoded at a time, and once.

    Source:
        ``QuantisedWeight.rows`` in memplan/muon/weights/quantised.py, ``_decode_part`` in grid_formats.py.
    """
    if entry.coded_as is None:
        return (), 0
    columns = entry.tensor.shape[-1]
    exact = () if compute_bytes == 4 else (4 * columns,)
    return (*exact, *_decoder_sizes(entry.coded_as, columns)), codec_scratch(entry.coded_as).once_bytes


def updating_decoder_sizes(entry: TensorStates) -> tuple[int, ...]:
    """Return what an update takes to decode the first of the stretches that it goes through; nothing where weights are floats."""
    if entry.coded_as is None:
        return ()
    elements = min(chunk_elements(entry.tensor.elements, entry.coded_as.block_elements), entry.tensor.elements)
    return _decoder_sizes(entry.coded_as, elements)


def _decoder_sizes(layout: StorageFormat, elements: int) -> tuple[int, ...]:
    """Return the decoder's tensors for so many elements, of which those that are as wide as fp32 are the last."""
    decoded = min(elements, DECODED_ELEMENTS)
    wide, rest = divmod(codec_scratch(layout).decoding_bytes * decoded // layout.block_elements, 4 * decoded)
    narrow, least = divmod(rest, ceil_div(decoded, 2))
    sizes = *[ceil_div(decoded, 2)] * narrow, least, *[4 * decoded] * wide
    return tuple([size for size in sizes if size])


def codec_scratch(layout: StorageFormat) -> CodecScratch:
    """Return what the codec of a format takes."""
    assert layout.codec_scratch is not None  # required of coded formats (memplan/catalog/update_classes.py)
    return layout.codec_scratch


def table_sizes(layout: StorageFormat) -> list[int]:
    """Return the tables that a grid's codes point into: its points, one over the distances between any two, and half their squares.

    Source:
        ``grid_of`` in memplan/muon/weights/grid_formats.py; grids have 256, 512 or 1,024 points.
    """
    size = codec_scratch(layout).table_bytes
    points = 1 << isqrt(size // 4).bit_length() >> 1
    return [size - 4 * points * points - 4 * points, 4 * points * points, 4 * points] if size else []


def chunk_elements(elements: int, block: int) -> int:
    """Return the elements of one chunk: whole blocks, at least one."""
    return min(max(CHUNK_ELEMENTS // block, 1) * block, round_up(elements, block))
