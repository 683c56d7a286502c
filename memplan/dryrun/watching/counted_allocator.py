"""The simulated allocator with the counts that a script may print: ``torch.cuda.memory_stats``, snapshots of its segments."""

from collections.abc import Hashable, Iterator
from typing import Any

from memplan.allocator.caching_allocator import CachingAllocator
from memplan.allocator.pools import LARGE_POOL, SMALL_POOL, Block
from memplan.allocator.settings import SMALL_SEGMENT_BYTES

_POOLS = {"all": (SMALL_POOL, LARGE_POOL), "small_pool": (SMALL_POOL,), "large_pool": (LARGE_POOL,)}


class Count:
    """A quantity that rises and falls, as torch's ``Stat``."""

    def __init__(self) -> None:
        self.current = self.peak = self.allocated = self.freed = 0

    def change(self, by: int) -> None:
        """Add to it, or take away."""
        self.current += by
        self.peak = max(self.peak, self.current)
        self.allocated += max(by, 0)
        self.freed += max(-by, 0)

    def items(self) -> dict[str, int]:
        """Return it as ``memory_stats`` names its parts."""
        return dict(vars(self))


class CountedAllocator(CachingAllocator):
    """Counts requests, blocks and segments, of both pools and of each."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._counts: dict[tuple[str, str], Count] = {}
        self._calls = 0
        self.failed = 0

    def malloc(self, key: Hashable, requested_bytes: int, stream: int | None = None) -> Block | None:
        """Serve a request as the allocator does, and count it."""
        block = super().malloc(key, requested_bytes, stream)
        if block is not None:
            self._moved(block, 1)
        return block

    def free(self, key: Hashable) -> None:
        """Take a block back as the allocator does, and count it."""
        block = self._live[key]
        if block is not None:
            self._moved(block, -1)
        super().free(key)

    def statistics(self) -> dict[str, Any]:
        """Return what ``torch._C._cuda_memoryStats`` does; peaks of what cannot be given back are those seen when asked.

        Source:
            torch/csrc/cuda/Module.cpp (``THCPModule_memoryStats``, v2.13.0).
        """
        self._see_segments()
        idle = [block for block in self.free_blocks() if block.is_split() and block.virtual is None]
        for pool, names in _POOLS.items():
            within = [block for block in idle if block.pool.name in names]
            self._reach("inactive_split", pool, len(within))
            self._reach("inactive_split_bytes", pool, sum(block.size_bytes for block in within))
        counts = {
            name: {pool: self._count(name, pool).items() for pool in _POOLS}
            for name in (
                *("allocation", "segment", "active", "inactive_split"),
                *("allocated_bytes", "reserved_bytes", "active_bytes", "inactive_split_bytes", "requested_bytes"),
            )
        }
        settings = self.settings
        return {
            **counts,
            **{name: Count().items() for name in ("oversize_allocations", "oversize_segments")},
            "num_alloc_retries": self.retries,
            "num_ooms": self.failed,
            "num_sync_all_streams": self.retries,
            "num_device_alloc": self._count("segment", "all").allocated,
            "num_device_free": self._count("segment", "all").freed,
            "max_split_size": -1 if settings.max_split_bytes is None else settings.max_split_bytes,
        }

    def reset_peaks(self) -> None:
        """Let peaks be what there is now."""
        self._see_segments()
        self.requested_peak_bytes, self.allocated_peak_bytes = self.requested_bytes, self.allocated_bytes
        self.driver.reserved_peak_bytes = self.driver.reserved_bytes
        for count in self._counts.values():
            count.peak = count.current

    def reset_totals(self) -> None:
        """Let nothing have been allocated or freed so far."""
        self._see_segments()
        for count in self._counts.values():
            count.allocated = count.freed = 0

    def segments(self) -> list[dict[str, Any]]:
        """Return the segments with their blocks, as ``torch.cuda.memory_snapshot`` does."""
        blocks = [*(block for block in self._live.values() if block is not None), *self.free_blocks()]
        first = {id(start): start for start in map(_first_of_segment, blocks)}
        return [_segment(start) for start in sorted(first.values(), key=lambda block: block.address)]

    def _moved(self, block: Block, sign: int) -> None:
        for name, change in (
            ("allocation", 1),
            ("active", 1),
            ("allocated_bytes", block.size_bytes),
            ("active_bytes", block.size_bytes),
            ("requested_bytes", block.requested_bytes),
        ):
            self._change(name, block.pool.name, sign * change)

    def _see_segments(self) -> None:
        """Count what was exchanged with the driver since the last time."""
        for call in self.driver.calls[self._calls :]:
            sign = 1 if call.action in ("segment_alloc", "segment_map") else -1
            pool = SMALL_POOL if call.size_bytes == SMALL_SEGMENT_BYTES else LARGE_POOL
            self._change("reserved_bytes", pool, sign * call.size_bytes)
            self._change("segment", pool, sign)
        self._calls = len(self.driver.calls)

    def _change(self, name: str, pool: str, by: int) -> None:
        for kind in ("all", f"{pool}_pool"):
            self._count(name, kind).change(by)

    def _reach(self, name: str, pool: str, value: int) -> None:
        count = self._count(name, pool)
        count.change(value - count.current)

    def _count(self, name: str, pool: str) -> Count:
        return self._counts.setdefault((name, pool), Count())


def _first_of_segment(block: Block) -> Block:
    while block.previous is not None:
        block = block.previous
    return block


def _segment(start: Block) -> dict[str, Any]:
    """Return a segment as torch/csrc/cuda/Module.cpp does (``segmentInfoToDict``, v2.13.0)."""
    mapped = [block for block in _following(start) if block.mapped]
    parts: list[dict[str, Any]] = [
        {
            "address": block.address,
            "size": block.size_bytes,
            "requested_size": block.requested_bytes if block.allocated else 0,
            "state": "active_allocated" if block.allocated else "inactive",
            "frames": [],
        }
        for block in mapped
    ]
    taken = [part for part in parts if part["state"] == "active_allocated"]
    allocated, requested = (sum(part[name] for part in taken) for name in ("size", "requested_size"))
    return {
        "device": 0,
        "address": start.address,
        "total_size": sum(part["size"] for part in parts),
        "allocated_size": allocated,
        "active_size": allocated,
        "requested_size": requested,
        "stream": start.stream,
        "segment_type": start.pool.name,
        "segment_pool_id": (0, 0),
        "is_expandable": start.virtual is not None,
        "frames": [],
        "blocks": parts,
    }


def _following(block: Block | None) -> Iterator[Block]:
    while block is not None:
        yield block
        block = block.following
