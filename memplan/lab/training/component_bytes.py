"""Bytes of a model in training: as planned, and as measured on the tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memplan.lab.training.optimizer_groups import state_tensors
from memplan.lab.training.trained_model import TrainedModel
from memplan.model.model import Model
from memplan.muon import Muon
from memplan.step.states.model_states import model_states
from memplan.training.resolved import TrainingSetup

if TYPE_CHECKING:
    from torch import Tensor


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
        "weights": storage_bytes(weight.tensor for weight in model.weights),
        "gradients": storage_bytes(_gradients(optimizer)),
        "optimizer_states": storage_bytes(state_tensors(optimizer)),
    }


def comparisons(planned: dict[str, int], measured: dict[str, int]) -> tuple[Comparison, ...]:
    """Return one comparison for each component."""
    return tuple(Comparison(name, size, measured[name]) for name, size in planned.items())


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of distinct storages."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def _gradients(optimizer: Muon) -> Iterable[Tensor]:
    for handle, _ in optimizer.handles():
        tensors = (handle.key.grad, getattr(handle.store, "codes", None), getattr(handle.store, "scale", None))
        yield from (tensor for tensor in tensors if tensor is not None)
