"""A stream of numbered allocations through the caching allocator, in one loop: the same as ``replay``, several times as fast.

It knows torch's defaults and expandable segments, on one stream, with a limit only where segments are torch's own; a test
holds it equal to :mod:`memplan.allocator.caching_allocator` on random streams, and on those of training steps. All bytes
are counted in blocks, the least that the allocator hands out.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from memplan.allocator.settings import (
    LARGE_ROUNDING_BYTES,
    LARGE_SEGMENT_BYTES,
    MINIMUM_BLOCK_BYTES,
    MINIMUM_LARGE_BYTES,
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
)
from memplan.documents.frozen_values import dataclass

_BITS = 40
_ADDRESS = 2**_BITS - 1
"""Addresses, in blocks: enough for 512 TiB of segments."""

_SMALL, _LARGE_SEGMENT, _SMALL_SEGMENT, _LARGE, _LARGE_ROUNDING = (
    size // MINIMUM_BLOCK_BYTES
    for size in (SMALL_BYTES, LARGE_SEGMENT_BYTES, SMALL_SEGMENT_BYTES, MINIMUM_LARGE_BYTES, LARGE_ROUNDING_BYTES)
)

_PERIODS = (1, 2)
"""Rounds after which everything may be where it was: where a loop keeps its last logits, they take turns at two places."""

_Pool = tuple[list[int], dict[int, int], dict[int, int], int]


@dataclass(frozen=True, slots=True)
class StreamPeaks:
    """The peaks of a stream."""

    allocated_bytes: int  # Most bytes in blocks
    reserved_bytes: int  # Most bytes in segments
    survives: bool = True  # Whether every request was satisfied; the peaks are those up to the one that was not
    retries: int = 0  # Times that all cached segments were released to satisfy a request


class Stream:
    """A stream, ready to be played several times.

    Args:
        sizes: Bytes of each storage.
        codes: ``2 * storage`` allocates a storage, ``2 * storage + 1`` frees it; storages of no bytes take nothing.
        alike_from: Places from which on codes are alike up to the next place, or to the end, but for names of storages,
            whose order is alike too: once a stretch is known to do what the one before did, neither it nor later ones
            are played.
        rounds: Within the code up to the first of those places, and within each stretch, where a first part ends and each
            of several that are alike in the same way, if there are: the place, and the number of storages by then. They
            too are played until they are known to do what they did; what they leave then has the names of the last.

    Example:
        >>> Stream([600, 2**21], [0, 2, 1, 3]).peaks()
        StreamPeaks(allocated_bytes=2098176, reserved_bytes=23068672, survives=True, retries=0)
    """

    def __init__(
        self,
        sizes: Sequence[int],
        codes: Sequence[int],
        alike_from: Sequence[int] = (),
        rounds: Sequence[Sequence[tuple[int, int]]] = (),
    ) -> None:
        self._blocks = [-(-size // MINIMUM_BLOCK_BYTES) for size in sizes]
        self._codes = codes
        self._stretches = [*pairwise([0, *alike_from, len(codes)])]
        self._rounds = rounds or [()] * len(self._stretches)

    def peaks(
        self, capacity_bytes: int | None = None, *, downwards: bool = False, expandable: bool = False
    ) -> StreamPeaks:
        """Return what the stream does to the allocator with torch's default settings, until it ends or fails.

        Args:
            capacity_bytes: What the process can get of the card; None for no limit.
            downwards: Whether each new segment lies below those before: which addresses it gets is the driver's choice.
            expandable: Whether segments are expandable; there is no limit then, and no choice of addresses.
        """
        assert not expandable or capacity_bytes is None
        state = _Allocator(capacity_bytes, downwards=downwards, expandable=expandable)
        before = None
        for number, ((start, end), rounds) in enumerate(zip(self._stretches, self._rounds, strict=True), 1):
            now, before = state.shape(), before if number > 2 else None  # the first makes what stays
            small, large = now.repeats(before, state.parts) if before else (False, False)
            if small and large:
                break
            before, peak = now, state.allocated_peak
            state.parts.clear()
            alone = large and capacity_bytes is None and number == len(self._stretches)
            self._play(state, start, rounds, end, small=alone)
            if alone:
                state.allocated_peak = peak  # small storages have what they ask for: it is the same once more
            if not state.survives:
                break
        allocated, reserved = (size * MINIMUM_BLOCK_BYTES for size in (state.allocated_peak, state.reserved_peak))
        return StreamPeaks(allocated, reserved, state.survives, state.retries)

    def _play(self, state: _Allocator, start: int, rounds: Sequence[tuple[int, int]], end: int, *, small: bool) -> None:
        """Play a stretch: what comes before its rounds, these until they do what they did, and what comes after the last."""
        shapes: list[_Shape] = []
        number = 0
        while number < len(rounds) and state.survives:
            shapes += [state.shape()] if number else []
            periods = (ago for ago in _PERIODS if len(shapes) > ago)
            period = next((ago for ago in periods if all(shapes[-1].repeats(shapes[-1 - ago], state.parts[-ago:]))), 0)
            if period and (passed := (len(rounds) - number) // period * period):
                number += passed
                start, storages = rounds[number - 1]
                state.renumber(rounds[0][1], by=storages - rounds[number - passed - 1][1])
                shapes.clear()
                continue
            state.play(self._blocks, self._part(start, rounds[number][0], small=small))
            start = rounds[number][0]
            number += 1
        state.play(self._blocks, self._part(start, end, small=small))

    def _part(self, start: int, end: int, *, small: bool) -> Sequence[int]:
        """Return the codes from one place to another, or those of small storages alone."""
        codes, blocks = self._codes[start:end], self._blocks
        return [code for code in codes if blocks[code >> 1] <= _SMALL] if small else codes


def _give_back(start: int, end: int, keys: list[int], ends: dict[int, int], starts: dict[int, int]) -> None:
    """Put a block among the free ones, joined with the free ones beside it."""
    if start in starts:
        end_before, start = start, starts.pop(start)
        del keys[bisect_left(keys, end_before - start << _BITS | start)]
    if end in ends:
        start_after, end = end, ends.pop(end)
        del keys[bisect_left(keys, end - start_after << _BITS | start_after)]
    ends[start], starts[end] = end, start
    insort(keys, end - start << _BITS | start)


class _Part(NamedTuple):
    """What was taken while codes were played."""

    highest: int  # The highest key of all that was taken, 0 for nothing
    made: Sequence[
        tuple[int, int, bool]
    ]  # Of new segments: the key, the highest taken before, whether it is a large one


class _Shape(NamedTuple):
    """Where everything is: what codes do that are alike depends on nothing else."""

    live: Mapping[int, tuple[int, int]]
    free: Sequence[Sequence[int]]  # Keys of what is free, of each pool
    retries: int
    downwards: bool

    def repeats(self, before: _Shape, parts: Sequence[_Part]) -> tuple[bool, bool]:
        """Return whether parts that led here from a shape would do the same once more, to small storages and to large ones.

        They do where everything is where it was, but for segments that they made and that are free now: each of these is
        taken at the moment at which it was made, and no sooner, if nothing that was taken until then is behind it in the
        order in which the free is tried. All small segments are of one size, so that the highest is the last.
        """
        gone = [where for name, where in before.live.items() if name not in self.live]
        if gone != [where for name, where in self.live.items() if name not in before.live]:
            return False, False
        made: tuple[list[int], list[int]] = [], []
        last, most = [not self.downwards, True], 0
        for part in parts:
            for key, taken, large in part.made:
                most = max(most, taken)
                last[large] = last[large] and (key > most or not large)
                most = max(most, key)
                made[large].append(key)
            most = max(most, part.highest)
        free = (sorted([*before.free[pool], *keys]) if keys else before.free[pool] for pool, keys in enumerate(made))
        small, large = (self.free[pool] == keys and (last[pool] or not made[pool]) for pool, keys in enumerate(free))
        return small and self.retries == before.retries, large and self.retries == before.retries


class _Allocator:
    """Where everything is.

    Attributes:
        live: First block of each storage, and the first after it.
        pools: For small requests, and for large ones: ``blocks << _BITS | address`` of all that is free, ascending; where
            each of them ends, by where it begins; where it begins, by where it ends; and the least worth splitting off.
        parts: What was taken by each sequence of codes that was played.
        tails: Where segments end that grow; none where segments do not.
    """

    __slots__ = (
        "_address",
        "_downwards",
        "_limit",
        "_segments",
        "allocated",
        "allocated_peak",
        "live",
        "parts",
        "pools",
        "reserved",
        "reserved_peak",
        "retries",
        "survives",
        "tails",
    )

    def __init__(self, capacity_bytes: int | None, *, downwards: bool, expandable: bool) -> None:
        self.live: dict[int, tuple[int, int]] = {}
        self.pools: tuple[_Pool, _Pool] = ([], {}, {}, 1), ([], {}, {}, 1 if expandable else _SMALL + 1)
        self.tails = [1, _ADDRESS // 2] if expandable else []
        self.parts: list[_Part] = []
        self.allocated = self.allocated_peak = self.reserved = self.reserved_peak = self.retries = 0
        self.survives = True
        self._limit = None if capacity_bytes is None else capacity_bytes // MINIMUM_BLOCK_BYTES
        self._downwards, self._address = downwards, _ADDRESS if downwards else 1
        self._segments: dict[int, tuple[int, bool]] = {}

    def play(self, blocks: Sequence[int], codes: Sequence[int]) -> None:
        """Play codes, until a request is not satisfied; none after that."""
        if not self.survives:
            return
        live, pools, tails = self.live, self.pools, self.tails
        allocated, peak = self.allocated, self.allocated_peak
        highest, new = 0, list[tuple[int, int, bool]]()
        for code in codes:
            name = code >> 1
            size = blocks[name]
            if not size:
                continue
            large = size > _SMALL
            keys, ends, starts, least = pools[large]
            if not code & 1:
                place = bisect_left(keys, size << _BITS)
                if place == len(keys):
                    made = self._grown(size, large) if tails else self._new_segment(size, large)
                    if made is None:
                        break
                    start, end = made
                    key = end - start << _BITS | start
                    new += [] if tails else [(key, highest, large)]
                else:
                    if tails and ends[keys[place] & _ADDRESS] == tails[large] and place + 1 < len(keys):
                        place += 1  # what could grow is taken last
                    key = keys.pop(place)
                    start = key & _ADDRESS
                    end = ends.pop(start)
                    del starts[end]
                if key > highest:
                    highest = key
                stop = start + size
                if end - stop >= least:
                    ends[stop], starts[end] = end, stop
                    insort(keys, end - stop << _BITS | stop)
                    end = stop
                live[name] = start, end
                allocated += end - start
                if allocated > peak:
                    peak = allocated
            else:
                start, end = live.pop(name)
                allocated -= end - start
                _give_back(start, end, keys, ends, starts)
        self.allocated, self.allocated_peak = allocated, peak
        self.parts.append(_Part(highest, new))

    def renumber(self, first: int, by: int) -> None:
        """Give storages from ``first`` on names that are higher by so much."""
        self.live = {name + by if name >= first else name: where for name, where in self.live.items()}

    def shape(self) -> _Shape:
        """Return where everything is."""
        return _Shape(dict(self.live), [keys[:] for keys, *_ in self.pools], self.retries, self._downwards)

    def _new_segment(self, size: int, large: bool) -> tuple[int, int] | None:
        """Return where a new segment begins and ends; None where there is no memory for it."""
        segment = _SMALL_SEGMENT
        if large:
            segment = _LARGE_SEGMENT if size < _LARGE else -(-size // _LARGE_ROUNDING) * _LARGE_ROUNDING
        if self._limit is not None and self.reserved + segment > self._limit:
            self._release()
            self.retries += 1
            self.survives = self.reserved + segment <= self._limit
            if not self.survives:
                return None
        room = segment + 1  # a block between segments, as nothing free spans two
        self._address -= room if self._downwards else 0
        start = self._address
        self._address += 0 if self._downwards else room
        self.reserved += segment
        self.reserved_peak = max(self.reserved_peak, self.reserved)
        self._segments[start] = start + segment, large
        return start, start + segment

    def _release(self) -> None:
        """Give every segment back that is free from end to end."""
        for start, (end, large) in [*self._segments.items()]:
            keys, ends, starts, _ = self.pools[large]
            if ends.get(start) == end:
                del self._segments[start], ends[start], starts[end]
                keys.remove(end - start << _BITS | start)
                self.reserved -= end - start

    def _grown(self, size: int, large: bool) -> tuple[int, int]:
        """Return where the end of a segment is that holds a request, grown by pages."""
        keys, ends, starts, _ = self.pools[large]
        start = tail = self.tails[large]
        if tail in starts:
            start = starts.pop(tail)
            del ends[start]
            keys.remove(tail - start << _BITS | start)
        page = _LARGE_SEGMENT if large else _SMALL_SEGMENT
        mapped = -(-(size - (tail - start)) // page) * page
        self.tails[large] = tail + mapped
        self.reserved += mapped
        self.reserved_peak = self.reserved
        return start, tail + mapped
