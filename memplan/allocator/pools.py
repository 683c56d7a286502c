"""Blocks and pools of the caching allocator: ordered free lists, splitting and merging."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Literal, NamedTuple

SMALL_POOL, LARGE_POOL = "small", "large"

Order = tuple[int, int, int]
"""Stream, size, address: the order of a free list, in which the first that is large enough fits best."""


class Turn(NamedTuple):
    """What a program asks of the allocator between two requests."""

    event: int  # Number of the event before which it is asked
    # Where later requests come from, that everything cached is given back, or that no graph uses a pool any more.
    what: Literal["place", "release", "drop"]
    stream: int = 0  # Of later requests
    pool: int = 0  # The private pool that serves them, or that is dropped; 0 for the pool of all that is in no graph


class VirtualSegment:
    """Address space of one expandable segment, mapped in pages of ``page_bytes``."""

    __slots__ = ("address", "page_bytes", "size_bytes")

    def __init__(self, address: int, size_bytes: int, page_bytes: int) -> None:
        self.address = address
        self.size_bytes = size_bytes
        self.page_bytes = page_bytes


class Block:
    """A range of addresses in one segment: allocated, cached, or not backed by memory.

    Attributes:
        previous: The block just before it in the segment; ``following`` the one just after.
        virtual: Its expandable segment; None for memory from cudaMalloc.
        free_since: Searches that the pool had seen when the block became free.
    """

    __slots__ = (
        "address", "allocated", "following", "free_since", "mapped", "pool",
        "previous", "requested_bytes", "size_bytes", "stream", "virtual",
    )  # fmt: skip

    def __init__(
        self, pool: Pool, stream: int, address: int, size_bytes: int, virtual: VirtualSegment | None = None
    ) -> None:
        self.pool = pool
        self.stream = stream
        self.address = address
        self.size_bytes = size_bytes
        self.virtual = virtual
        self.previous: Block | None = None
        self.following: Block | None = None
        self.allocated = False
        self.mapped = True
        self.requested_bytes = 0
        self.free_since = 0

    def is_split(self) -> bool:
        """Tell whether the block is only a part of its segment."""
        return self.previous is not None or self.following is not None

    def splice(self, previous: Block | None, following: Block | None) -> None:
        """Put the block between two neighbours."""
        self.previous, self.following = previous, following
        if previous is not None:
            previous.following = self
        if following is not None:
            following.previous = self


class Pool:
    """The free blocks of all streams for one size class, and the unmapped ranges between them."""

    __slots__ = ("_free", "_unmapped", "name", "order", "searches", "unmapped_order")

    def __init__(self, name: str) -> None:
        self.name = name
        self.order: list[Order] = []
        self.unmapped_order: list[tuple[int, int]] = []
        self.searches = 0
        self._free: dict[Order, Block] = {}
        self._unmapped: dict[tuple[int, int], Block] = {}

    def add(self, block: Block) -> None:
        """Put a free block into the list."""
        place = (block.stream, block.size_bytes, block.address)
        insort(self.order, place)
        self._free[place] = block
        block.free_since = self.searches

    def remove(self, block: Block) -> None:
        """Take a free block out of the list."""
        place = (block.stream, block.size_bytes, block.address)
        del self.order[bisect_left(self.order, place)]
        del self._free[place]

    def at(self, index: int) -> Block:
        """Return the free block at a place of the order."""
        return self._free[self.order[index]]

    def first_fit(self, stream: int, size_bytes: int) -> int | None:
        """Return the place of the smallest free block of the stream that is large enough."""
        index = bisect_left(self.order, (stream, size_bytes))
        return index if index < len(self.order) and self.order[index][0] == stream else None

    def free_blocks(self) -> list[Block]:
        """Return the free blocks in their order."""
        return [self._free[place] for place in self.order]

    def add_unmapped(self, block: Block) -> None:
        """Put a range without memory into the list of such ranges."""
        insort(self.unmapped_order, (block.stream, block.address))
        self._unmapped[block.stream, block.address] = block

    def remove_unmapped(self, block: Block) -> None:
        """Take a range without memory out of its list."""
        place = (block.stream, block.address)
        del self.unmapped_order[bisect_left(self.unmapped_order, place)]
        del self._unmapped[place]

    def unmapped_blocks(self, stream: int) -> list[Block]:
        """Return the ranges of a stream that no memory backs, lowest address first."""
        start = bisect_left(self.unmapped_order, (stream,))
        return [self._unmapped[place] for place in self.unmapped_order[start:] if place[0] == stream]

    def split(self, block: Block, size_bytes: int) -> None:
        """Cut a block to ``size_bytes`` from its low end; the rest becomes a free block."""
        rest = Block(self, block.stream, block.address + size_bytes, block.size_bytes - size_bytes, block.virtual)
        rest.splice(block, block.following)
        block.size_bytes = size_bytes
        self.add(rest)

    def merge_neighbours(self, block: Block) -> None:
        """Join a block, which is in no list, with the neighbours that are free and mapped like it.

        Source:
            try_merge_blocks in c10/cuda/CUDACachingAllocator.cpp.
        """
        before, after = block.previous, block.following
        if before is not None and not before.allocated and before.mapped is block.mapped:
            self._drop(before)
            block.address = before.address
            block.size_bytes += before.size_bytes
            block.splice(before.previous, after)
        if after is not None and not after.allocated and after.mapped is block.mapped:
            self._drop(after)
            block.size_bytes += after.size_bytes
            block.splice(block.previous, after.following)

    def _drop(self, block: Block) -> None:
        if block.mapped:
            self.remove(block)
        else:
            self.remove_unmapped(block)
