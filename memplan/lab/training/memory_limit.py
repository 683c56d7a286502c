"""A run limited to so many bytes of a GPU, and what it took of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from memplan.errors import CannotAnswerError
from memplan.measure.measure_cuda import context_bytes, used_bytes
from memplan.plan.memory_plan import MemoryPlan

PEAKS = {"requested": "requested_bytes.all.peak", "reserved": "reserved_bytes.all.peak"}


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """What a run may take of a device: the allocator refuses what is beyond it."""

    device: str  # ``cuda``; on ``cpu`` there is no limit, and no totals are read
    capacity_bytes: int  # All that the process may take of the device, its context included

    def begin(self) -> None:
        """Create the context, and leave the allocator what is left of the capacity."""
        if not self.on_gpu:
            return
        others = used_bytes()
        torch.zeros(1, device=self.device)
        total = torch.cuda.mem_get_info()[1]
        left = max(0, self.capacity_bytes - context_bytes(others))
        torch.cuda.set_per_process_memory_fraction(min(1.0, left / total))

    @property
    def on_gpu(self) -> bool:
        """Whether there is an allocator that can be limited and read."""
        return self.device.startswith("cuda")

    def forget(self) -> None:
        """Forget the peaks so far: the first step creates what stays."""
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()

    def peaks(self) -> dict[str, int]:
        """Return the allocator's peaks since they were last forgotten, by name; none on a CPU."""
        if not self.on_gpu:
            return {}
        statistics = torch.cuda.memory_stats()
        return {name: int(statistics[key]) for name, key in PEAKS.items()}


@contextmanager
def refused_if_out_of_memory(plan: MemoryPlan) -> Iterator[None]:
    """Raise ``CannotAnswerError``, which says what was planned, where the device's memory is spent."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise CannotAnswerError(f"out of memory in a run planned as {plan.verdict.upper()}: {error}") from error


def limit_record(limit: MemoryLimit, plan: MemoryPlan) -> dict[str, Any]:
    """Return what was planned beside what was taken; a total that no allocator counted is null."""
    peaks = limit.peaks()
    planned = {"requested": plan.requested_bytes, "reserved": plan.reserved_bytes}
    totals = {name: {"predicted_bytes": size, "measured_bytes": peaks.get(name)} for name, size in planned.items()}
    return {
        "capacity_bytes": limit.capacity_bytes,
        "expected_bytes": plan.device_bytes,
        "upper_bytes": plan.upper_bytes,
        "verdict": plan.verdict,
        **totals,
    }
