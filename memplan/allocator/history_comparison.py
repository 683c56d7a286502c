"""A real run's memory history against the simulated allocator, event by event."""

from bisect import bisect_left, insort
from collections import Counter

from memplan.allocator.caching_allocator import CachingAllocator, result_of
from memplan.allocator.memory_history import (
    ALLOC,
    FREE_COMPLETED,
    FREE_REQUESTED,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    HistoryBlock,
    HistoryEvent,
    MemoryHistory,
)
from memplan.allocator.results import AllocatorResult
from memplan.allocator.segments import DriverCall
from memplan.allocator.settings import AllocatorSettings, parse_alloc_conf
from memplan.documents.frozen_values import dataclass

_FALLBACK_ADDRESS = 2**63
_GROWTH = {SEGMENT_ALLOC: 1, SEGMENT_MAP: 1, SEGMENT_FREE: -1, SEGMENT_UNMAP: -1}


@dataclass(frozen=True, slots=True)
class HistoryDifference:
    """Where the simulator first differed from the run."""

    index: int  # Place of the event in the device's trace
    event: str  # What the run did then
    measured: str  # Its segments or address
    simulated: str  # The simulator's


@dataclass(frozen=True, slots=True)
class HistoryComparison:
    """How far the simulator follows a run."""

    allocations: int  # Allocations in the history
    differences: int  # Events at which segments, or the place of a block, were not the same
    first_difference: HistoryDifference | None  # The first of them; what follows may be its consequence
    simulated: AllocatorResult  # The simulator's peaks
    measured_reserved_peak_bytes: int  # Most bytes that the run held in segments
    measured_reserved_bytes: int  # Held in segments at the end, by the snapshot; likewise the next
    measured_allocated_bytes: int  # Held in blocks at the end
    simulated_reserved_bytes: int  # The simulator's, at the end; likewise the next
    simulated_allocated_bytes: int  # In the simulator's blocks
    # Blocks from before the history, known by their free or from the snapshot. They are allocated first, in order of
    # address, so that totals hold; places then differ.
    older_blocks: int
    older_block_bytes: int  # Their requested bytes
    older_segment_bytes: int  # Reserved before the history began
    unknown_frees: int  # Frees of addresses that no event of the history allocated
    out_of_memory: int  # Requests that failed in the run
    ignored_events: int  # Entries that move no memory


def compare_history(history: MemoryHistory, settings: AllocatorSettings | None = None) -> HistoryComparison:
    """Return how closely the simulator follows the run: segments, addresses, totals.

    New segments get the addresses they had in the run, because ties between free blocks of one size
    go to the lower address. Where the run gave memory back, the simulator gives back all it can.

    Args:
        history: From :func:`memplan.allocator.memory_history.load_history`.
        settings: Those of the run; by default what the file says, or torch's defaults.
    """
    chosen = settings if settings is not None else parse_alloc_conf(history.alloc_conf)
    comparison = _Comparison(chosen)
    for sign, storage, event in storages(history):
        comparison.step(sign, storage, event)
    comparison.finish(history.events[-1:])
    allocator, older = comparison.allocator, older_blocks(history)
    final_bytes = sum(size_bytes for _, size_bytes in history.segments)
    older_segment_bytes, peak_bytes = _reserved_before(history, final_bytes)
    return HistoryComparison(
        allocations=sum(event.action == ALLOC for event in history.events),
        differences=comparison.differences,
        first_difference=comparison.first_difference,
        simulated=result_of(allocator),
        measured_reserved_peak_bytes=peak_bytes,
        measured_reserved_bytes=final_bytes,
        measured_allocated_bytes=sum(block.size_bytes for block in history.blocks if block.active),
        simulated_reserved_bytes=allocator.driver.reserved_bytes,
        simulated_allocated_bytes=allocator.allocated_bytes,
        older_blocks=len(older),
        older_block_bytes=sum(block.requested_bytes for block in older),
        older_segment_bytes=older_segment_bytes,
        unknown_frees=unknown_frees(history),
        out_of_memory=history.out_of_memory,
        ignored_events=history.ignored_events,
    )


