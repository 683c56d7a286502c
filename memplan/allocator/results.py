"""The result of a simulated run of the caching allocator: its peaks, or why it failed."""

from memplan.documents.frozen_values import dataclass
from memplan.errors import MemplanError
from memplan.units import format_bytes


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """Why a request failed, after everything cached that could be released was released."""

    requested_bytes: int  # What the program requested
    block_bytes: int  # The same, rounded up to a block
    segment_bytes: int  # What the allocator requested from the driver
    free_bytes: int  # Left on the card
    allocated_bytes: int  # In blocks in use
    reserved_bytes: int  # In segments of the allocator
    largest_free_block_bytes: int  # Largest cached block, too small or on another stream

    @property
    def unusable_bytes(self) -> int:
        """Reserved but of no use for this request: the fragmentation."""
        return self.reserved_bytes - self.allocated_bytes

    def __str__(self) -> str:
        return (
            f"out of memory: tried to allocate {format_bytes(self.segment_bytes)} for {self.requested_bytes} bytes; "
            f"{format_bytes(self.free_bytes)} free, {format_bytes(self.allocated_bytes)} allocated, "
            f"{format_bytes(self.unusable_bytes)} reserved but unusable"
        )


class AllocationError(MemplanError):
    """A request that the simulated card cannot hold; exit code 1, as for a plan that does not fit."""

    exit_code = 1

    def __init__(self, out_of_memory: OutOfMemory) -> None:
        self.out_of_memory = out_of_memory
        super().__init__(str(out_of_memory))


@dataclass(frozen=True, slots=True)
class AllocatorResult:
    """The peaks of a stream of allocations."""

    requested_peak_bytes: int  # Most bytes requested and not yet freed
    allocated_peak_bytes: int  # Most bytes in blocks, as ``torch.cuda.max_memory_allocated`` counts
    reserved_peak_bytes: int  # Most bytes in segments, as ``torch.cuda.max_memory_reserved`` counts
    segments: int  # Most segments held at once; an expandable one counts once, however large
    retries: int  # Times that all cached segments were released to satisfy a request
    survives: bool  # Whether every request was satisfied
    oom: OutOfMemory | None  # The request that was not, or None; the peaks are those up to it
