"""The storages in a memory history: births and deaths, also of blocks older than the history."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

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
)

if TYPE_CHECKING:
    from memplan.allocator.memory_history import MemoryHistory

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
