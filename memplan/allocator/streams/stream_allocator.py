"""Where everything is while a stream is played: torch's allocator in one loop, with segments of its own or expandable ones.

All bytes are counted in blocks, the least that the allocator hands out.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import NamedTuple

from memplan.allocator.settings import (
    LARGE_ROUNDING_BYTES,
    LARGE_SEGMENT_BYTES,
    MINIMUM_BLOCK_BYTES,
    MINIMUM_LARGE_BYTES,
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
)
from memplan.allocator.streams.free_blocks import ADDRESS_BITS, ADDRESS_MASK, FreeBlocks, add, give_back, key_of, take
from memplan.units import ceil_div

SMALL, _LARGE_SEGMENT, _SMALL_SEGMENT, _LARGE, _LARGE_ROUNDING = (
    size // MINIMUM_BLOCK_BYTES
    for size in (SMALL_BYTES, LARGE_SEGMENT_BYTES, SMALL_SEGMENT_BYTES, MINIMUM_LARGE_BYTES, LARGE_ROUNDING_BYTES)
)

_PAGES = _SMALL_SEGMENT, _LARGE_SEGMENT
_BASE = _LARGE_SEGMENT
"""Where expandable segments of each pool begin; at a whole page of each."""
_UNLIMITED = 2**126 // _LARGE_SEGMENT * _LARGE_SEGMENT
"""Addresses, in blocks: no job of the most that may be asked for (2**54 tokens) comes near."""
_HIGHEST = 2 * _UNLIMITED
"""Where segments begin of which each new one lies below those before."""


class Part(NamedTuple):
    """What was taken while codes were played."""

    highest: int  # The highest key of all that was taken, 0 for nothing
    # Keys of new segments, the highest that was taken before each, and its pool.
    made: Sequence[tuple[int, int, int]]


class Shape(NamedTuple):
    """Where everything is: what codes do that are alike depends on nothing else."""

    live: Mapping[int, tuple[int, int]]
    free: Sequence[Sequence[int]]  # Keys of what is free, of each pool
    holes: Sequence[Mapping[int, int]]  # What expandable segments have no memory for, of each pool
    retries: int
    downwards: bool

    def repeats(self, before: Shape, parts: Sequence[Part]) -> tuple[bool, bool]:
        """Return whether parts that led here from a shape would do the same once more, to small storages and to large ones.

        They do where everything is where it was, but for segments that they made and that are free now: each of these is
        taken at the moment at which it was made, and no sooner, if nothing that was taken until then is behind it in the
        order in which the free is tried. All small segments are of one size, so that the highest is the last.
        """
        gone = [where for name, where in before.live.items() if name not in self.live]
        if gone != [where for name, where in self.live.items() if name not in before.live]:
            return False, False
        made: list[list[int]] = [[] for _ in self.free]
        last, most = [bool(pool & 1) or not self.downwards for pool in range(len(made))], 0
        for part in parts:
            for key, taken, pool in part.made:
                most = max(most, taken)
                last[pool] = last[pool] and (key > most or not pool & 1)
                most = max(most, key)
                made[pool].append(key)
            most = max(most, part.highest)
        free = (sorted([*before.free[pool], *keys]) if keys else before.free[pool] for pool, keys in enumerate(made))
        alike = [self.free[pool] == keys and (last[pool] or not made[pool]) for pool, keys in enumerate(free)]
        steady = self.retries == before.retries and self.holes == before.holes
        return all(alike[::2]) and steady, all(alike[1::2]) and steady


class StreamAllocator:
    """Where everything is.

    Args:
        capacity_bytes: What the process can get of the card; None for no limit.
        downwards: Whether each new segment lies below those before.
        expandable: Whether segments are expandable.
        pool_of: The pool of each storage: twice its CUDA stream, and one more for a large one.
        releases: Whether all that is cached is released where a request has no room; else it is not satisfied.

    Attributes:
        live: First block of each storage, and the first after it.
        pools: What is free for small requests, and for large ones, of each stream.
        holes: For each pool, where each range of expandable segments without memory ends, by where it begins; empty
            where segments are no such ones, or the card has no end: a pool's only segment then begins with what is mapped, and
            all behind that is one free block, the last that is tried, as ``expandable_size`` has it.
        tops: For each pool on a card without end, the highest block of expandable segments that was ever in use.
        parts: What was taken by each sequence of codes that was played.
    """

    __slots__ = (
        "_address", "_bases", "_downwards", "_limit", "_pool_of", "_releases", "_segments", "_virtual", "allocated",
        "allocated_peak", "holes", "live", "parts", "pools", "reserved", "reserved_peak", "retries", "survives",
        "tops",
    )  # fmt: skip

    def __init__(
        self,
        capacity_bytes: int | None,
        *,
        downwards: bool,
        expandable: bool,
        pool_of: Sequence[int],
        releases: bool = True,
    ) -> None:
        self.live: dict[int, tuple[int, int]] = {}
        self._pool_of = pool_of
        streams, least = range(1 + max(pool_of, default=0) // 2), (1, 1 if expandable else SMALL + 1)
        self.pools: Sequence[FreeBlocks] = [([], {}, {}, least[large]) for _ in streams for large in (0, 1)]
        endless = expandable and capacity_bytes is None
        self.holes: Sequence[dict[int, int]] = [{} for _ in self.pools] if expandable and not endless else ()
        self.parts: list[Part] = []
        self.allocated = self.allocated_peak = self.reserved = self.reserved_peak = self.retries = 0
        self.survives, self._releases = True, releases
        self._limit = None if capacity_bytes is None else capacity_bytes // MINIMUM_BLOCK_BYTES
        self._downwards, self._address = downwards, _HIGHEST if downwards else 0
        self._segments: dict[int, tuple[int, int]] = {}
        self._bases = [_BASE] * len(self.pools)
        self.tops = self._bases[:] if endless else []
        for start, free in zip(self.tops, self.pools, strict=False):
            add(start, start + _UNLIMITED, free)
        wanted = _UNLIMITED * MINIMUM_BLOCK_BYTES if capacity_bytes is None else capacity_bytes + capacity_bytes // 8
        self._virtual = [
            max(ceil_div(wanted, page * MINIMUM_BLOCK_BYTES), 1) * page for page in _PAGES
        ]  # of ExpandableSegment's constructor in c10/cuda/CUDACachingAllocator.cpp: addresses for 9/8 of the card

    def play(self, blocks: Sequence[int], codes: Sequence[int]) -> None:
        """Play codes, until a request is not satisfied; none after that."""
        live, pools, holes, pool_of, tops = self.live, self.pools, self.holes, self._pool_of, self.tops
        allocated, peak = self.allocated, self.allocated_peak
        highest, new = 0, list[tuple[int, int, int]]()
        for code in codes if self.survives else ():
            if not (size := blocks[name := code >> 1]):
                continue
            keys, ends, starts, least = free = pools[number := pool_of[name]]
            if code & 1:
                start, end = live.pop(name)
                allocated -= end - start
                give_back(start, end, free)
                continue
            if (place := bisect_left(keys, size << ADDRESS_BITS)) == len(keys):
                made = self._made(size, number)
                if made is None:
                    break
                start, end = made
                key = key_of(start, end)
                new += [] if holes else [(key, highest, number)]
            else:
                key = keys[place]
                if holes and ends[key & ADDRESS_MASK] in holes[number]:
                    key = self._least_growable(place, number)
                    place = bisect_left(keys, key)
                del keys[place]
                end = ends.pop(start := key & ADDRESS_MASK)
                del starts[end]
            if key > highest:
                highest = key
            stop = start + size
            if tops and stop > tops[number]:
                tops[number] = stop
            if end - stop >= least:
                ends[stop], starts[end] = end, stop
                insort(keys, (end - stop << ADDRESS_BITS) + stop)
                end = stop
            live[name] = start, end
            if (allocated := allocated + end - start) > peak:
                peak = allocated
        self.allocated, self.allocated_peak = allocated, peak
        self.parts.append(Part(highest, new))
        self._count_pages()

    def _count_pages(self) -> None:
        """Count the pages of expandable segments on a card without end, which stay mapped."""
        if self.tops:
            places = zip(self.tops, self._bases, cycle(_PAGES), strict=False)
            self.reserved = self.reserved_peak = sum(ceil_div(top - base, page) * page for top, base, page in places)

    def renumber(self, first: int, by: int) -> None:
        """Give storages from ``first`` on names that are higher by so much."""
        self.live = {name + by if name >= first else name: where for name, where in self.live.items()}

    def shape(self) -> Shape:
        """Return where everything is."""
        free, holes = [[*keys] for keys, *_ in self.pools], [dict(ranges) for ranges in self.holes]
        return Shape(dict(self.live), free, holes, self.retries, self._downwards)

    # ---------------------------------------------------------------- memory from the driver
    def _made(self, size: int, pool: int) -> tuple[int, int] | None:
        """Return where new memory for a request begins and ends; None where there is none, after all cached was released."""
        new = self._grown if self.holes else self._new_segment
        made = new(size, pool)
        if made is None and self._releases:
            self.release()
            self.retries += 1
            made = new(size, pool)
        self.survives = made is not None
        return made

    def _takes(self, size: int) -> bool:
        """Reserve so many blocks; return whether there is room for them."""
        if self._limit is not None and self.reserved + size > self._limit:
            return False
        self.reserved += size
        self.reserved_peak = max(self.reserved_peak, self.reserved)
        return True

    def _new_segment(self, size: int, pool: int) -> tuple[int, int] | None:
        segment = _SMALL_SEGMENT
        if pool & 1:
            segment = _LARGE_SEGMENT if size < _LARGE else -(-size // _LARGE_ROUNDING) * _LARGE_ROUNDING
        if not self._takes(segment):
            return None
        room = segment + 1  # a block between segments, as nothing free spans two
        self._address -= room if self._downwards else 0
        start = self._address
        self._address += 0 if self._downwards else room
        self._segments[start] = start + segment, pool
        return start, start + segment

    def release(self) -> None:
        """Give every segment back that is free from end to end, and every whole page of a free block of expandable ones."""
        if self.holes:
            for number in reversed(range(len(self.pools))):
                self._unmap(number)
        for start, (end, pool) in [*self._segments.items()]:
            free = self.pools[pool]
            if free[1].get(start) == end:
                take(start, free)
                del self._segments[start]
                self.reserved -= end - start

    # ---------------------------------------------------------------- expandable segments
    def _least_growable(self, place: int, pool: int) -> int:
        """Return the key of the free block, from a place in their order on, that could grow least."""
        # Source: ``expandable_size`` in get_free_block, c10/cuda/CUDACachingAllocator.cpp.
        (keys, ends, *_), holes = self.pools[pool], self.holes[pool]
        best, least = keys[place], None
        for key in keys[place:]:
            end = ends[start := key & ADDRESS_MASK]
            room = holes.get(end, end) - start
            if least is not None and room >= least:
                break
            best, least = key, room
        return best

    def _grown(self, size: int, pool: int) -> tuple[int, int] | None:
        """Return a block of at least a size, made by mapping pages at the lowest addresses where they have room."""
        # Source: try_allocate_expandable_block in c10/cuda/CUDACachingAllocator.cpp.
        free = self.pools[pool]
        ends, holes, page = free[1], self.holes[pool], _PAGES[pool & 1]
        start = self._range(size, pool)
        end = ends.get(start, start)
        while end - start < size:
            beyond = holes[end]
            mapped = ceil_div(min(size - (end - start), beyond - end), page) * page
            if not self._takes(mapped):
                return None  # what was mapped so far stays, free
            del holes[end]
            if end + mapped < beyond:
                holes[end + mapped] = beyond
            give_back(end, end + mapped, free)
            end = ends[start]
        return start, take(start, free)

    def _range(self, size: int, pool: int) -> int:
        """Return the lowest address from which on free blocks and holes in a row have room, in a new segment if need be."""
        _, ends, starts, _ = self.pools[pool]
        holes = self.holes[pool]
        for hole in sorted(holes):
            start = end = starts.get(hole, hole)
            while end - start < size and (end in ends or end in holes):
                end = ends[end] if end in ends else holes[end]
            if end - start >= size:
                return start
        start = self._bases[pool]
        holes[start] = start + self._virtual[pool & 1]
        self._bases[pool] = holes[start] + _PAGES[pool & 1]  # a page between segments, as nothing free spans two
        return start

    def _unmap(self, pool: int) -> None:
        """Give back the whole pages that lie inside free blocks."""
        # Source: unmap_block in c10/cuda/CUDACachingAllocator.cpp.
        free = self.pools[pool]
        holes, page = self.holes[pool], _PAGES[pool & 1]
        for key in [*free[0]]:
            end = free[1][start := key & ADDRESS_MASK]
            first, last = ceil_div(start, page) * page, end // page * page
            if first >= last:
                continue
            take(start, free)
            for piece, stop in ((start, first), (last, end)):
                if piece < stop:
                    add(piece, stop, free)
            self.reserved -= last - first
            beyond = holes.pop(last, last)
            before = next((hole for hole, stop in holes.items() if stop == first), first)
            holes[before] = beyond
            if beyond - before == self._virtual[pool & 1]:
                del holes[before]  # nothing else is left of the segment
