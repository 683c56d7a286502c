"""What this process takes of a CUDA device outside torch's allocator: context, kernels and libraries."""

from __future__ import annotations

import os

import torch

from memplan.host.nvidia_driver import nvidia_smi_rows
from memplan.units import MIB


def used_bytes() -> int:
    """Return what is taken of the first device, in whole MiB; before a context is made that is others' memory."""
    rows = _numbers("--query-gpu=memory.used")
    return rows[0][0] * MIB if rows else 0


def context_bytes(others: int) -> int:
    """Return what this process takes beyond the allocator's segments.

    The driver lists memory by process. Where it does not (another container, or Windows), all that
    is taken of the device counts, less what was taken before.

    Args:
        others: What ``used_bytes`` said before this process had a context.
    """
    segments = torch.cuda.memory_reserved()
    own = [size * MIB for process, size in _numbers("--query-compute-apps=pid,used_memory") if process == os.getpid()]
    free, total = torch.cuda.mem_get_info()
    return max(0, (own[0] if own else total - free - others) - segments)


def _numbers(query: str) -> list[tuple[int, ...]]:
    """Return the rows of numbers that the driver answers; those with something else are left out."""
    return [tuple(map(int, row)) for row in nvidia_smi_rows(query) or () if all(part.isdigit() for part in row)]
