"""What CUDA's reductions allocate inside themselves: partial sums of columns that several blocks share."""

from __future__ import annotations

from functools import lru_cache

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
