"""How reductions on CUDA are split: what torch's own allocate inside themselves, and in how many parts Inductor sums rows."""

from functools import lru_cache
from typing import Literal, NamedTuple

from memplan.units import ceil_div

REDUCTION_THREADS = 512
MULTIPROCESSORS = 132
"""Of an H100 and an H200; cards with fewer split a sum less."""

THREADS_OF_A_MULTIPROCESSOR = 2048
LEAST_VALUES, MOST_VALUES = 16, 256


@lru_cache(maxsize=4096)
def column_sum_bytes(rows: int, columns: int) -> int:
    """Return what summing the columns of a contiguous matrix allocates besides the result.

    From 1021 rows on blocks share the rows of a column, and each keeps fp32 partial sums of a whole tile.

    Formula:
        ``4 * columns * parts * width * vector``, which is ``8 * rows * columns`` where columns are few;
        at most about 138 MB while ``rows`` are less than 270,000.

    Source:
        aten/src/ATen/native/cuda/Reduce.cuh, ``setReduceConfig`` and ``global_memory_size``. Equal to the
        memory history of an H200 (torch 2.11) for 768 to 8192 columns and 1024 to 8192 rows.
    """
    vector = next(size for size in (4, 2, 1) if columns % size == 0)
    most = REDUCTION_THREADS // vector
    lanes, depth = (min(most, 2 ** (max(size, 1).bit_length() - 1)) for size in (columns // vector, rows))
    height = min(depth, most // min(lanes, 32))
    width = min(lanes, most // height)
    if rows < min(height * LEAST_VALUES, MOST_VALUES):
        return 0
    values = ceil_div(rows, height)
    blocks = ceil_div(columns // vector, width)
    room = MULTIPROCESSORS * (THREADS_OF_A_MULTIPROCESSOR // (width * height))
    if values < MOST_VALUES or blocks > room:
        return 0
    parts = max(min(ceil_div(room, blocks), ceil_div(values, LEAST_VALUES)), ceil_div(values, MOST_VALUES))
    return 4 * columns * parts * width * vector if parts > 1 else 0


# -------------------------------------------------------------------- of Inductor
WARP, VALUES, COLUMNS, BLOCK = 32, 4, 128, 256
"""Threads of a warp; values that a thread sums at a time; columns of a block; threads of a block."""
LEAST, MOST = 32, 512
"""Values that a thread sums, times those at a time."""
MIXED_VALUES, MIXED_ROWS, MIXED_COLUMNS = 5 * 2**20, 4096, 16 * 1024
"""The smallest matrix and the fewest rows for which, and the most columns up to which sums both ways are one kernel."""
TILE_ROWS, MOST_TILE_ROWS, TILES = 16, 128, 8 * MULTIPROCESSORS
"""Rows that such a kernel sums at a time: from so many to so many, and in between as there are so many tiles at least."""


class Sums(NamedTuple):
    """How the rows of a matrix are summed."""

    way: Literal["whole", "split", "mixed"]
    parts: int = 1  # Sums of parts of the rows, which a second kernel adds up
    tiles: int = 1  # Those that a kernel of mixed sums keeps in memory of its own


@lru_cache(maxsize=4096)
def row_sums(columns: int, rows: int) -> Sums:
    """Return how Inductor sums the rows of a contiguous matrix, of which sums over each row are wanted too.

    Source:
        ``Reduction.num_splits`` in torch/_inductor/ir.py, ``reduction_split_factor`` in torch/_inductor/choices.py,
        ``MixOrderReduction.can_fuse`` in torch/_inductor/scheduler.py, and ``_codegen_mix_order_reduction`` in
        torch/_inductor/codegen/simd.py (v2.13.0).
    """
    parts = _split(columns, rows)
    if rows * columns >= MIXED_VALUES and rows >= max(2 * columns, MIXED_ROWS) and columns <= MIXED_COLUMNS:
        tile = 2 ** ((rows // TILES).bit_length() - 1) if rows >= TILES else 1
        return Sums("mixed", parts, ceil_div(rows, min(max(tile, TILE_ROWS), MOST_TILE_ROWS)))
    return Sums("split" if parts > 1 else "whole", parts)


def _split(columns: int, rows: int) -> int:
    if rows <= LEAST or columns >= MULTIPROCESSORS * 2 * WARP:
        return 1
    threads = MULTIPROCESSORS * THREADS_OF_A_MULTIPROCESSOR
    if rows * columns < LEAST * threads:
        size = LEAST
    elif rows * columns < MOST * threads:
        blocks = ceil_div(threads // BLOCK, ceil_div(columns, COLUMNS))
        size = ceil_div(rows, VALUES * blocks)
        closest = _nearest_divisor(rows, size)
        size = max(closest, LEAST) if abs(size - closest) < 20 else size
    else:
        closest = _nearest_divisor(rows, MOST)
        size = closest if abs(closest - MOST) < 50 else MOST
    return ceil_div(rows, VALUES * size)


def _nearest_divisor(number: int, size: int) -> int:
    """Return the divisor that is nearest to a size; the smaller of two."""
    result = (one for root in range(1, int(number**0.5) + 1) if number % root == 0 for one in (root, number // root))
    return min(sorted(result), key=lambda one: abs(one - size))
