"""A stream of numbered allocations through the caching allocator, in one loop: the same as ``replay``, several times as fast.

It knows torch's defaults and expandable segments, on one CUDA stream or several; a test holds it equal to
:mod:`memplan.allocator.caching_allocator` on random streams, and on those of training steps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import field
from functools import cached_property
from itertools import accumulate, pairwise

from memplan.allocator.settings import MINIMUM_BLOCK_BYTES
from memplan.allocator.streams.stream_allocator import SMALL, Shape, StreamAllocator
from memplan.documents.frozen_values import dataclass

_PERIODS = (1, 2)
"""Rounds after which everything may be where it was: where a loop keeps its last logits, they take turns at two places."""


@dataclass(frozen=True, slots=True)
class StreamPeaks:
    """The peaks of a stream."""

    allocated_bytes: int  # Most bytes in blocks
    reserved_bytes: int  # Most bytes in segments
    survives: bool = True  # Whether every request was satisfied; the peaks are those up to the one that was not
    retries: int = 0  # Times that all cached segments were released to satisfy a request
    # Most bytes in blocks up to the place where what comes first ends.
    first_bytes: int = field(default=0, repr=False)


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
        streams: The CUDA stream of each storage that is not of the first; with several, all rounds are played.
        first: The place where what comes before anything that is alike ends, if its peak is to be told.
        cleared: A place no later than that where what is cached is given back to the driver (``empty_cache``); 0 for none.

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
        streams: Mapping[int, int] | None = None,
        *,
        first: int = 0,
        cleared: int = 0,
    ) -> None:
        self._first, self._cleared = first, cleared
        rounds = () if streams else rounds
        last = MINIMUM_BLOCK_BYTES - 1
        self._blocks = [(size + last) // MINIMUM_BLOCK_BYTES for size in sizes]
        self._codes, streams = codes, streams or {}
        self._pool_of = [2 * streams.get(name, 0) + (size > SMALL) for name, size in enumerate(self._blocks)]
        self._stretches = [*pairwise([first, *alike_from, len(codes)])]
        self._rounds = rounds or [()] * len(self._stretches)

    def peaks(
        self,
        capacity_bytes: int | None = None,
        *,
        downwards: bool = True,
        expandable: bool = False,
        releases: bool = True,
    ) -> StreamPeaks:
        """Return what the stream does to the allocator with torch's default settings, until it ends or fails.

        Args:
            capacity_bytes: What the process can get of the card; None for no limit.
            downwards: Whether each new segment lies below those before, as it did on the cards that were measured, or above: which
                addresses it gets is the driver's choice.
            expandable: Whether segments are expandable; there is no choice of addresses then.
            releases: Whether what is cached is released where there is no room; else a stream that survives does what it
                does with memory to spare.
        """
        below = downwards and not expandable
        state = StreamAllocator(
            capacity_bytes, downwards=below, expandable=expandable, pool_of=self._pool_of, releases=releases
        )
        if self._cleared:
            state.play(self._blocks, self._codes[: self._cleared])
            state.release()
        if self._first:
            state.play(self._blocks, self._codes[self._cleared : self._first])
        first, before = state.allocated_peak, None
        for number, ((start, end), rounds) in enumerate(zip(self._stretches, self._rounds, strict=True), 1):
            now, before = state.shape(), before if number > 2 else None  # the first makes what stays
            small, large = now.repeats(before, state.parts) if before else (False, False)
            if small and large:
                break
            before, peak = now, state.allocated_peak
            state.parts.clear()
            alone = large and (capacity_bytes is None or not releases) and number == len(self._stretches)
            self._play(state, start, rounds, end, small=alone)
            if alone:
                state.allocated_peak = peak  # small storages have what they ask for: it is the same once more
            if not state.survives:
                break
        peaks = state.allocated_peak, state.reserved_peak, first
        allocated, reserved, first = (size * MINIMUM_BLOCK_BYTES for size in peaks)
        return StreamPeaks(allocated, reserved, state.survives, state.retries, first)

    @cached_property
    def allocated_range(self) -> tuple[int, int]:
        """The bytes in blocks at their peak at least and at most: a large block is not split for the least of requests.

        Example:
            >>> Stream([600, 2**21], [0, 2, 1, 3]).allocated_range
            (2098176, 3146752)
        """
        most = [size + SMALL if size > SMALL else size for size in self._blocks]
        least, highest = (
            max(accumulate(-sizes[code >> 1] if code & 1 else sizes[code >> 1] for code in self._codes), default=0)
            for sizes in (self._blocks, most)
        )
        return least * MINIMUM_BLOCK_BYTES, highest * MINIMUM_BLOCK_BYTES

    def _play(
        self, state: StreamAllocator, start: int, rounds: Sequence[tuple[int, int]], end: int, *, small: bool
    ) -> None:
        """Play a stretch: what comes before its rounds, these until they do what they did, and what comes after the last."""
        shapes: list[Shape] = []
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
        return [code for code in codes if blocks[code >> 1] <= SMALL] if small else codes
