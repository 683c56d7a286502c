"""A simulator of torch's CUDA caching allocator: which blocks, which segments, and would it fit.

It follows ``c10/cuda/CUDACachingAllocator.cpp`` with the settings of torch 2.13: one process, one
card, frees that complete at once. Addresses of segments fall in the order they were taken, while
cudaMalloc may hand out any; they decide only between free blocks of equal size. What is allocated
while a CUDA graph is captured has a pool of its own, whose segments serve nothing else and stay
for as long as the graph does.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

from memplan.allocator.pools import LARGE_POOL, SMALL_POOL, Block, Pool, Turn
from memplan.allocator.release import collect_garbage, release_oversize, release_unsplit
from memplan.allocator.results import AllocationError, AllocatorResult, OutOfMemory
from memplan.allocator.segments import Driver
from memplan.allocator.settings import MINIMUM_BLOCK_BYTES, SMALL_BYTES, AllocatorSettings

_NEVER = 2**63


class CachingAllocator:
    """The allocator of one card.

    Args:
        settings: As ``PYTORCH_CUDA_ALLOC_CONF`` sets them.
        capacity_bytes: What the process can get of the card; None for no limit. It also stands for
            the card's total where a setting is a share of that.
        place: Gives the address of a new segment; for replaying a run whose addresses are known.

    Attributes:
        requested_bytes: Requested and not freed; ``requested_peak_bytes`` is its peak.
        allocated_bytes: Size of the blocks that hold them; likewise ``allocated_peak_bytes``.
        retries: torch's ``num_alloc_retries``.
        stream: Requests that name no other come from it; ``pool``, 0 but for private ones, serves all of them.
        driver: Counts segments and reserved bytes, and keeps each exchange with the driver.

    Example:
        >>> allocator = CachingAllocator()
        >>> block = allocator.malloc("weight", 3 * 2**20)
        >>> allocator.allocated_bytes, allocator.driver.reserved_bytes
        (3145728, 20971520)
    """

    def __init__(
        self,
        settings: AllocatorSettings | None = None,
        capacity_bytes: int | None = None,
        place: Callable[[int], int] | None = None,
    ) -> None:
        self.settings = settings = settings or AllocatorSettings()
        self.driver = Driver(capacity_bytes, settings.large_segment_bytes, place)
        self.requested_bytes = self.requested_peak_bytes = 0
        self.allocated_bytes = self.allocated_peak_bytes = 0
        self.retries = 0
        self.stream = self.pool = 0
        self._pools = {0: (Pool(SMALL_POOL), Pool(LARGE_POOL))}
        self._graphless: set[int] = set()
        self._live: dict[Hashable, Block | None] = {}
        self._max_split_bytes = _NEVER if settings.max_split_bytes is None else settings.max_split_bytes
        share = settings.per_process_memory_fraction
        self._allowed_bytes = None if capacity_bytes is None or share == 1 else int(share * capacity_bytes)
        self._collects = self._allowed_bytes is not None and settings.garbage_collection_threshold > 0

    def allow(self, allowed_bytes: int | None) -> None:
        """Let segments take so many bytes from now on; None for as many as are asked for, on a card without end."""
        self._allowed_bytes = allowed_bytes
        self._collects = allowed_bytes is not None and self.settings.garbage_collection_threshold > 0
        if allowed_bytes is None:
            self.driver.capacity_bytes = None

    def turn(self, turn: Turn) -> None:
        """Do what a program asks between two requests."""
        if turn.what == "place":
            self.stream, self.pool = turn.stream, turn.pool
        elif turn.what == "release":
            self.release_cached()
        else:
            self._graphless.add(turn.pool)

    def malloc(self, key: Hashable, requested_bytes: int, stream: int | None = None) -> Block | None:
        """Return the block that serves a request; None for zero bytes, which take nothing.

        Args:
            key: Name for :meth:`free`; not the key of anything still allocated.
            requested_bytes: At least 0.
            stream: Blocks freed on one stream serve that stream only; the current one where none is named.

        Raises:
            AllocationError: The card cannot hold it.

        Source:
            DeviceCachingAllocator::malloc in c10/cuda/CUDACachingAllocator.cpp.
        """
        assert requested_bytes >= 0
        assert key not in self._live
        if requested_bytes == 0:
            self._live[key] = None
            return None
        size_bytes = self.settings.rounded_bytes(requested_bytes)
        pool = self._pool_of(size_bytes)
        stream = self.stream if stream is None else stream
        block = self._cached_block(pool, size_bytes, stream)
        if block is None:
            block = self._new_block(pool, size_bytes, stream)
            if block is None:
                raise AllocationError(self._out_of_memory(requested_bytes, size_bytes))
        if self._splits(block, size_bytes):
            pool.split(block, size_bytes)
        block.allocated = True
        block.requested_bytes = requested_bytes
        self._live[key] = block
        self.requested_bytes += requested_bytes
        self.allocated_bytes += block.size_bytes
        if self.requested_bytes > self.requested_peak_bytes:
            self.requested_peak_bytes = self.requested_bytes
        if self.allocated_bytes > self.allocated_peak_bytes:
            self.allocated_peak_bytes = self.allocated_bytes
        return block

    def free(self, key: Hashable) -> None:
        """Return the block of ``key`` to its pool, joined with its free neighbours.

        Raises:
            KeyError: Nothing of that name is allocated.
        """
        block = self._live.pop(key)
        if block is None:
            return
        self.requested_bytes -= block.requested_bytes
        self.allocated_bytes -= block.size_bytes
        block.allocated = False
        block.pool.merge_neighbours(block)
        block.pool.add(block)

    def release_cached(self) -> None:
        """Give every unsplit free segment and every free page back, like ``torch.cuda.empty_cache``.

        Those of a private pool are given back once no graph uses it (``release_cached_blocks``).
        """
        for number in (0, *sorted(self._graphless & self._pools.keys())):
            small, large = self._pools[number]
            release_unsplit(large, self.driver)
            release_unsplit(small, self.driver)

    def free_blocks(self) -> list[Block]:
        """Return the cached blocks, of the small pool first; those of private pools after all others."""
        return [block for pools in self._pools.values() for pool in pools for block in pool.free_blocks()]

    def _pool_of(self, size_bytes: int) -> Pool:
        """Return the pool of a request: one of the current private pool's, while a graph is captured."""
        if self.pool not in self._pools:
            self._pools[self.pool] = (Pool(SMALL_POOL), Pool(LARGE_POOL))
        return self._pools[self.pool][size_bytes > SMALL_BYTES]

    def _splits(self, block: Block, size_bytes: int) -> bool:
        rest_bytes = block.size_bytes - size_bytes
        if block.pool.name == SMALL_POOL or self.settings.expandable_segments:
            return rest_bytes >= MINIMUM_BLOCK_BYTES
        return rest_bytes > SMALL_BYTES and size_bytes < self._max_split_bytes

    def _cached_block(self, pool: Pool, size_bytes: int, stream: int) -> Block | None:
        """Return the free block that fits best, out of its list; None when there is none."""
        # Source: get_free_block in c10/cuda/CUDACachingAllocator.cpp.
        if self._collects:
            pool.searches += 1
        index = pool.first_fit(stream, size_bytes)
        if index is None:
            return None
        block = pool.at(index)
        if block.virtual is not None:
            block = _least_expandable(pool, index, stream)
        if size_bytes < self._max_split_bytes:
            if block.size_bytes >= self._max_split_bytes:
                return None
        elif block.size_bytes >= size_bytes + self.settings.max_non_split_rounding_bytes:
            return None
        pool.remove(block)
        return block

    def _new_block(self, pool: Pool, size_bytes: int, stream: int) -> Block | None:
        """Return a block from the driver, releasing cached ones as far as that is needed."""
        if self._collects:
            assert self._allowed_bytes is not None
            collect_garbage(self._pools[0][1], self.driver, self.settings, self._allowed_bytes)
        block = self._from_driver(pool, size_bytes, stream)
        if block is None and release_oversize(pool, self.driver, self.settings, size_bytes, stream):
            block = self._from_driver(pool, size_bytes, stream)
        if block is None and not self.pool:  # what is cached cannot be given back while a graph is captured
            self.release_cached()
            self.retries += 1
            block = self._from_driver(pool, size_bytes, stream)
        return block

    def _from_driver(self, pool: Pool, size_bytes: int, stream: int) -> Block | None:
        segment_bytes = self.settings.segment_bytes(size_bytes)
        if self._allowed_bytes is not None and self.driver.reserved_bytes + segment_bytes > self._allowed_bytes:
            return None
        if self.settings.expandable_segments:
            return self.driver.expand(pool, stream, size_bytes)
        return self.driver.allocate_segment(pool, stream, segment_bytes)

    def _out_of_memory(self, requested_bytes: int, size_bytes: int) -> OutOfMemory:
        limit_bytes = self._allowed_bytes if self._allowed_bytes is not None else self.driver.capacity_bytes
        assert limit_bytes is not None
        return OutOfMemory(
            requested_bytes=requested_bytes,
            block_bytes=size_bytes,
            segment_bytes=self.settings.segment_bytes(size_bytes),
            free_bytes=max(limit_bytes - self.driver.reserved_bytes, 0),
            allocated_bytes=self.allocated_bytes,
            reserved_bytes=self.driver.reserved_bytes,
            largest_free_block_bytes=max((block.size_bytes for block in self.free_blocks()), default=0),
        )


