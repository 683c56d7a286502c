"""Limits of the caching allocator: the card, the settings that bound it, and what is released first.

Functions are those of c10/cuda/CUDACachingAllocator.cpp.
"""

from dataclasses import replace
from fractions import Fraction

import pytest

from memplan.allocator.caching_allocator import replay
from memplan.allocator.results import AllocationError
from memplan.allocator.settings import AllocatorSettings, parse_alloc_conf
from memplan.errors import MemplanError
from memplan.units import MIB
from tests.allocator.test_caching_allocator import filled


def test_oversize_blocks_are_not_split_and_not_given_to_smaller_requests():
    """get_free_block: below max_split_size no block of that size or more; should_split: nor is it cut."""
    settings = AllocatorSettings(max_split_bytes=40 * MIB)
    allocator = filled(60, settings=settings)
    allocator.free(0)
    allocator.malloc("below", 39 * MIB)
    assert allocator.driver.reserved_bytes == 100 * MIB
    assert allocator.malloc("oversize", 45 * MIB).size_bytes == 60 * MIB


@pytest.mark.parametrize(("limit", "reused"), [(20, False), (21, True)])
def test_an_oversize_request_takes_a_block_that_is_not_much_larger(limit, reused):
    """get_free_block: for an oversize request only blocks below size + max_non_split_rounding_size."""
    settings = parse_alloc_conf(f"max_split_size_mb:40,max_non_split_rounding_mb:{limit}")
    allocator = filled(80, settings=settings)
    allocator.free(0)
    allocator.malloc("oversize", 60 * MIB)
    assert (allocator.driver.reserved_bytes == 80 * MIB) is reused


def test_the_retry_releases_what_is_cached_and_unsplit():
    """malloc: when cudaMalloc fails, release_cached_blocks and once more; num_alloc_retries counts it."""
    allocator = filled(30, 30, capacity_bytes=100 * MIB)
    allocator.free(0)
    allocator.malloc("larger", 50 * MIB)
    assert allocator.retries == 1
    assert [call.action for call in allocator.driver.calls[2:]] == ["segment_free", "segment_alloc"]
    assert allocator.driver.reserved_bytes == 80 * MIB


def test_a_split_segment_cannot_be_released():
    """release_blocks: only blocks without a neighbour; the rest is fragmentation, and the request fails."""
    allocator = filled(5, 5, capacity_bytes=40 * MIB)
    allocator.free(1)
    with pytest.raises(AllocationError, match="out of memory") as caught:
        allocator.malloc("large", 30 * MIB - 1)
    failure = caught.value.out_of_memory
    assert (failure.requested_bytes, failure.block_bytes, failure.segment_bytes) == (30 * MIB - 1, 30 * MIB, 30 * MIB)
    assert (failure.free_bytes, failure.reserved_bytes, failure.allocated_bytes) == (20 * MIB, 20 * MIB, 5 * MIB)
    assert (failure.unusable_bytes, failure.largest_free_block_bytes) == (15 * MIB, 15 * MIB)
    assert (allocator.retries, caught.value.exit_code) == (1, 1)
    assert isinstance(caught.value, MemplanError)


def test_after_a_failure_the_allocator_still_works():
    """malloc throws after restoring its state: a program may catch the error and ask for less."""
    allocator = filled(5, capacity_bytes=40 * MIB)
    with pytest.raises(AllocationError):
        allocator.malloc("large", 30 * MIB)
    allocator.malloc("less", 20 * MIB)
    assert allocator.allocated_bytes == 25 * MIB


@pytest.mark.parametrize(
    ("sizes", "capacity", "request_size", "released"),
    [
        # the smallest oversize block that is enough
        ((30, 90, 100), 220, 60, [90]),
        # when no single one is enough, several, starting with the largest
        ((40, 50, 60), 150, 100, [60, 50]),
    ],
)
def test_oversize_blocks_are_released_before_everything_else(sizes, capacity, request_size, released):
    """release_available_cached_blocks: as few as are enough, and no retry counted."""
    settings = AllocatorSettings(max_split_bytes=40 * MIB)
    allocator = filled(*sizes, settings=settings, capacity_bytes=capacity * MIB)
    for key in range(3):
        allocator.free(key)
    allocator.malloc("new", request_size * MIB)
    freed = [call.size_bytes // MIB for call in allocator.driver.calls if call.action == "segment_free"]
    assert (freed, allocator.retries) == (released, 0)


def test_the_memory_fraction_limits_what_is_reserved():
    """alloc_block: fails when reserved plus the segment exceeds the fraction of the card."""
    settings = parse_alloc_conf("per_process_memory_fraction:0.5")
    assert replay([(1, "a", 50 * MIB)], settings, 100 * MIB).survives
    result = replay([(1, "a", 51 * MIB)], settings, 100 * MIB)
    assert (result.survives, result.oom.free_bytes) == (False, 50 * MIB)


def test_what_is_allowed_may_change_as_a_program_runs():
    """setMemoryFraction of the device's allocator; without a limit the card has no end either."""
    allocator = filled(30, capacity_bytes=100 * MIB)
    allocator.allow(60 * MIB)
    with pytest.raises(AllocationError):
        allocator.malloc("beyond the share", 40 * MIB)
    allocator.allow(200 * MIB)
    with pytest.raises(AllocationError):
        allocator.malloc("beyond the card", 80 * MIB)
    allocator.allow(None)
    allocator.malloc("beyond both", 300 * MIB)
    assert allocator.driver.reserved_bytes == 330 * MIB


def test_garbage_collection_releases_the_blocks_that_were_free_longest():
    """garbage_collect_cached_blocks: above threshold * allowed, unsplit large blocks of average age or more."""
    settings = parse_alloc_conf("garbage_collection_threshold:0.5,per_process_memory_fraction:0.9")
    allocator = filled(30, 30, settings=settings, capacity_bytes=200 * MIB)
    allocator.free(0)
    for _ in range(3):
        allocator.malloc("short", 2 * MIB + 40 * MIB)
        allocator.free("short")
    allocator.free(1)
    allocator.malloc("new", 60 * MIB)
    freed = [call.size_bytes // MIB for call in allocator.driver.calls if call.action == "segment_free"]
    assert freed == [30]
    assert allocator.retries == 0


def test_garbage_collection_needs_a_memory_fraction():
    """malloc: collects only when allowed_memory_maximum is set, which a fraction below 1 does."""
    events = [(1, 0, 60 * MIB), (-1, 0, 60 * MIB), (1, 1, 90 * MIB)]
    settings = parse_alloc_conf("garbage_collection_threshold:0.1")
    assert replay(events, settings, 200 * MIB).reserved_peak_bytes == 150 * MIB
    limited = replace(settings, per_process_memory_fraction=Fraction(9, 10))
    assert replay(events, limited, 200 * MIB).reserved_peak_bytes == 90 * MIB
    never = parse_alloc_conf("per_process_memory_fraction:0.9")
    assert replay(events, never, 200 * MIB).reserved_peak_bytes == 150 * MIB


def test_a_card_that_is_full_to_the_last_byte_has_none_free():
    result = replay([(1, 0, 60 * MIB), (1, 1, 512)], capacity_bytes=60 * MIB)
    assert (result.survives, result.oom.free_bytes, result.oom.largest_free_block_bytes) == (False, 0, 0)
