"""Inverse questions: the largest model for a GPU, and the fewest GPUs for a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from memplan.errors import CannotAnswerError, MemplanError
from memplan.model.inventory import parameter_count
from memplan.model.model import Model
from memplan.planner import CompiledPlan, Device, allowances_of, bytes_per_parameter, devices_for
from memplan.setup import TrainingSetup
from memplan.training.config import MAXIMUM_GPUS


@dataclass(frozen=True, slots=True)
class LargestModel:
    """The largest model for one device, as a bound and as a real one.

    Attributes:
        bytes_per_parameter: Uniform figure of the config.
        max_parameters: Usable bytes over that figure: an upper bound that leaves out activations,
            embeddings in other formats, the allocator and the CUDA context.
        largest_fitting: Name of the largest catalog model that FITS, or None.
        largest_fitting_parameters: Its parameters, or 0.
    """

    device: Device
    setup: TrainingSetup
    bytes_per_parameter: Fraction
    max_parameters: int
    largest_fitting: str | None
    largest_fitting_parameters: int


def max_parameters(setup: TrainingSetup, device: Device) -> int:
    """Return the most parameters whose states alone fill the device's usable bytes.

    Formula:
        ``floor(usable_bytes / bytes_per_parameter)``
    """
    return int(device.usable_bytes(setup.reserve_bytes) / bytes_per_parameter(setup).total)


def upper_bytes(plan: CompiledPlan, device: Device, requested: int) -> int:
    """Return the upper end of the device total, given the requested peak."""
    allowances = allowances_of(plan.setup, device, plan.forms.stream_bytes)
    allocated = requested + plan.rounding_bytes + allowances.library_bytes
    return allocated + allowances.upper_reserve_bytes(allocated) + allowances.upper_context_bytes


def largest_models(
    models: Sequence[tuple[str, Model]], setup: TrainingSetup, devices: Sequence[Device]
) -> list[LargestModel]:
    """Return the largest of ``models`` for each device, planned at the setup's batch and length.

    Args:
        models: Catalog names and models.
        setup: The training setup.
        devices: Devices, each possibly several GPUs whose memory is pooled.
    """
    compiled = _compiled(models, setup)
    figure = bytes_per_parameter(setup).total
    rows = []
    for device in devices_for(setup, devices):
        usable = device.usable_bytes(setup.reserve_bytes)
        name, count = next(
            (
                (name, count)
                for name, count, plan, requested in compiled
                if upper_bytes(plan, device, requested) <= usable
            ),
            (None, 0),
        )
        rows.append(LargestModel(device, setup, figure, max_parameters(setup, device), name, count))
    return rows


def _compiled(models: Sequence[tuple[str, Model]], setup: TrainingSetup) -> list[tuple[str, int, CompiledPlan, int]]:
    """Return (name, parameters, plan, requested peak) of every model that can be planned, largest first."""
    found = []
    for name, model in models:
        try:
            plan = CompiledPlan(model, setup)
            requested = plan.requested_bytes(setup.config.micro_batch_size, setup.config.sequence_length)
        except MemplanError:
            continue
        found.append((name, parameter_count(model.inventory), plan, requested))
    return sorted(found, key=lambda item: (-item[1], item[0]))


def fewest_devices(plan: CompiledPlan, device: Device) -> int | None:
    """Return the fewest GPUs of a kind whose pooled memory holds a job, or None if no number does.

    The answer fits, and one GPU fewer does not: what is usable grows by the same amount with each
    GPU and so does what each costs, so that fitting is monotonic in their number.
    """
    setup = plan.setup
    if setup.config.parallel.data > 1:
        raise CannotAnswerError("parallel.data: how many GPUs it takes is the question here; leave it out")
    requested = plan.requested_bytes(setup.config.micro_batch_size, setup.config.sequence_length)

    def fits(count: int) -> bool:
        several = Device(device.gpu, device.name, count)
        return upper_bytes(plan, several, requested) <= several.usable_bytes(setup.reserve_bytes)

    high = 1
    while not fits(high):
        high *= 2
        if high > MAXIMUM_GPUS:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high
