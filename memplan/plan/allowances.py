"""What no formula over tensors can see: library workspaces, the allocator, the CUDA context.

Each is a named line of its own in every answer, with its source; none is hidden in another.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

from memplan.catalog.entries import Gpu
from memplan.catalog.shipped_tables import ReserveShare
from memplan.units import MIB

CUBLAS_BYTES_BEFORE_HOPPER = 8_519_680
CUBLAS_BYTES_FROM_HOPPER = 32 * MIB
CUBLAS_HANDLES = 2
CUBLAS_SOURCE = (
    "aten/src/ATen/cuda/CublasHandlePool.cpp (v2.13.0): one workspace per handle and stream, 32 MiB from compute "
    "capability 9.0 on, else 8.125 MiB; forward and backward run on two threads with a handle each"
)

RESERVE_SOURCE = (
    "simulated CUDA caching allocator on 192 traced steps of six models (configs/evidence/allocator-reserve.json): the "
    "smallest reserve with which each still runs, median, and 95th percentile at the upper end; with memory to spare the "
    "allocator reserves more, and releases it under pressure"
)

CONTEXT_BYTES_FROM_HOPPER = 780_140_544
CONTEXT_BYTES_BEFORE_HOPPER = 500_000_000
CONTEXT_UPPER_BYTES = 853_540_864
CONTEXT_SOURCE = (
    "CUDA context with the kernels that a step loads: from compute capability 9.0 on 780,140,544 bytes, 853,540,864 at the "
    "upper end with a second stream, as measured on an H200 (tests/records/cuda, driver 580, torch 2.11); before, about 300 MB "
    "(github.com/pytorch/pytorch/issues/107667) to 723 MiB (discuss.pytorch.org/t/73021)"
)

NCCL_EXPECTED_BYTES = {2: 544 * MIB}
NCCL_EXPECTED_BYTES_BEYOND = 688 * MIB
NCCL_UPPER_BYTES = 1_600_000_000
NCCL_SOURCE = (
    "one NCCL communicator, on 4 A100 with NVLink: 544 MiB between 2 GPUs, 688 MiB between more "
    "(github.com/NVIDIA/nccl/issues/964); at the upper end 1.6 GB (github.com/NVIDIA/nccl/issues/864)"
)


@dataclass(frozen=True, slots=True)
class Allowances:
    """Allowances for one or several devices.

    Attributes:
        library_bytes: Workspaces that libraries hold in the allocator's memory.
        reserve_fraction: Share of the allocated bytes that the allocator holds besides.
        upper_reserve_fraction: The same at the upper end.
        context_bytes: Memory outside the allocator.
        upper_context_bytes: The same at the upper end.
        measured_on: Card whose own figures workspaces and context are, or nothing.
        nccl_bytes: NCCL's buffers, which ``context_bytes`` includes.
        stream_bytes: Buffers kept for the streams of collectives, which ``upper_context_bytes`` includes.
    """

    library_bytes: int
    reserve_fraction: Fraction
    upper_reserve_fraction: Fraction
    context_bytes: int
    upper_context_bytes: int
    measured_on: str = ""
    nccl_bytes: int = 0
    stream_bytes: int = 0

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
        share = self.upper_reserve_fraction
        return allocated_bytes + allocated_bytes * share.numerator // share.denominator + self.upper_context_bytes


@dataclass(frozen=True, slots=True)
class MachineProfile:
    """What ``memplan validate --calibrate`` found on one card, for plans instead of the shipped allowances.

    Attributes:
        device: The card.
        torch_version: Version of torch that ran there.
        library_bytes: Workspaces of libraries in the allocator's memory.
        context_bytes: Memory outside the allocator, median of the records.
        upper_context_bytes: The same, largest of the records.
    """

    device: str
    torch_version: str
    library_bytes: int
    context_bytes: int
    upper_context_bytes: int


def measured_allowances(allowances: Allowances, profile: MachineProfile, count: int = 1) -> Allowances:
    """Return allowances with a card's own figures for workspaces and context."""
    return replace(
        allowances,
        library_bytes=profile.library_bytes * count,
        context_bytes=profile.context_bytes * count,
        upper_context_bytes=profile.upper_context_bytes * count,
        measured_on=f"{profile.device}, torch {profile.torch_version}",
    )


def communicating(allowances: Allowances, ranks: int, stream_bytes: int) -> Allowances:
    """Return the allowances of one of several GPUs that communicate through NCCL.

    Args:
        allowances: Those of the GPU alone.
        ranks: How many GPUs there are.
        stream_bytes: Buffers of collectives that no other stream can use.
    """
    expected = NCCL_EXPECTED_BYTES.get(ranks, NCCL_EXPECTED_BYTES_BEYOND)
    return replace(
        allowances,
        context_bytes=allowances.context_bytes + expected,
        upper_context_bytes=allowances.upper_context_bytes + NCCL_UPPER_BYTES + stream_bytes,
        nccl_bytes=expected,
        stream_bytes=stream_bytes,
    )


def allowances_for(gpu: Gpu, count: int, share: ReserveShare) -> Allowances:
    """Return the allowances for ``count`` devices of a kind.

    Args:
        gpu: The kind of device.
        count: How many there are.
        share: What the allocator needs besides.
    """
    return Allowances(
        library_bytes=library_workspace_bytes(gpu) * count,
        reserve_fraction=Fraction(share.expected_per_mille, 1000),
        upper_reserve_fraction=Fraction(share.upper_per_mille, 1000),
        context_bytes=context_bytes(gpu) * count,
        upper_context_bytes=CONTEXT_UPPER_BYTES * count,
    )


def library_workspace_bytes(gpu: Gpu) -> int:
    """Return the bytes of cuBLAS workspaces of a training process on one device.

    Cards without a compute capability (AMD, Apple, ``--gpu-memory``) are given the larger figure.
    """
    return CUBLAS_HANDLES * (CUBLAS_BYTES_FROM_HOPPER if _from_hopper(gpu) else CUBLAS_BYTES_BEFORE_HOPPER)


def context_bytes(gpu: Gpu) -> int:
    """Return the bytes of a CUDA context that a training process is expected to have on one device.

    Cards without a compute capability are given the larger figure.
    """
    return CONTEXT_BYTES_FROM_HOPPER if _from_hopper(gpu) else CONTEXT_BYTES_BEFORE_HOPPER


def _from_hopper(gpu: Gpu) -> bool:
    return not gpu.compute_capability or int(gpu.compute_capability.split(".")[0]) >= 9
