"""Rules of the native CUDA caching allocator, each in words and with the function that has it.

Functions are those of c10/cuda/CUDACachingAllocator.cpp; constants stand in c10/core/AllocatorConfig.h.
"""

import pytest

from memplan.allocator.caching_allocator import CachingAllocator
from memplan.allocator.settings import AllocatorSettings, parse_alloc_conf
from memplan.units import GIB, KIB, MIB


def segment(block):
    """The blocks of a segment: bytes, and whether allocated."""
    while block.previous is not None:
        block = block.previous
    blocks = []
    while block is not None:
        blocks.append((block.size_bytes, block.allocated))
        block = block.following
    return blocks


def filled(*sizes, settings=None, capacity_bytes=None):
    """An allocator that served requests 0, 1, 2, ... of these MiB."""
    allocator = CachingAllocator(settings, capacity_bytes)
    for key, size in enumerate(sizes):
        allocator.malloc(key, size * MIB)
    return allocator


@pytest.mark.parametrize(
    ("requested", "rounded"),
    [(1, 512), (511, 512), (512, 512), (513, 1024), (MIB, MIB), (MIB + 1, MIB + 512), (GIB - 1, GIB)],
)
def test_sizes_are_whole_512_bytes(requested, rounded):
    """round_size: at least kMinBlockSize, and a multiple of it."""
    assert AllocatorSettings().rounded_bytes(requested) == rounded


@pytest.mark.parametrize(
    ("divisions", "requested", "rounded"),
    [
        (4, 1200, 1536),  # not above 512 * 4 bytes: whole 512 bytes
        (4, 2048, 2048),
        (4, 1200 * KIB, 1280 * KIB),  # the comment of roundup_power2_next_division, in KiB
        (4, 1281 * KIB, 1536 * KIB),
        (4, 1800 * KIB, 2 * MIB),
        (4, MIB, MIB),
        (8, 9 * MIB + 1, 10 * MIB),
        (1, 1200 * KIB + 1, 1200 * KIB + 512),  # one division rounds nothing
        (0, 1200 * KIB + 1, 1200 * KIB + 512),
    ],
)
def test_power_of_two_divisions(divisions, requested, rounded):
    """roundup_power2_next_division: the steps between two powers of two, for sizes above 512 bytes each."""
    settings = AllocatorSettings(roundup_power2_divisions=(divisions,) * 16)
    assert settings.rounded_bytes(requested) == rounded


@pytest.mark.parametrize(
    ("size", "divisions"), [(4 * KIB, 1), (MIB, 1), (2 * MIB, 2), (4 * MIB, 3), (64 * GIB, 16), (900 * GIB, 16)]
)
def test_the_divisions_depend_on_the_power_of_two_below_the_size(size, divisions):
    """roundup_power2_divisions(size): 16 intervals from 1 MiB to 64 GiB, clamped at both ends."""
    settings = AllocatorSettings(roundup_power2_divisions=tuple(2**power for power in range(16)))
    requested = size + size // 2**20 + 512
    step = (1 << requested.bit_length() - 1) // 2 ** (divisions - 1) if divisions > 1 else 512
    assert settings.rounded_bytes(requested) == -(-requested // step) * step


@pytest.mark.parametrize(
    ("block", "taken"),
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB),
        (12 * MIB + 512, 14 * MIB),
    ],
)
def test_segment_sizes(block, taken):
    """get_allocation_size: 2 MiB up to 1 MiB, 20 MiB below 10 MiB, else rounded up to 2 MiB."""
    assert AllocatorSettings().segment_bytes(block) == taken


