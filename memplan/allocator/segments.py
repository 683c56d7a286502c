"""What the caching allocator asks of the driver: segments, mapped pages, and their release."""

from collections.abc import Callable
from typing import NamedTuple

from memplan.allocator.pools import SMALL_POOL, Block, Pool, VirtualSegment
from memplan.allocator.settings import SMALL_SEGMENT_BYTES
from memplan.units import round_up

_FIRST_ADDRESS = 2**40
_UNLIMITED_ADDRESS_SPACE = 2**100


class DriverCall(NamedTuple):
    """One exchange with the driver, named as a memory history names it."""

    action: str  # ``segment_alloc``, ``segment_free``, ``segment_map`` or ``segment_unmap``
    address: int  # First byte of the range
    size_bytes: int  # Length of the range


class Driver:
    """The memory of one card, as the allocator of one process sees it.

    Args:
        capacity_bytes: What the process can get in all; None for no limit.
        large_page_bytes: Page of an expandable segment of the large pool.
        place: Gives the address of a new segment of so many bytes; by default each lies below those before, as Linux places
            what is mapped (``arch_get_unmapped_area_topdown``) and runs on an H200 and a T4 had it; expandable ones lie above.
    """

    def __init__(
        self, capacity_bytes: int | None, large_page_bytes: int, place: Callable[[int], int] | None = None
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.reserved_bytes = 0
        self.reserved_peak_bytes = 0
        self.segments = 0
        self.segments_peak = 0
        self.calls: list[DriverCall] = []
        self._large_page_bytes = large_page_bytes
        self._next_address = self._lowest_address = _FIRST_ADDRESS
        self._place, self._place_range = place or self._below, place or self._above

    def allocate_segment(self, pool: Pool, stream: int, size_bytes: int) -> Block | None:
        """Return a new segment as one block (cudaMalloc), or None when the card is full."""
        if not self._has_room(size_bytes):
            return None
        block = Block(pool, stream, self._place(size_bytes), size_bytes)
        self._count_segment(1)
        self._record("segment_alloc", block.address, size_bytes, size_bytes)
        return block

    def free_segment(self, block: Block) -> None:
        """Give a segment that is one free block back (cudaFree)."""
        block.pool.remove(block)
        self._count_segment(-1)
        self._record("segment_free", block.address, block.size_bytes, -block.size_bytes)

    def expand(self, pool: Pool, stream: int, size_bytes: int) -> Block | None:
        """Return a free block of at least ``size_bytes``, out of its list, by mapping pages.

        Pages are mapped at the lowest address where free and unmapped ranges in a row have room.
        Those mapped before the card turned out to be full stay mapped.

        Source:
            try_allocate_expandable_block in c10/cuda/CUDACachingAllocator.cpp.
        """
        block = self._expandable_range(pool, stream, size_bytes)
        if not block.mapped and not self._map(block, min(block.size_bytes, size_bytes)):
            return None
        while block.size_bytes < size_bytes:
            following = block.following
            assert following is not None
            if not self._map(following, min(size_bytes - block.size_bytes, following.size_bytes)):
                return None
            block = following
        pool.remove(block)
        return block

    def unmap(self, block: Block) -> None:
        """Give back the whole pages that lie inside a free expandable block.

        Source:
            unmap_block and ExpandableSegment::unmap in c10/cuda/CUDACachingAllocator.cpp.
        """
        virtual = block.virtual
        assert virtual is not None
        page, base, pool = virtual.page_bytes, virtual.address, block.pool
        begin = base + round_up(block.address - base, page)
        end = base + (block.address + block.size_bytes - base) // page * page
        if begin >= end:
            return
        pool.remove(block)
        if begin > block.address:
            before = Block(pool, block.stream, block.address, begin - block.address, virtual)
            before.splice(block.previous, block)
            pool.add(before)
        if end < block.address + block.size_bytes:
            after = Block(pool, block.stream, end, block.address + block.size_bytes - end, virtual)
            after.splice(block, block.following)
            pool.add(after)
        block.address, block.size_bytes, block.mapped = begin, end - begin, False
        pool.merge_neighbours(block)
        pool.add_unmapped(block)
        self._record("segment_unmap", begin, end - begin, begin - end)
        if not block.is_split():
            pool.remove_unmapped(block)
            self._count_segment(-1)

    def _map(self, block: Block, size_bytes: int) -> bool:
        """Back the low end of an unmapped block with whole pages; False when the card is full."""
        virtual, pool = block.virtual, block.pool
        assert virtual is not None
        mapped_bytes = round_up(size_bytes, virtual.page_bytes)
        if not self._has_room(mapped_bytes):
            return False
        pool.remove_unmapped(block)
        if mapped_bytes < block.size_bytes:
            start = block.address + mapped_bytes
            rest = Block(pool, block.stream, start, block.size_bytes - mapped_bytes, virtual)
            rest.mapped = False
            rest.splice(block, block.following)
            pool.add_unmapped(rest)
        address = block.address
        block.size_bytes, block.mapped = mapped_bytes, True
        pool.merge_neighbours(block)
        pool.add(block)
        self._record("segment_map", address, mapped_bytes, mapped_bytes)
        return True

    def _expandable_range(self, pool: Pool, stream: int, size_bytes: int) -> Block:
        """Return the first of the free or unmapped blocks in a row that have room for a request."""
        for block in pool.unmapped_blocks(stream):
            before = block.previous
            start = before if before is not None and not before.allocated else block
            room, current = 0, start
            while room < size_bytes and not current.allocated:
                room += current.size_bytes
                if current.following is None:
                    break
                current = current.following
            if room >= size_bytes:
                return start
        return self._reserve_addresses(pool, stream)

    def _reserve_addresses(self, pool: Pool, stream: int) -> Block:
        """Return a new virtual segment, all unmapped: addresses for 9/8 of the card."""
        # Source: The constructor of ExpandableSegment in c10/cuda/CUDACachingAllocator.cpp.
        page_bytes = SMALL_SEGMENT_BYTES if pool.name == SMALL_POOL else self._large_page_bytes
        wanted = _UNLIMITED_ADDRESS_SPACE
        if self.capacity_bytes is not None:
            wanted = self.capacity_bytes + self.capacity_bytes // 8
        virtual = VirtualSegment(
            self._place_range(page_bytes), max(round_up(wanted, page_bytes), page_bytes), page_bytes
        )
        self._next_address = max(self._next_address, virtual.address + virtual.size_bytes)
        block = Block(pool, stream, virtual.address, virtual.size_bytes, virtual)
        block.mapped = False
        pool.add_unmapped(block)
        self._count_segment(1)
        return block

    def _has_room(self, size_bytes: int) -> bool:
        return self.capacity_bytes is None or self.reserved_bytes + size_bytes <= self.capacity_bytes

    def _below(self, size_bytes: int) -> int:
        self._lowest_address -= size_bytes
        return self._lowest_address

    def _above(self, size_bytes: int) -> int:
        address = self._next_address
        self._next_address += size_bytes
        return address

    def _count_segment(self, change: int) -> None:
        self.segments += change
        self.segments_peak = max(self.segments_peak, self.segments)

    def _record(self, action: str, address: int, size_bytes: int, change_bytes: int) -> None:
        self.calls.append(DriverCall(action, address, size_bytes))
        self.reserved_bytes += change_bytes
        self.reserved_peak_bytes = max(self.reserved_peak_bytes, self.reserved_bytes)
