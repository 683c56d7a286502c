"""The free blocks of a pool: by size and address, in the order in which they are tried, and by where they begin and end."""

from bisect import bisect_left, insort
from collections.abc import Iterator

FreeBlocks = tuple[list[int], dict[int, list[int]], dict[int, int], dict[int, int], int]
"""Sizes of blocks, ascending; where those of each size begin, ascending; where each block ends, by where it begins; where it
begins, by where it ends; and the least size worth splitting off. An allocation takes the first of the least size that is
enough: sizes are few, as layers are alike, so that they are found sooner than in one list of all blocks."""

Key = tuple[int, int]
"""Size and first address of a block: of those that are large enough the least is taken."""


def add(start: int, end: int, free: FreeBlocks) -> None:
    """Put a block among the free ones, none of which is beside it."""
    sizes, starts_of, ends, starts, _ = free
    ends[start], starts[end] = end, start
    if (size := end - start) in starts_of:
        insort(starts_of[size], start)
    else:
        starts_of[size] = [start]
        insort(sizes, size)


def take(start: int, free: FreeBlocks) -> int:
    """Take a block from the free ones; return where it ends."""
    sizes, starts_of, ends, starts, _ = free
    end = ends.pop(start)
    del starts[end]
    if len(own := starts_of[size := end - start]) > 1:
        del own[bisect_left(own, start)]
    else:
        del starts_of[size], sizes[bisect_left(sizes, size)]
    return end


def give_back(start: int, end: int, free: FreeBlocks) -> None:
    """Put a block among the free ones, joined with the free ones beside it; in one function, as half of all calls are this one."""
    sizes, starts_of, ends, starts, _ = free
    if start in starts:
        before = starts.pop(start)
        if len(own := starts_of[size := start - before]) > 1:
            del own[bisect_left(own, before)]
        else:
            del starts_of[size], sizes[bisect_left(sizes, size)]
        start = before
    if end in ends:
        behind = ends.pop(end)
        if len(own := starts_of[size := behind - end]) > 1:
            del own[bisect_left(own, end)]
        else:
            del starts_of[size], sizes[bisect_left(sizes, size)]
        end = behind
    ends[start], starts[end] = end, start
    if (size := end - start) in starts_of:
        insort(starts_of[size], start)
    else:
        starts_of[size] = [start]
        insort(sizes, size)


def in_order(free: FreeBlocks, least: int = 0) -> Iterator[Key]:
    """Yield the blocks of at least a size, in the order in which they are tried."""
    sizes, starts_of, _, _, _ = free
    for size in sizes[bisect_left(sizes, least) :]:
        for start in starts_of[size]:
            yield size, start
