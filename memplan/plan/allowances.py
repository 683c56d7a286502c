"""What no formula over tensors can see: library workspaces, the allocator, the CUDA context.

Each is a named line of its own in every answer, with its source; none is hidden in another.
"""

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from memplan.catalog.config_keys.parallel_keys import Parallel
from memplan.catalog.entries import Gpu
from memplan.catalog.hardware.contexts import context_range
from memplan.catalog.hardware.hardware_tables import Communicator, HardwareTables, entry_name
from memplan.catalog.shipped_tables import ReserveShare
from memplan.documents.frozen_values import dataclass

HANDLES = 2
"""Handles of cuBLAS in a training process: forward and backward run on two threads with a handle each."""

RESERVE_SOURCE = (
    "simulated CUDA caching allocator on 192 traced steps of six models (configs/evidence/allocator-reserve.json): the "
    "smallest reserve with which each still runs, median, and 95th percentile at the upper end; with memory to spare the "
    "allocator reserves more, and releases it under pressure"
)

SIMULATED_SOURCE = (
    "every allocation of the first three steps, in order, through the simulated CUDA caching allocator "
    "(c10/cuda/CUDACachingAllocator.cpp, v2.13.0), with memory to spare"
)


@dataclass(frozen=True, slots=True)
class Allowances:
    """Allowances for one or several devices."""

    library_bytes: int  # Workspaces that libraries hold in the allocator's memory
    reserve_fraction: Fraction  # Share of the allocated bytes that the allocator holds besides
    upper_reserve_fraction: Fraction  # The same at the upper end
    context_bytes: int  # Memory outside the allocator
    upper_context_bytes: int  # The same at the upper end
    least_context_bytes: int = 0  # The same at the lower end
    library_source: str = ""  # Where ``library_bytes`` was read
    context_source: str = ""  # What ``context_bytes`` rests on
    measured_on: str = ""  # Card whose own figures workspaces and context are, or nothing
    nccl_bytes: int = 0  # NCCL's buffers, which ``context_bytes`` includes
    upper_nccl_bytes: int = 0  # The same at the upper end, which ``upper_context_bytes`` includes
    nccl_source: str = ""  # Where they were measured
    stream_bytes: int = 0  # Buffers kept for the streams of collectives, which ``upper_context_bytes`` includes
    # What an engine that generates on the same device takes at the peak, which all contexts include.
    engine_bytes: int = 0

    def reserve_bytes(self, allocated_bytes: int) -> int:
        """Return the memory that the allocator is expected to hold beyond what it has handed out."""
        return allocated_bytes * self.reserve_fraction.numerator // self.reserve_fraction.denominator

    def allocated_bytes(self, requested_bytes: int, rounding_bytes: int) -> int:
        """Return what the allocator has handed out: requested bytes, block rounding, and libraries' workspaces."""
        return requested_bytes + rounding_bytes + self.library_bytes

    def device_bytes(self, allocated_bytes: int) -> int:
        """Return what nvidia-smi is expected to show."""
        return allocated_bytes + self.reserve_bytes(allocated_bytes) + self.context_bytes

    def upper_bytes(self, allocated_bytes: int) -> int:
        """Return the upper end of the interval around it.

        Formula:
            ``allocated + floor(allocated * upper_reserve_fraction) + upper_context``
        """
        return self.upper_reserved_bytes(allocated_bytes) + self.upper_context_bytes

    def upper_reserved_bytes(self, allocated_bytes: int) -> int:
        """Return what the allocator holds at that end for so many bytes that it has handed out."""
        share = self.upper_reserve_fraction
        return allocated_bytes + allocated_bytes * share.numerator // share.denominator


@dataclass(frozen=True, slots=True)
class MachineProfile:
    """What ``memplan validate --calibrate`` found on one card, for plans instead of the shipped allowances."""

    device: str
    torch_version: str  # Version of torch that ran there
    library_bytes: int  # Workspaces of libraries in the allocator's memory
    context_bytes: int  # Memory outside the allocator, median of the records
    upper_context_bytes: int  # The same, largest of the records


