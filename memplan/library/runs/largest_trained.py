"""Which model is trained where a GPU is to be filled: one that is named, or the largest that is planned to fit."""

from collections.abc import Iterable

from memplan.catalog.catalog import Catalog
from memplan.documents.frozen_values import dataclass
from memplan.errors import CannotAnswerError, MemplanError
from memplan.library.lookup import Overrides, Shapes, find_model, find_setup
from memplan.model.inventory import parameter_count
from memplan.model.model import Model
from memplan.plan.memory_plan import Device, MemoryPlan
from memplan.plan.planner import CompiledPlan
from memplan.plan.reserve.simulation import simulated
from memplan.training.resolved import TrainingSetup
from memplan.training.stack_models import text_model

CPU_PARAMETERS = 1_000_000_000
"""Parameters beyond which a step on a CPU takes hours."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model under a config, planned for so much memory."""

    model: Model
    setup: TrainingSetup
    plan: MemoryPlan
    capacity_bytes: int  # All that the process may take

    @property
    def parameters(self) -> int:
        """Parameters of the model, all of which are trained."""
        return parameter_count(self.model.inventory)


def planned_candidate(model: Model, setup: TrainingSetup, device: Device) -> Candidate:
    """Return a model that was named, with its plan; whether it fits is what the run shows."""
    plan = simulated(CompiledPlan(model, setup).evaluate(device))
    return Candidate(model, setup, plan, device.memory_bytes)


def largest_candidate(
    names: Iterable[str], config: str, overrides: Overrides, device: Device, catalog: Catalog
) -> Candidate:
    """Return the model, of those that the catalog has by these names, with most parameters that is planned to fit.

    Raises:
        CannotAnswerError: None of them fits.
        MemplanError: What the smallest is refused for, where all are refused.
    """
    models = [text_model(find_model(name, Shapes(), catalog)) for name in names]
    refusals: list[MemplanError] = []
    for model in sorted(models, key=lambda model: -parameter_count(model.inventory)):
        try:
            setup = find_setup(config, overrides, catalog, model)
            plan = CompiledPlan(model, setup).evaluate(device)
            if plan.verdict == "no" or simulated(plan).verdict != "fits":
                continue
        except MemplanError as error:  # a model that is not modelled with this config, or has fewer positions
            refusals.append(error)
            continue
        if all(len(tensor.shape) <= 2 for tensor in model.inventory):  # the lab trains no stacks of experts
            return planned_candidate(model, setup, device)
    if len(refusals) == len(models):
        raise refusals[-1]
    raise CannotAnswerError(f"no model of the catalog fits {device.name} with {config} (memplan list models)")
