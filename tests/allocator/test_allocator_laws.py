"""Laws of the simulated allocator, over streams of allocations that hypothesis makes up."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.allocator.caching_allocator import CachingAllocator, replay
from memplan.allocator.results import AllocationError, AllocatorResult
from memplan.allocator.settings import AllocatorSettings, parse_alloc_conf
from memplan.units import GIB, MIB

SIZES = st.one_of(
    st.integers(0, 4096),
    st.integers(1, 2 * MIB),
    st.integers(MIB, 64 * MIB),
    st.sampled_from([2, 9, 10, 12, 20, 24, 30, 40]).map(lambda size: size * MIB),
)

CONFIGURATIONS = st.sampled_from(
    [
        "",
        "expandable_segments:True",
        "expandable_segments:True,large_segment_size_mb:32",
        "max_split_size_mb:24,max_non_split_rounding_mb:20",
        "roundup_power2_divisions:[1:4,16:8,>:2]",
        "per_process_memory_fraction:0.8,garbage_collection_threshold:0.5",
        "expandable_segments:True,max_split_size_mb:24,per_process_memory_fraction:0.9,garbage_collection_threshold:0.4",
    ]
).map(parse_alloc_conf)


@st.composite
def streams(draw):
    """Births and deaths in which nothing dies before its birth, as (sign, storage, bytes)."""
    events, live = [], []
    for storage, size in enumerate(draw(st.lists(SIZES, max_size=40))):
        events.append((1, storage, size))
        live.append((storage, size))
        for _ in range(draw(st.integers(0, 2))):
            if live:
                events.append((-1, *live.pop(draw(st.integers(0, len(live) - 1)))))
    return events


def apply(allocator, event):
    sign, storage, size = event
    if sign > 0:
        allocator.malloc(storage, size, stream=storage % 2)
    else:
        allocator.free(storage)


def blocks_of(allocator):
    return [block for block in allocator._live.values() if block is not None]


@given(streams(), CONFIGURATIONS, st.sampled_from([None, 100 * MIB, 200 * MIB]))
def test_requested_is_at_most_allocated_is_at_most_reserved_is_at_most_the_card(events, configuration, capacity):
    allocator = CachingAllocator(configuration, capacity)
    for event in events:
        try:
            apply(allocator, event)
        except AllocationError:
            break
        reserved = allocator.driver.reserved_bytes
        assert allocator.requested_bytes <= allocator.allocated_bytes <= reserved <= (capacity or reserved)
        assert allocator.allocated_bytes == sum(block.size_bytes for block in blocks_of(allocator))
        cached = sum(block.size_bytes for block in allocator.free_blocks())
        assert reserved == allocator.allocated_bytes + cached


@given(streams(), CONFIGURATIONS, st.sampled_from([None, 150 * MIB]))
def test_blocks_never_overlap_and_free_neighbours_are_merged(events, configuration, capacity):
    allocator = CachingAllocator(configuration, capacity)
    try:
        for event in events:
            apply(allocator, event)
    except AllocationError:
        pass
    blocks = sorted(blocks_of(allocator) + allocator.free_blocks(), key=lambda block: block.address)
    for one, other in pairwise(blocks):
        assert one.address + one.size_bytes <= other.address
        if one.following is other:
            assert one.address + one.size_bytes == other.address
            assert one.allocated or other.allocated


@given(streams(), CONFIGURATIONS, st.sampled_from([None, 150 * MIB]))
def test_after_everything_is_freed_everything_can_be_released(events, configuration, capacity):
    allocator = CachingAllocator(configuration, capacity)
    try:
        for event in events:
            apply(allocator, event)
    except AllocationError:
        pass
    for storage in list(allocator._live):
        allocator.free(storage)
    assert (allocator.requested_bytes, allocator.allocated_bytes) == (0, 0)
    allocator.release_cached()
    assert (allocator.driver.reserved_bytes, allocator.free_blocks()) == (0, [])


@given(streams(), CONFIGURATIONS)
def test_the_same_events_give_the_same_result(events, configuration):
    assert replay(events, configuration, GIB) == replay(iter(events), configuration, GIB)


@given(streams(), CONFIGURATIONS)
def test_a_card_that_is_large_enough_changes_nothing(events, configuration):
    assert replay(events, configuration, 1024 * GIB) == replay(events, configuration)


@given(streams())
def test_with_expandable_segments_allocated_is_the_rounded_sum(events):
    rounded = [(sign, storage, -(-size // 512) * 512) for sign, storage, size in events]
    expandable = AllocatorSettings(expandable_segments=True)
    assert replay(events, expandable).allocated_peak_bytes == replay(rounded).requested_peak_bytes


@given(streams(), st.booleans())
@settings(max_examples=50)
def test_no_card_smaller_than_what_is_requested_is_survived(events, expandable):
    configuration = AllocatorSettings(expandable_segments=expandable)
    peak = replay(events, configuration).requested_peak_bytes
    if peak:
        result = replay(events, configuration, peak - 1)
        assert (result.survives, result.oom is None) == (False, False)
        assert result.retries >= 1


def test_what_asks_for_nothing_takes_nothing():
    for events in ([], [(1, 0, 0), (-1, 0, 0)]):
        assert replay(events) == AllocatorResult(0, 0, 0, segments=0, retries=0, survives=True, oom=None)


def mebibytes(*events):
    return [(sign, storage, size * MIB) for sign, storage, size in events]


def test_a_larger_card_can_fail_where_a_smaller_one_does_not():
    """Surviving is not monotonic in the card: the smaller one is made to release what the larger one splits.

    52 MiB: 24 does not stay beside 30, is released, and 20 gets a segment of its own. 54 MiB: it
    stays, 20 is cut out of it, and the rest is lost when 32 is asked for.
    """
    native = mebibytes((1, 0, 24), (-1, 0, 24), (1, 1, 30), (1, 2, 20), (-1, 1, 30), (1, 3, 32))
    assert replay(native, capacity_bytes=52 * MIB).survives
    assert not replay(native, capacity_bytes=54 * MIB).survives
    expandable = AllocatorSettings(expandable_segments=True)
    events = mebibytes((1, 0, 40), (1, 1, 24), (-1, 0, 40), (1, 2, 12), (1, 3, 40), (-1, 3, 40))
    survived = [replay(events, expandable, size * MIB).survives for size in (88, 90)]
    assert survived == [True, False]
