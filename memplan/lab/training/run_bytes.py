"""Bytes of a model in training: as planned, as measured on the tensors, and within a limit on a GPU."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memplan.errors import CannotAnswerError
from memplan.lab.training.optimizer_groups import state_tensors
from memplan.lab.training.trained_model import TrainedModel
from memplan.measure.measure_cuda import context_bytes, used_bytes
from memplan.measure.storage_bytes import distinct_bytes
from memplan.model.model import Model
from memplan.muon import Muon
from memplan.plan.memory_plan import MemoryPlan
from memplan.step.states.model_states import model_states
from memplan.training.resolved import TrainingSetup

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


@dataclass(frozen=True, slots=True)
class Comparison:
    """One component: bytes by the planner's formulas, and bytes of distinct storages."""

    component: str
    predicted_bytes: int
    measured_bytes: int

    @property
    def equal(self) -> bool:
        """Whether they agree to the byte."""
        return self.predicted_bytes == self.measured_bytes


def planned_bytes(model: Model, setup: TrainingSetup) -> dict[str, int]:
    """Return the planned bytes of each component; step counters, which are on the host, count as states."""
    states = model_states(setup, model.inventory, ())
    whole_step = setup.config.gradients.lifetime == "step"
    return {
        "weights": states.weight_bytes,
        "gradients": states.gradient_bytes if whole_step else 0,
        "optimizer_states": states.state_bytes + states.host_bytes,
    }


def measured_bytes(model: TrainedModel, optimizer: Muon) -> dict[str, int]:
    """Return the bytes of each component, between backward and step."""
    return {
        "weights": distinct_bytes(weight.tensor for weight in model.weights),
        "gradients": distinct_bytes(_gradients(optimizer)),
        "optimizer_states": distinct_bytes(state_tensors(optimizer)),
    }


def comparisons(planned: dict[str, int], measured: dict[str, int]) -> tuple[Comparison, ...]:
    """Return one comparison for each component."""
    return tuple(Comparison(name, size, measured[name]) for name, size in planned.items())


def _gradients(optimizer: Muon) -> Iterable[Tensor]:
    for handle, _ in optimizer.handles():
        tensors = (handle.key.grad, getattr(handle.store, "codes", None), getattr(handle.store, "scale", None))
        yield from (tensor for tensor in tensors if tensor is not None)