class _Comparison:
    """Feeds one allocator with a run's events and notes where it differs."""

    def __init__(self, settings: AllocatorSettings) -> None:
        self.allocator = CachingAllocator(settings, place=self._place)
        self.differences = 0
        self.first_difference: HistoryDifference | None = None
        self._taken: list[DriverCall] = []
        self._released: list[DriverCall] = []
        self._segments = _Ranges()
        self._fallback_address = _FALLBACK_ADDRESS

    def step(self, sign: int, storage: int, event: HistoryEvent) -> None:
        """Take one event: a birth, a death, or (sign 0) an exchange with the driver."""
        call = DriverCall(event.action, event.address, event.size_bytes)
        if event.action in (SEGMENT_FREE, SEGMENT_UNMAP):
            self._released.append(call)
            return
        if self._released:
            self._release(event)
        if event.action in (SEGMENT_ALLOC, SEGMENT_MAP):
            self._taken.append(call)
        elif sign > 0:
            self._allocate(storage, event)
        elif sign < 0:
            self.allocator.free(storage)

    def finish(self, last: tuple[HistoryEvent, ...]) -> None:
        """Give back what the run gave back after its last allocation."""
        if self._released:
            self._release(last[0])

    def _allocate(self, storage: int, event: HistoryEvent) -> None:
        calls = self.allocator.driver.calls
        before, measured = len(calls), self._taken
        block = self.allocator.malloc(storage, event.size_bytes, event.stream)
        self._taken = []
        if storage < 0 or block is None:
            return
        if calls[before:] != measured:
            self._differ(event, _shown(measured), _shown(calls[before:]))
        elif block.address != event.address:
            self._differ(event, f"address {event.address:#x}", f"address {block.address:#x}")

    def _release(self, event: HistoryEvent) -> None:
        calls = self.allocator.driver.calls
        before, measured, self._released = len(calls), self._released, []
        self.allocator.release_cached()
        for call in calls[before:]:
            self._segments.remove(call.address)
        if sorted(calls[before:]) != sorted(measured):
            self._differ(event, _shown(measured), _shown(calls[before:]))

    def _differ(self, event: HistoryEvent, measured: str, simulated: str) -> None:
        self.differences += 1
        if self.first_difference is None:
            what = f"{event.action} of {event.size_bytes} bytes"
            self.first_difference = HistoryDifference(event.place, what, measured, simulated)

    def _place(self, size_bytes: int) -> int:
        """Return the address that the run's new segment had, if it can be had here too."""
        if self._taken and self._segments.add(self._taken[0].address, size_bytes):
            return self._taken[0].address
        self._fallback_address += size_bytes
        return self._fallback_address - size_bytes


class _Ranges:
    """Address ranges that do not overlap."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []

    def add(self, start: int, size_bytes: int) -> bool:
        """Add a range; False when a part of it is taken."""
        index = bisect_left(self._ranges, (start, 0))
        if index < len(self._ranges) and self._ranges[index][0] < start + size_bytes:
            return False
        if index and self._ranges[index - 1][1] > start:
            return False
        insort(self._ranges, (start, start + size_bytes))
        return True

    def remove(self, start: int) -> None:
        """Remove the range that begins at ``start``, if there is one."""
        index = bisect_left(self._ranges, (start, 0))
        if index < len(self._ranges) and self._ranges[index][0] == start:
            del self._ranges[index]


def _reserved_before(history: MemoryHistory, final_bytes: int) -> tuple[int, int]:
    """Return the bytes in segments before the history began, and the most at any time."""
    changes = [_GROWTH.get(event.action, 0) * event.size_bytes for event in history.events]
    before = max(final_bytes - sum(changes), 0) if history.segments else 0
    level = peak = before
    for change in changes:
        level += change
        peak = max(peak, level)
    return before, peak


def _shown(calls: list[DriverCall]) -> str:
    parts = [f"{call.action} {call.size_bytes} at {call.address:#x}" for call in calls[:4]]
    return ", ".join(parts + ["..."] * (len(calls) > 4)) or "no new segment"


_SEGMENT_ACTIONS = frozenset((SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP))


def storages(history: MemoryHistory) -> list[tuple[int, int, HistoryEvent]]:
    """Return sign, storage and event: the older blocks' births, then every event that counts.

    A storage is numbered by the event of its birth, and from -1 down when it is older than the
    history. A death is the completed free, when the memory can be used again. A sign of 0 is a segment's.
    """
    freed = _freeing_action(history)
    live: dict[int, int] = {}
    steps: list[tuple[int, int, HistoryEvent]] = []
    for number, block in enumerate(older_blocks(history), start=1):
        live[block.address] = -number
        steps.append((1, -number, HistoryEvent(0, ALLOC, block.address, block.requested_bytes, block.stream)))
    for number, event in enumerate(history.events):
        if event.action == ALLOC:
            if event.address in live:
                steps.append((-1, live.pop(event.address), event._replace(action=freed)))
            live[event.address] = number
            steps.append((1, number, event))
        elif event.action == freed and event.address in live:
            steps.append((-1, live.pop(event.address), event))
        elif event.action in _SEGMENT_ACTIONS:
            steps.append((0, 0, event))
    return steps


def older_blocks(history: MemoryHistory) -> list[HistoryBlock]:
    """Return the blocks allocated before the history began, in order of address.

    They are freed without having been allocated, or stand in the final snapshot without an event.
    """
    freed, live = _freeing_action(history), set()
    older: dict[int, HistoryBlock] = {}
    for event in history.events:
        if event.action == ALLOC:
            live.add(event.address)
        elif event.action == freed and event.address in live:
            live.remove(event.address)
        elif event.action == freed:
            older.setdefault(
                event.address, HistoryBlock(event.address, event.size_bytes, event.size_bytes, event.stream, True)
            )
    born = {event.address for event in history.events if event.action == ALLOC}
    for block in history.blocks:
        if block.active and block.address not in born and block.requested_bytes:
            older.setdefault(block.address, block)
    return sorted(older.values())


def unknown_frees(history: MemoryHistory) -> int:
    """Return how many frees are of addresses that nothing in the history had allocated."""
    freed, live, unknown = _freeing_action(history), set(), 0
    for event in history.events:
        if event.action == ALLOC:
            live.add(event.address)
        elif event.action == freed:
            unknown += event.address not in live
            live.discard(event.address)
    return unknown


def _freeing_action(history: MemoryHistory) -> str:
    """Return the event that ends a block's life: the request where completions were not recorded."""
    actions = Counter(event.action for event in history.events)
    return FREE_REQUESTED if actions[FREE_REQUESTED] and not actions[FREE_COMPLETED] else FREE_COMPLETED
