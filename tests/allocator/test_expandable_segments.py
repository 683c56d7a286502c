"""Rules of expandable segments, with the function of c10/cuda/CUDACachingAllocator.cpp that has each."""

from functools import partial

import pytest

from memplan.allocator.caching_allocator import CachingAllocator, replay
from memplan.allocator.results import AllocationError
from memplan.allocator.settings import AllocatorSettings, parse_alloc_conf
from memplan.units import MIB
from tests.allocator import test_caching_allocator

EXPANDABLE = parse_alloc_conf("expandable_segments:True")
filled = partial(test_caching_allocator.filled, settings=EXPANDABLE)


def mapped(allocator):
    """What was mapped and unmapped, in MiB."""
    sign = {"segment_map": 1, "segment_unmap": -1}
    return [sign[call.action] * call.size_bytes // MIB for call in allocator.driver.calls]


def test_pages_are_2_mebibytes_in_the_small_pool_and_20_in_the_large():
    """find_expandable_block: segment_size is kSmallBuffer or large_segment_size."""
    assert mapped(filled(1)) == [2]
    assert mapped(filled(30)) == [40]
    assert mapped(filled(30, settings=parse_alloc_conf("expandable_segments:True,large_segment_size_mb:32"))) == [32]


def test_a_segment_grows_by_what_its_free_end_lacks():
    """try_allocate_expandable_block: a free block before the unmapped range is used first."""
    allocator = filled(30, 10, 25)
    assert mapped(allocator) == [40, 40]
    assert [block.size_bytes for block in allocator.free_blocks()] == [15 * MIB]
    allocator.malloc(3, 40 * MIB)
    assert mapped(allocator) == [40, 40, 40]
    assert allocator.driver.segments_peak == 1


def test_blocks_always_split_from_512_bytes_on():
    """should_split: with expandable segments in both pools, so that allocated is the rounded sum."""
    allocator = filled(30)
    allocator.free(0)
    assert allocator.malloc("b", 29 * MIB + 1).size_bytes == 29 * MIB + 512


def test_the_end_of_a_segment_is_the_last_choice():
    """get_free_block: a block counts with the unmapped space behind it, so a larger closed one is better."""
    allocator = filled(12, 2, 20)
    start = allocator.driver.calls[0].address
    allocator.free(0)
    assert [block.size_bytes // MIB for block in allocator.free_blocks()] == [6, 12]
    assert allocator.malloc("best", 5 * MIB).address == start


def test_neighbours_merge_but_free_and_unmapped_do_not():
    """try_merge_blocks: dst->mapped must equal src->mapped."""
    allocator = filled(10, 10, 10, 10)
    for key in range(4):
        allocator.free(key)
    (block,) = allocator.free_blocks()
    assert (block.size_bytes, block.following.mapped) == (40 * MIB, False)


def test_whole_free_pages_are_unmapped_in_the_middle_too():
    """unmap_block: pages inside a free block go back, what sticks out of them stays cached."""
    allocator = filled(30, 70, 10)
    allocator.free(1)
    allocator.release_cached()
    assert mapped(allocator) == [40, 60, 20, -60]
    assert [block.size_bytes for block in allocator.free_blocks()] == [10 * MIB, 10 * MIB]
    assert allocator.driver.reserved_bytes == 60 * MIB


def test_a_gap_is_filled_before_the_segment_grows():
    """find_expandable_block: the lowest address where free and unmapped blocks in a row have room."""
    allocator = filled(30, 70, 10)
    low = allocator.driver.calls[0].address
    allocator.free(1)
    allocator.release_cached()
    assert allocator.malloc("gap", 65 * MIB).address == low + 30 * MIB
    assert mapped(allocator)[-1] == 60
    assert allocator.driver.reserved_bytes == 120 * MIB


def test_a_gap_that_is_too_small_is_passed_over():
    """find_expandable_block: has_available_address_space fails, so the end of the segment grows."""
    allocator = filled(20, 40, 20)
    low = allocator.driver.calls[0].address
    allocator.free(1)
    allocator.release_cached()
    assert allocator.malloc("larger", 60 * MIB).address == low + 80 * MIB


def test_a_fully_unmapped_segment_disappears():
    """release_blocks: release_expandable_segment when nothing else is left of it."""
    allocator = filled(1, 30)
    allocator.free(0)
    allocator.free(1)
    allocator.release_cached()
    assert (allocator.driver.reserved_bytes, allocator.driver.segments) == (0, 0)
    allocator.malloc("again", 30 * MIB)
    assert allocator.driver.segments == 1


def test_each_stream_has_its_own_segment():
    """find_expandable_block looks at the unmapped blocks of the stream."""
    allocator = CachingAllocator(EXPANDABLE)
    allocator.malloc("a", 10 * MIB, stream=0)
    allocator.malloc("b", 10 * MIB, stream=1)
    assert (mapped(allocator), allocator.driver.segments) == ([20, 20], 2)


def test_the_retry_unmaps_free_pages():
    """malloc with release_cached_blocks: pages of one pool serve the other after a retry."""
    allocator = filled(30, 40, capacity_bytes=80 * MIB)
    allocator.free(1)
    allocator.malloc("small", MIB)
    assert allocator.retries == 1
    assert mapped(allocator) == [40, 40, -40, 2]


def test_a_page_is_mapped_whole_or_not_at_all():
    """ExpandableSegment::map: when cuMemCreate fails, the pages made for that call are released."""
    allocator = filled(30, capacity_bytes=50 * MIB)
    with pytest.raises(AllocationError) as caught:
        allocator.malloc("more", 15 * MIB)
    assert caught.value.out_of_memory.reserved_bytes == 40 * MIB
    assert caught.value.out_of_memory.unusable_bytes == 10 * MIB


def test_the_address_space_is_nine_eighths_of_the_card():
    """ExpandableSegment: after unmapping at the low end there is still room to map at the high end."""
    allocator = filled(40, 40, capacity_bytes=160 * MIB)
    start = allocator.driver.calls[0].address
    allocator.free(0)
    block = allocator.malloc("tail", 100 * MIB)
    assert block.address == start + 80 * MIB
    assert allocator.driver.segments == 1
    allocator.free(1)
    assert allocator.malloc("second", 60 * MIB).address == start
    assert allocator.driver.segments == 1


def test_expandable_segments_avoid_the_fragmentation_of_native_ones():
    """Note [Expandable Segments]: a batch one larger than before need not get all new segments."""
    events = []
    for step, size in enumerate((40, 42, 44, 46)):
        events += [(1, (step, layer), size * MIB) for layer in range(10)]
        events += [(-1, (step, layer), size * MIB) for layer in range(10)]
    native, expandable = (replay(events, AllocatorSettings(expandable_segments=on)) for on in (False, True))
    assert native.reserved_peak_bytes == (40 + 42 + 44 + 46) * 10 * MIB
    assert expandable.reserved_peak_bytes == 460 * MIB
