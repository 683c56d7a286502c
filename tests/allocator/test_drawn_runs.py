"""What the allocator does with runs and settings that are drawn at random: every block and exchange with the driver, as a digest.

That this is what torch does is held elsewhere, by laws, published figures and torch itself. ``pytest tests/allocator/test_drawn_runs.py
--update-golden`` rewrites the digests.
"""

import json
from dataclasses import replace
from fractions import Fraction
from hashlib import sha256
from pathlib import Path
from random import Random

import pytest

from memplan.allocator.caching_allocator import CachingAllocator, replay, result_of
from memplan.allocator.history_comparison import compare_history
from memplan.allocator.memory_history import HistoryBlock, HistoryEvent, MemoryHistory
from memplan.allocator.pools import Turn
from memplan.allocator.results import AllocationError
from memplan.allocator.settings import AllocatorSettings, parse_alloc_conf
from memplan.allocator.streams.stream_replay import Stream
from memplan.errors import MemplanError
from memplan.units import MIB

FILE = Path(__file__).with_name("drawn_runs.json")
DIGESTS = json.loads(FILE.read_text(encoding="utf-8")) if FILE.is_file() else {}
TOGETHER = 20
SIZES = (1, 511, 513, 600, 2**19, MIB, MIB + 1, 3 * MIB, 10 * MIB - 1, 10 * MIB, 17 * MIB + 5, 24 * MIB, 45 * MIB, 0)
KEYS = (
    "expandable_segments", "garbage_collection_threshold", "large_segment_size_mb", "max_non_split_rounding_mb", "max_split_size_mb",
    "per_process_memory_fraction", "roundup_power2_divisions", "backend", "pinned_num_register_threads", "max_split_size", "", "a" * 40,
    "b" * 41,
)  # fmt: skip
VALUES = (
    "True", "False", "true", "0", "1", "0.5", "0.0", "1.0", "1.01", "-1", "1e-2", "1/2", "10", "11", "19", "20", "21", "40", "4", "6", "64",
    "native", "cudaMallocAsync", "[1:4,8:2,>:1]", "[>:8]", "[]", "[64:0,2:4]", "[32768:2,65536:4,>:2]", "[3:4]", "[1:3]", "[1:4", "", "0.",
    f"0.{'3' * 28}", f"0.{'3' * 29}", "9" * 20, "9" * 21, "x" * 40, "y" * 41, "1_0", "1099511627777", "[2:2,>:4,16:1]", "\uff11",
)  # fmt: skip


def digest(value: object) -> str:
    """Return what tells a value from others."""
    return sha256(repr(value).encode()).hexdigest()[:12]


def drawn_settings(rng: Random) -> AllocatorSettings:
    """Return settings that change where blocks go."""
    large = rng.choice((20, 20, 12, 40)) * MIB
    return AllocatorSettings(
        expandable_segments=rng.random() < 0.5,
        large_segment_bytes=large,
        max_split_bytes=rng.choice((None, None, large, max(large, 24 * MIB), 2 * large)),
        max_non_split_rounding_bytes=large + rng.choice((0, 1, 20)) * MIB,
        roundup_power2_divisions=tuple(rng.choice((0, 1, 2, 4, 8)) for _ in range(16)),
        garbage_collection_threshold=Fraction(rng.choice((0, 0, 3, 8)), 10),
        per_process_memory_fraction=Fraction(rng.choice((10, 10, 9, 5)), 10),
    )


def drawn_events(rng: Random, count: int) -> list[tuple[int, int, int]]:
    """Return births and deaths."""
    events, alive, share = list[tuple[int, int, int]](), dict[int, int](), rng.choice((0.4, 0.47, 0.5))
    for storage in range(count):
        if alive and rng.random() < share:
            gone = rng.choice([*alive])
            events.append((-1, gone, alive.pop(gone)))
        else:
            alive[storage] = rng.choice(SIZES) + 512 * rng.randrange(3)
            events.append((1, storage, alive[storage]))
    return events