def measured_allowances(allowances: Allowances, profile: MachineProfile, count: int = 1) -> Allowances:
    """Return allowances with a card's own figures for workspaces and context."""
    return replace(
        allowances,
        library_bytes=profile.library_bytes * count,
        context_bytes=profile.context_bytes * count,
        upper_context_bytes=profile.upper_context_bytes * count,
        least_context_bytes=profile.context_bytes * count,
        measured_on=f"{profile.device}, torch {profile.torch_version}",
    )


def communicating(allowances: Allowances, stream_bytes: int, communicators: Sequence[Communicator]) -> Allowances:
    """Return the allowances of one of several GPUs that communicate.

    Args:
        stream_bytes: Buffers of collectives that no other stream can use.
        communicators: What the library that they communicate through keeps on each, one for each group of GPUs.
    """
    expected, most = (sum(getattr(one, name) for one in communicators) for name in ("expected_bytes", "most_bytes"))
    communicator = communicators[0]
    return replace(
        allowances,
        context_bytes=allowances.context_bytes + expected,
        upper_context_bytes=allowances.upper_context_bytes + most + stream_bytes,
        least_context_bytes=allowances.least_context_bytes + expected,
        nccl_bytes=expected,
        upper_nccl_bytes=most,
        nccl_source=f"{communicator.note} ({', '.join(source.url for source in communicator.sources)})",
        stream_bytes=stream_bytes,
    )


def beside_engine(allowances: Allowances, engine_bytes: int) -> Allowances:
    """Return the allowances of a GPU on which an engine generates that has so many bytes at the peak."""
    return replace(
        allowances,
        context_bytes=allowances.context_bytes + engine_bytes,
        upper_context_bytes=allowances.upper_context_bytes + engine_bytes,
        least_context_bytes=allowances.least_context_bytes + engine_bytes,
        engine_bytes=engine_bytes,
    )


def allowances_for(gpu: Gpu, count: int, share: ReserveShare, tables: HardwareTables) -> Allowances:
    """Return the allowances for ``count`` devices of a kind.

    Args:
        share: What the allocator needs besides.
    """
    workspace = tables.workspaces[entry_name(gpu, tables.workspaces)]
    context = context_range(gpu, tables)
    return Allowances(
        library_bytes=library_workspace_bytes(gpu, tables) * count,
        reserve_fraction=Fraction(share.expected_per_mille, 1000),
        upper_reserve_fraction=Fraction(share.upper_per_mille, 1000),
        context_bytes=context.expected_bytes * count,
        upper_context_bytes=context.most_bytes * count,
        least_context_bytes=context.least_bytes * count,
        library_source=f"{workspace.source}; one workspace per handle and stream, two handles",
        context_source=context.source,
    )


def communicators_of(gpu: Gpu, parallel: Parallel, tables: HardwareTables) -> list[Communicator]:
    """Return what that library keeps for each group that a GPU is in."""
    return [communicator_of(gpu, ranks, tables) for ranks in parallel.groups]


def communicator_of(gpu: Gpu, ranks: int, tables: HardwareTables) -> Communicator:
    """Return what the library that GPUs of a kind communicate through keeps on each of them."""
    vendor = gpu.vendor if gpu.vendor in tables.communicators else "nvidia"
    exact = f"{vendor}-{ranks}-ranks"
    return tables.communicators[exact if exact in tables.communicators else vendor]


def library_workspace_bytes(gpu: Gpu, tables: HardwareTables) -> int:
    """Return the bytes of the workspaces of matrix products that a training process has on one device."""
    return HANDLES * tables.workspaces[entry_name(gpu, tables.workspaces)].handle_bytes


def engine_workspace_bytes(gpu: Gpu, tables: HardwareTables) -> int:
    """Return the bytes of one workspace of Transformer Engine's products on one device."""
    return tables.workspaces[entry_name(gpu, tables.workspaces)].engine_bytes
