"""The free blocks of a pool: by size and address, in the order in which they are tried, and by where they begin and end."""

from bisect import bisect_left, insort

FreeBlocks = tuple[list[int], dict[int, int], dict[int, int], int]
"""Keys of blocks, ascending; where each block ends, by where it begins; where it begins, by where it ends; and the least size
worth splitting off. An allocation takes the first of the least size that is enough."""

ADDRESS_BITS = 128
"""A block's key is its size, and in so many bits below that its first address: of those that are large enough the least is taken.
One number is compared and looked up sooner than a pair is."""
ADDRESS_MASK = 2**ADDRESS_BITS - 1


def key_of(start: int, end: int) -> int:
    """Return the key of a block."""
    return (end - start << ADDRESS_BITS) + start


def add(start: int, end: int, free: FreeBlocks) -> None:
    """Put a block among the free ones, none of which is beside it."""
    keys, ends, starts, _ = free
    ends[start], starts[end] = end, start
    insort(keys, (end - start << ADDRESS_BITS) + start)


def take(start: int, free: FreeBlocks) -> int:
    """Take a block from the free ones; return where it ends."""
    keys, ends, starts, _ = free
    end = ends.pop(start)
    del starts[end]
    del keys[bisect_left(keys, (end - start << ADDRESS_BITS) + start)]
    return end


def give_back(start: int, end: int, free: FreeBlocks) -> None:
    """Put a block among the free ones, joined with the free ones beside it; in one function, as half of all calls are this one."""
    keys, ends, starts, _ = free
    if start in starts:
        before = starts.pop(start)
        del keys[bisect_left(keys, (start - before << ADDRESS_BITS) + before)]
        start = before
    if end in ends:
        behind = ends.pop(end)
        del keys[bisect_left(keys, (behind - end << ADDRESS_BITS) + end)]
        end = behind
    ends[start], starts[end] = end, start
    insort(keys, (end - start << ADDRESS_BITS) + start)