def told_run(number: int) -> object:
    """Return all that a run does, request by request; on a card, which it may be too large for."""
    rng = Random(f"run {number}")
    settings, events = drawn_settings(rng), drawn_events(rng, rng.choice((60, 200)))
    several, capacity = rng.choice((1, 1, 3)), rng.choice((None, 150 * MIB, 300 * MIB, 301 * MIB + 1))
    allocator, told = CachingAllocator(settings, capacity), list[object]()
    failed = set[int]()
    for sign, storage, size in events:
        if rng.random() < 0.08:
            what = rng.choice(("place", "release", "drop"))
            pool = rng.choice((0, 0, 1, 2)) if several > 1 else 0
            allocator.turn(Turn(0, what, rng.randrange(several), pool))
        if rng.random() < 0.01 and capacity is not None:
            allocator.allow(rng.choice((capacity // 2, capacity, None)))
        if sign < 0:
            if storage not in failed:
                allocator.free(storage)
            continue
        try:
            block = allocator.malloc(storage, size, rng.choice((None, 0)))
        except AllocationError as error:
            failed.add(storage)
            told.append((str(error), error.out_of_memory))
        else:
            told.append(block and (block.address, block.size_bytes, block.stream))
    cached = [(block.address, block.size_bytes, block.stream, block.mapped) for block in allocator.free_blocks()]
    return (
        told,
        allocator.driver.calls,
        cached,
        result_of(allocator),
        allocator.allocated_bytes,
        allocator.requested_bytes,
    )


def told_replays(number: int) -> object:
    """Return the peaks of a run, with turns of the program and streams, as the simulator and the quick loop have them."""
    rng = Random(f"replay {number}")
    events = drawn_events(rng, 160)
    streams = {storage: rng.randrange(3) for _, storage, _ in events if rng.random() < 0.3}
    turns = [
        Turn(place, rng.choice(("place", "release")), rng.randrange(2)) for place in sorted(rng.sample(range(160), 6))
    ]
    whole = replay(events, drawn_settings(rng), rng.choice((None, 200 * MIB)), turns, streams)
    numbers = {storage: place for place, (_, storage, _) in enumerate(one for one in events if one[0] > 0)}
    sizes = [size for sign, _, size in events if sign > 0]
    codes = [2 * numbers[storage] + (sign < 0) for sign, storage, _ in events]
    several = {numbers[storage]: stream for storage, stream in streams.items() if stream}
    ways = [{}, {"expandable": True}, {"downwards": False}, {"capacity_bytes": 160 * MIB}]
    quick = [Stream(sizes, codes, streams=given).peaks(**way) for way in ways for given in (None, several)]
    return whole, whole.oom, quick


def told_history(number: int) -> object:
    """Return how a simulated run differs from a history, whose events were drawn too."""
    rng = Random(f"history {number}")
    settings, place = replace(drawn_settings(rng), per_process_memory_fraction=Fraction(1)), iter(range(10**6))
    allocator, blocks, events = CachingAllocator(settings), dict[int, HistoryBlock](), list[HistoryEvent]()
    completes = rng.random() < 0.8
    for sign, storage, size in drawn_events(rng, 80):
        before = len(allocator.driver.calls)
        if rng.random() < 0.05:
            allocator.release_cached()
        if sign < 0 and storage in blocks:
            freed = blocks.pop(storage)
            allocator.free(storage)
            names = ("free_requested", "free_completed")[: 2 if completes else 1]
            calls = [(name, freed.address, freed.requested_bytes) for name in names]
        elif sign > 0 and size:
            block = allocator.malloc(storage, size)
            assert block is not None
            blocks[storage] = HistoryBlock(block.address, block.size_bytes, size, 0, active=True)
            calls = [("alloc", block.address, size)]
        else:
            continue
        calls = [*allocator.driver.calls[before:], *calls]
        events += [
            HistoryEvent(next(place), *call, rng.choice((0, 0, 0, 0, 0, 0, 1))) for call in calls if rng.random() < 0.98
        ]
    segments = [
        (call.address, call.size_bytes)
        for call in allocator.driver.calls
        if call.action in ("segment_alloc", "segment_map")
    ]
    segments = segments[rng.choice((0, 0, 1, 9)) :]  # a snapshot may lack what its events have
    left = tuple(sorted(blocks.values()))
    return compare_history(MemoryHistory(tuple(events), tuple(segments), left, 2, 3, ""), settings)


def told_texts(number: int) -> object:
    """Return what settings in words are read as, or refused with."""
    rng = Random(f"text {number}")
    told = list[object]()
    for _ in range(40):
        items = [
            f"{rng.choice(KEYS)}{rng.choice((':', ':', ':', ':', '', '::'))}{rng.choice(VALUES)}"
            for _ in range(rng.choice((1, 1, 1, 2)))
        ]
        text = rng.choice((",", ", ", ",,")).join(items)
        try:
            settings = parse_alloc_conf(text)
        except MemplanError as error:
            told.append(str(error))
        else:
            sizes = [1 << bits for bits in range(8, 39)]
            rounded = [settings.rounded_bytes(size + more) for size in sizes for more in (-1, 0, 1, size // 3)]
            told.append((settings, rounded, [settings.segment_bytes(size) for size in rounded]))
    return told


TOLD = {"run": (told_run, 160), "replay": (told_replays, 80), "history": (told_history, 80), "text": (told_texts, 20)}


@pytest.mark.parametrize(
    ("kind", "first"), [(kind, first) for kind, (_, count) in TOLD.items() for first in range(0, count, TOGETHER)]
)
def test_runs_are_what_they_were(kind, first, request):
    tell = TOLD[kind][0]
    told = {str(number): digest(tell(number)) for number in range(first, first + TOGETHER)}
    if request.config.getoption("--update-golden"):
        DIGESTS.setdefault(kind, {}).update(told)
        FILE.write_text(json.dumps(DIGESTS, indent=0) + "\n", encoding="utf-8")
    assert told == {name: DIGESTS[kind][name] for name in told}