def test_the_large_segment_size_is_a_setting():
    """get_allocation_size: large_segment_size replaces 20 MiB between 1 and 10 MiB, and only there."""
    settings = parse_alloc_conf("large_segment_size_mb:64")
    assert [settings.segment_bytes(n * MIB) // MIB for n in (1, 2, 9, 10, 30)] == [2, 64, 64, 10, 30]


def test_zero_bytes_take_nothing():
    """raw_alloc returns a null pointer for zero bytes, without a block; freeing it does nothing."""
    allocator = CachingAllocator()
    assert allocator.malloc("empty", 0) is None
    allocator.free("empty")
    assert (allocator.allocated_bytes, allocator.driver.reserved_bytes) == (0, 0)


def test_one_byte_above_one_mebibyte_is_a_large_block():
    """get_pool decides by the rounded size: kSmallSize, 1 MiB, is the largest small one."""
    allocator = CachingAllocator()
    assert allocator.malloc("small", MIB).pool is not allocator.malloc("large", MIB + 1).pool
    assert allocator.driver.reserved_bytes == 22 * MIB


def test_small_blocks_split_from_512_bytes_on():
    """should_split: in the small pool whenever 512 bytes remain."""
    block = CachingAllocator().malloc("a", 2 * MIB - 512 - MIB)
    assert segment(block) == [(MIB - 512, True), (MIB + 512, False)]
    allocator = CachingAllocator()
    allocator.malloc("a", MIB)
    assert segment(allocator.malloc("b", MIB - 512)) == [(MIB, True), (MIB - 512, True), (512, False)]


@pytest.mark.parametrize(("rest", "splits"), [(MIB, False), (MIB + 512, True)])
def test_large_blocks_split_only_when_more_than_one_mebibyte_remains(rest, splits):
    """should_split: in the large pool only for a remainder above kSmallSize."""
    allocator = filled(30)
    allocator.free(0)
    block = allocator.malloc("b", 30 * MIB - rest)
    assert len(segment(block)) == 1 + splits
    assert allocator.allocated_bytes == (30 * MIB - rest if splits else 30 * MIB)


def test_allocated_counts_whole_blocks_and_requested_what_was_asked_for():
    """alloc_found_block: allocated_bytes grows by block->size, requested_bytes by orig_size."""
    allocator = CachingAllocator()
    allocator.malloc("a", 11 * MIB + 1)
    assert (allocator.requested_bytes, allocator.allocated_bytes) == (11 * MIB + 1, 12 * MIB)
    allocator.free("a")
    assert (allocator.requested_bytes, allocator.allocated_bytes) == (0, 0)
    assert (allocator.requested_peak_bytes, allocator.allocated_peak_bytes) == (11 * MIB + 1, 12 * MIB)


def test_requests_from_one_to_ten_mebibytes_share_a_segment():
    """get_allocation_size with alloc_found_block: a 20 MiB segment is cut up from its low end."""
    allocator = filled(3, 9, 7)
    assert allocator.driver.reserved_bytes == 20 * MIB
    last = allocator.malloc("last", MIB + 512)
    assert allocator.driver.reserved_bytes == 40 * MIB
    assert segment(last) == [(MIB + 512, True), (19 * MIB - 512, False)]


def test_best_fit_is_the_smallest_and_then_the_lowest():
    """BlockComparatorSize: free blocks are ordered by stream, size and address."""
    allocator = filled(40, 12, 14, 12)
    low = allocator.driver.calls[3].address  # of the last segment: each lies below those before
    for key in (3, 2, 1, 0):
        allocator.free(key)
    assert allocator.malloc("lowest", 12 * MIB).address == low
    assert allocator.malloc("smallest", 13 * MIB).size_bytes == 14 * MIB


def test_freed_neighbours_merge():
    """try_merge_blocks: with the free block before and the free block after, in one segment only."""
    allocator = filled(5, 5, 5, 5, 12)
    allocator.free(0)
    allocator.free(2)
    assert segment(allocator.malloc("probe", 2 * MIB)) == [
        (2 * MIB, True), (3 * MIB, False), (5 * MIB, True), (5 * MIB, False), (5 * MIB, True),
    ]  # fmt: skip
    allocator.free("probe")
    allocator.free(1)
    assert [block.size_bytes for block in allocator.free_blocks()] == [15 * MIB]
    allocator.free(3)
    allocator.free(4)
    assert [block.size_bytes for block in allocator.free_blocks()] == [12 * MIB, 20 * MIB]


def test_small_and_large_pools_do_not_help_each_other():
    """get_pool: a small request never takes a large free block."""
    allocator = filled(30)
    allocator.free(0)
    allocator.malloc("small", 512)
    assert allocator.driver.reserved_bytes == 32 * MIB


def test_a_block_serves_its_own_stream_only():
    """get_free_block: the block found must be of the stream of the request."""
    allocator = filled(30)
    allocator.free(0)
    allocator.malloc("other", 30 * MIB, stream=7)
    assert allocator.driver.reserved_bytes == 60 * MIB
    allocator.malloc("same", 30 * MIB)
    assert allocator.driver.reserved_bytes == 60 * MIB


def test_releasing_everything_empties_the_card():
    """emptyCache: unsplit free segments go back to the driver."""
    allocator = filled(1, 3, 3, 30)
    for key in range(4):
        allocator.free(key)
    allocator.release_cached()
    assert (allocator.driver.reserved_bytes, allocator.driver.segments, allocator.driver.segments_peak) == (0, 0, 3)


def test_a_published_block_list_is_reproduced():
    """https://discuss.pytorch.org/t/178671: the snapshot after y = X @ W + b, with the cuBLAS workspace.

    W is 1000 x 10, b 10 and X 1 x 1000 in fp32; the product is freed after the addition.
    """
    allocator = CachingAllocator()
    weight = allocator.malloc("W", 40_000)
    allocator.malloc("b", 40)
    allocator.malloc("X", 4_000)
    workspace = allocator.malloc("cublas", 8_519_680)
    allocator.malloc("X @ W", 40)
    allocator.malloc("y", 40)
    allocator.free("X @ W")
    assert segment(weight) == [
        (40_448, True), (512, True), (4_096, True), (512, False), (512, True), (2_051_072, False),
    ]  # fmt: skip
    assert segment(workspace) == [(8_519_680, True), (12_451_840, False)]
    assert allocator.allocated_bytes - 8_519_680 == 45_568
    assert allocator.driver.reserved_bytes == 2_097_152 + 20_971_520