def _least_expandable(pool: Pool, index: int, stream: int) -> Block:
    """Return the free block from ``index`` on that could grow least: the end of a segment comes last."""
    # Source: ``expandable_size`` in get_free_block, c10/cuda/CUDACachingAllocator.cpp.
    block = pool.at(index)
    while block.virtual is not None and index + 1 < len(pool.order) and pool.order[index + 1][0] == stream:
        candidate = pool.at(index + 1)
        if _growable_bytes(candidate) >= _growable_bytes(block):
            break
        block, index = candidate, index + 1
    return block


def _growable_bytes(block: Block) -> int:
    following = block.following
    return block.size_bytes + (following.size_bytes if following is not None and not following.mapped else 0)


def replay(
    events: Iterable[tuple[int, Hashable, int]],
    settings: AllocatorSettings | None = None,
    capacity_bytes: int | None = None,
    turns: Sequence[Turn] = (),
    streams: Mapping[Any, int] | None = None,
    place: Callable[[int], int] | None = None,
) -> AllocatorResult:
    """Return what a stream of allocations and frees does to the allocator, until it ends or fails.

    Args:
        events: ``(+1, storage, bytes)`` for a birth, ``(-1, storage, bytes)`` for a death, in order.
        settings: As ``PYTORCH_CUDA_ALLOC_CONF`` sets them.
        capacity_bytes: What the process can get of the card; None for no limit. A run that survives
            on a card need not survive on every larger one: where the smaller card forces a release,
            the larger one splits what it kept (24, free, 30, 20, free 30, 32 MiB: 52 do, 54 do not).
        turns: What the program asks between events, in order.
        streams: The stream that storages are asked for on, where that is another than the program's current one.
        place: Gives the address of a new segment of so many bytes; each lies below those before by default.

    Example:
        >>> replay([(+1, "a", 600), (-1, "a", 600)]).allocated_peak_bytes
        1024
    """
    allocator = CachingAllocator(settings, capacity_bytes, place=place)
    failure = None
    waiting, streams = [*reversed(turns)], streams or {}
    try:
        for number, (sign, storage, size_bytes) in enumerate(events):
            while waiting and waiting[-1].event <= number:
                allocator.turn(waiting.pop())
            if sign > 0:
                allocator.malloc(storage, size_bytes, streams.get(storage))
            else:
                allocator.free(storage)
    except AllocationError as error:
        failure = error.out_of_memory
    return result_of(allocator, failure)


def result_of(allocator: CachingAllocator, failure: OutOfMemory | None = None) -> AllocatorResult:
    """Return the counters of an allocator, and the failure that ended its run."""
    return AllocatorResult(
        requested_peak_bytes=allocator.requested_peak_bytes,
        allocated_peak_bytes=allocator.allocated_peak_bytes,
        reserved_peak_bytes=allocator.driver.reserved_peak_bytes,
        segments=allocator.driver.segments_peak,
        retries=allocator.retries,
        survives=failure is None,
        oom=failure,
    )
