"""A stream of numbered allocations through the caching allocator, in one loop: the same as ``replay``, several times as fast.

It knows torch's defaults and expandable segments, on one stream, with a limit only where segments are torch's own; a test
holds it equal to :mod:`memplan.allocator.caching_allocator` on random streams, and on those of training steps.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

from memplan.allocator.settings import (
    LARGE_ROUNDING_BYTES,
    LARGE_SEGMENT_BYTES,
    MINIMUM_BLOCK_BYTES,
    MINIMUM_LARGE_BYTES,
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
)
from memplan.values import dataclass

_ADDRESS_BITS = 48
_ADDRESS = 2**_ADDRESS_BITS - 1


@dataclass(frozen=True, slots=True)
class StreamPeaks:
    """The peaks of a stream.

    Attributes:
        allocated_bytes: Most bytes in blocks.
        reserved_bytes: Most bytes in segments.
        survives: Whether every request was satisfied; the peaks are those up to the one that was not.
        retries: Times that all cached segments were released to satisfy a request.
    """

    allocated_bytes: int
    reserved_bytes: int
    survives: bool = True
    retries: int = 0


class _Block:
    """A range of addresses in a segment."""

    __slots__ = ("address", "following", "free", "previous", "size")

    def __init__(self, address: int, size: int) -> None:
        self.address, self.size = address, size
        self.previous: _Block | None = None
        self.following: _Block | None = None
        self.free = False


class _Pool:
    """Free blocks of one size class, ordered by size and address, and the least that is worth splitting off.

    With expandable segments there is one segment, which grows by pages: ``tail`` stands for what is not mapped yet.
    """

    __slots__ = ("blocks", "keys", "least_rest", "page_bytes", "tail")

    def __init__(self, least_rest: int, page_bytes: int = 0) -> None:
        self.keys: list[int] = []
        self.blocks: dict[int, _Block] = {}
        self.least_rest = least_rest
        self.page_bytes = page_bytes
        self.tail = _Block(0, 0)

    def best(self, place: int) -> int:
        """Return the place of the free block to take, from one that is large enough: the one that could grow comes last."""
        block = self.blocks[self.keys[place] & _ADDRESS]
        return place + 1 if block.following is self.tail and place + 1 < len(self.keys) else place

    def grown(self, size: int) -> tuple[_Block, int]:
        """Return a block for a request, the segment's last if that is free, grown by pages; and the bytes of those."""
        block, tail = self.tail.previous, self.tail
        if block is not None and block.free:
            self.take_out(block)
        else:
            block, last = _Block(tail.address, 0), block
            block.previous, block.following, tail.previous = last, tail, block
            if last is not None:
                last.following = block
        mapped = -(-(size - block.size) // self.page_bytes) * self.page_bytes
        block.size += mapped
        tail.address += mapped
        return block, mapped

    def take_out(self, block: _Block) -> None:
        """Take a free block out of the list."""
        del self.keys[bisect_left(self.keys, block.size << _ADDRESS_BITS | block.address)]
        del self.blocks[block.address]
        block.free = False

    def put(self, block: _Block) -> None:
        """Put a free block into the list."""
        insort(self.keys, block.size << _ADDRESS_BITS | block.address)
        self.blocks[block.address] = block
        block.free = True


def stream_peaks(
    sizes: Sequence[int],
    codes: Sequence[int],
    capacity_bytes: int | None = None,
    *,
    downwards: bool = False,
    expandable: bool = False,
    alike_from: Sequence[int] = (),
) -> StreamPeaks:
    """Return what a stream does to the allocator with torch's default settings, until it ends or fails.

    Args:
        sizes: Bytes of each storage.
        codes: ``2 * storage`` allocates a storage, ``2 * storage + 1`` frees it; storages of no bytes take nothing.
        capacity_bytes: What the process can get of the card; None for no limit.
        downwards: Whether each new segment lies below those before: which addresses it gets is the driver's choice.
        expandable: Whether segments are expandable; there is no limit then, and no choice of addresses.
        alike_from: Places from which on codes are alike up to the next place, or to the end, but for names of storages:
            once such a stretch leaves everything where it was, later ones do what it did, and are not played.

    Example:
        >>> stream_peaks([600, 2**21], [0, 2, 1, 3])
        StreamPeaks(allocated_bytes=2098176, reserved_bytes=23068672, survives=True, retries=0)
    """
    assert not expandable or capacity_bytes is None
    small = _Pool(MINIMUM_BLOCK_BYTES, SMALL_SEGMENT_BYTES)
    large = _Pool(MINIMUM_BLOCK_BYTES if expandable else SMALL_BYTES + 1, LARGE_SEGMENT_BYTES)
    rounded = [-(-size // MINIMUM_BLOCK_BYTES) * MINIMUM_BLOCK_BYTES for size in sizes]
    live: dict[int, _Block] = {}
    allocated = allocated_peak = reserved = reserved_peak = retries = 0
    address = _ADDRESS if downwards else 0
    shape: tuple[object, ...] | None = None
    places = iter([*alike_from, len(codes)])
    place_of_next = next(places)
    for number, code in enumerate(codes):
        if number == place_of_next:
            place_of_next, before = next(places), shape
            shape = _shape(live, small, large), reserved, retries
            if shape == before:
                break
        storage = code >> 1
        size = rounded[storage]
        pool = small if size <= SMALL_BYTES else large
        if code & 1:
            if size:
                block = live.pop(storage)
                allocated -= block.size
                _free(pool, block)
            continue
        if not size:
            continue
        keys = pool.keys
        place = bisect_left(keys, size << _ADDRESS_BITS)
        if place < len(keys):
            block = pool.blocks.pop(keys.pop(pool.best(place) if expandable else place) & _ADDRESS)
            block.free = False
        elif expandable:
            block, segment = pool.grown(size)
            reserved_peak = reserved = reserved + segment
        else:
            segment = _segment_bytes(size)
            if capacity_bytes is not None and reserved + segment > capacity_bytes:
                reserved -= _released(large) + _released(small)
                retries += 1
                if reserved + segment > capacity_bytes:
                    return StreamPeaks(allocated_peak, reserved_peak, survives=False, retries=retries)
            address -= segment if downwards else 0
            block = _Block(address, segment)
            address += 0 if downwards else segment
            reserved += segment
            if reserved > reserved_peak:
                reserved_peak = reserved
        if block.size - size >= pool.least_rest:
            _split(pool, block, size)
        live[storage] = block
        allocated += block.size
        if allocated > allocated_peak:
            allocated_peak = allocated
    return StreamPeaks(allocated_peak, reserved_peak, retries=retries)


def _shape(live: dict[int, _Block], small: _Pool, large: _Pool) -> tuple[object, ...]:
    """Return where everything is, whatever it is called: what codes do that are alike depends on nothing else."""
    return [(block.address, block.size) for block in live.values()], small.keys[:], large.keys[:]


def _segment_bytes(size: int) -> int:
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < MINIMUM_LARGE_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-size // LARGE_ROUNDING_BYTES) * LARGE_ROUNDING_BYTES


def _split(pool: _Pool, block: _Block, size: int) -> None:
    """Cut a block to ``size`` from its low end; the rest becomes a free block."""
    rest = _Block(block.address + size, block.size - size)
    following = block.following
    rest.previous, rest.following = block, following
    if following is not None:
        following.previous = rest
    block.following, block.size = rest, size
    pool.put(rest)


def _free(pool: _Pool, block: _Block) -> None:
    """Return a block to its pool, joined with its free neighbours."""
    before, after = block.previous, block.following
    if before is not None and before.free:
        pool.take_out(before)
        before.size += block.size
        before.following = after
        if after is not None:
            after.previous = before
        block = before
    if after is not None and after.free:
        pool.take_out(after)
        block.size += after.size
        following = after.following
        block.following = following
        if following is not None:
            following.previous = block
    pool.put(block)


def _released(pool: _Pool) -> int:
    """Give every segment that is one free block back; return the bytes of all."""
    whole = [block for block in pool.blocks.values() if block.previous is None and block.following is None]
    for block in whole:
        pool.take_out(block)
    return sum(block.size for block in whole)
