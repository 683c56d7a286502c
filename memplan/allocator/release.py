"""How the caching allocator gives cached memory back: all of it, the oversize, or the oldest."""

from fractions import Fraction

from memplan.allocator.pools import Pool
from memplan.allocator.segments import Driver
from memplan.allocator.settings import AllocatorSettings


def release_unsplit(pool: Pool, driver: Driver) -> None:
    """Give back every segment that is one free block, and every whole page of a free expandable one.

    Source:
        release_blocks in c10/cuda/CUDACachingAllocator.cpp.
    """
    for block in pool.free_blocks():
        if block.virtual is not None:
            driver.unmap(block)
        elif not block.is_split():
            driver.free_segment(block)


def release_oversize(pool: Pool, driver: Driver, settings: AllocatorSettings, size_bytes: int, stream: int) -> bool:
    """Give back blocks of ``max_split_bytes`` or more; True when that may be enough for a request.

    The smallest one that is large enough by itself; else the largest ones until they are together.

    Source:
        release_available_cached_blocks in c10/cuda/CUDACachingAllocator.cpp.
    """
    if settings.max_split_bytes is None:
        return False
    least_bytes = settings.max_split_bytes
    wanted_bytes = max(size_bytes, least_bytes)
    oversize = [b for b in pool.free_blocks() if b.stream == stream and b.size_bytes >= least_bytes]
    fitting = [block for block in oversize if block.size_bytes >= wanted_bytes]
    if fitting and fitting[0].virtual is None:
        driver.free_segment(fitting[0])
        return True
    released_bytes = 0
    for block in reversed(oversize[: len(oversize) - len(fitting)]):
        if released_bytes < wanted_bytes and block.virtual is None:
            released_bytes += block.size_bytes
            driver.free_segment(block)
    return released_bytes >= wanted_bytes


def collect_garbage(pool: Pool, driver: Driver, settings: AllocatorSettings, allowed_bytes: int) -> None:
    """Give back unsplit blocks of average age or more, until reserved is below the threshold.

    A block's age is the number of searches in its pool since it became free. A round does not stop
    when enough is released, so that the next one comes late.

    Source:
        garbage_collect_cached_blocks in c10/cuda/CUDACachingAllocator.cpp.
    """
    excess_bytes = driver.reserved_bytes - int(settings.garbage_collection_threshold * allowed_bytes)
    ages = {block: pool.searches - block.free_since for block in pool.free_blocks() if not block.is_split()}
    while excess_bytes > 0 and ages:
        average = Fraction(sum(ages.values()), len(ages))
        for block in [block for block, age in ages.items() if age >= average]:
            excess_bytes -= block.size_bytes
            driver.free_segment(block)
            del ages[block]
