"""The fewest GPUs of each kind for a job, each as several of them really share it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

from memplan.documents.frozen_values import dataclass
from memplan.errors import CannotAnswerError, MemplanError
from memplan.model.model import Model
from memplan.plan.job_allowances import devices_for
from memplan.plan.memory_plan import Device, MemoryPlan
from memplan.plan.planner import CompiledPlan
from memplan.plan.sizes.largest_model import (
    able_devices,
    fewest_devices,
    first_that_fits,
    least_devices,
    refuse_parallel,
)
from memplan.training.resolved import TrainingSetup

MOST_RANKS = 2**12
"""GPUs that a job is shared out over, at most: what does not fit there is held up by what no rank shares."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The fewest GPUs of one kind for a job."""

    device: Device  # One of them
    count: int
    plan: MemoryPlan  # What one of them holds; where memory is pooled, what all of them hold together
    pooled: bool = False  # Whether ``count`` is only a lower bound, as memory is pooled and the job is not shared out
    # The fewest whose memory together is what its tensors take, which no way of sharing it undercuts; None where that is not known.
    bound: int | None = None

    @property
    def layout(self) -> str:
        """How the GPUs share each layer's matrices, in words that follow their name; nothing where they do not."""
        parallel = self.plan.setup.config.parallel
        return f", tp {parallel.tensor}{' +sp' if parallel.sequence else ''}" if parallel.tensor > 1 else ""


@dataclass(frozen=True, slots=True)
class Placements:
    """Where a job fits, by kind of GPU."""

    rows: tuple[Placement, ...]  # One for each kind that suffices
    refusal: str = ""  # Why the job is not planned on several GPUs, so that rows with more than one pool their memory
    most: int = MOST_RANKS  # GPUs of a kind that were tried, at most


def placements(
    model: Model,
    setups_of: Callable[[int], Sequence[TrainingSetup]],
    devices: Sequence[Device],
    simulated: Callable[[MemoryPlan], MemoryPlan],
    progress: Callable[[int, int], None] | None = None,
) -> Placements:
    """Return the fewest GPUs of each kind for a job, each row as ``fit`` plans it on so many.

    Each plan's reserve is simulated, where its events are told.

    Args:
        setups_of: The ways in which a number of GPUs may share the job, the first as ``memplan fit --gpus`` has it.
        devices: One GPU of each kind.
        simulated: Simulates the reserve of a plan.
        progress: Is told how many kinds are done, and of how many.

    Raises:
        MemplanError: The job is planned on one GPU no more than on several.
        CannotAnswerError: The config says itself how many GPUs it is for.
    """

    @cache
    def compiled(count: int) -> list[CompiledPlan]:
        return _planned(model, setups_of(count))

    alone: CompiledPlan | None = None
    try:
        alone = compiled(1)[0]
    except MemplanError:
        if _refusal(compiled):
            raise
    else:
        refuse_parallel(alone.setup)
    refusal = _refusal(compiled)
    first = alone or compiled(2)[0]
    rows, able = [], [*able_devices(first, devices_for(first.setup, devices))]
    told = progress or (lambda *_: None)
    for number, device in enumerate(able):
        told(number, len(able))
        if alone is not None and (plan := _alone(alone, device, simulated)) is not None:
            rows.append(Placement(device, 1, plan))
            continue
        row, refusal = _on_several(compiled, alone, device, simulated, refusal)
        rows += [] if row is None else [row]
    told(len(able), len(able))
    return Placements(tuple(rows), refusal)


def _on_several(
    compiled: Callable[[int], list[CompiledPlan]],
    alone: CompiledPlan | None,
    device: Device,
    simulated: Callable[[MemoryPlan], MemoryPlan],
    refusal: str,
) -> tuple[Placement | None, str]:
    """Return the fewest of several GPUs for a job, or a bound and why it is only that, which may show once a step is played."""
    row = None
    if not refusal:
        try:
            row = _fewest_ranks(compiled, device, simulated)
        except CannotAnswerError as error:
            if alone is None:
                raise
            refusal = str(error)
    if refusal and alone is not None and (count := fewest_devices(alone, device)) is not None:
        pooled = Device(device.gpu, device.name, max(2, count))
        return Placement(device, pooled.count, alone.evaluate(pooled), pooled=True), refusal
    return row and replace(row, bound=None if alone is None else least_devices(alone, device)), refusal


def _planned(model: Model, setups: Sequence[TrainingSetup]) -> list[CompiledPlan]:
    """Return the plans of those ways to share a job that can be planned."""
    plans, refusals = [], []
    for setup in setups:
        try:
            plans.append(CompiledPlan(model, setup))
        except MemplanError as error:
            refusals.append(error)
    if not plans:
        raise refusals[0]
    return plans


def _alone(plan: CompiledPlan, device: Device, simulated: Callable[[MemoryPlan], MemoryPlan]) -> MemoryPlan | None:
    """Return what a job holds on one GPU, or nothing where it does not fit there."""
    own = plan.evaluate(device)
    if own.allocated_bytes <= own.usable_bytes:
        own = simulated(own)
    return own if own.verdict == "fits" else None


def _refusal(compiled: Callable[[int], Sequence[CompiledPlan]]) -> str:
    """Return why a job is not planned on two GPUs, or nothing where it is."""
    try:
        compiled(2)
    except MemplanError as error:
        return str(error)
    return ""


def _fewest_ranks(
    compiled: Callable[[int], Sequence[CompiledPlan]], device: Device, simulated: Callable[[MemoryPlan], MemoryPlan]
) -> Placement | None:
    """Return a number of GPUs that a job fits on while it does not on one fewer, or None up to ``MOST_RANKS``.

    For each way to share matrices it is the first such number beyond a power of two, which is the fewest as long as shards
    shrink with their number: they do until single rows of a tensor are left. Of several ways the one that takes the fewest
    with a share as its reserve, and then as many of that way as it takes with its reserve simulated.
    """
    fewest: Placement | None = None
    for way in sorted({_way(plan) for plan in compiled(MOST_RANKS)}):
        row = _fewest_of(way, compiled, device, MOST_RANKS if fewest is None else fewest.count)
        if row is not None and (fewest is None or _order(row) < _order(fewest)):
            fewest, chosen = row, way
    return None if fewest is None else _fewest_of(chosen, compiled, device, MOST_RANKS, simulated, fewest.count)


def _order(row: Placement) -> tuple[int, int]:
    return row.count, row.plan.upper_bytes


def _way(plan: CompiledPlan) -> tuple[int, bool]:
    """Return how a plan's GPUs share each layer's matrices."""
    parallel = plan.setup.config.parallel
    return parallel.tensor, parallel.sequence


def _fewest_of(
    way: tuple[int, bool],
    compiled: Callable[[int], Sequence[CompiledPlan]],
    device: Device,
    most: int,
    simulated: Callable[[MemoryPlan], MemoryPlan] = lambda plan: plan,
    first: int = 2,
) -> Placement | None:
    """Return the fewest GPUs for a job that share matrices in one way, or None where that is more than ``most``, or nearly."""
    tensor, _ = way

    @cache
    def planned(groups: int) -> MemoryPlan:
        plan = next(plan for plan in compiled(groups * tensor) if _way(plan) == way).evaluate(device)
        return plan if plan.exceeds_device else simulated(plan)

    least = 2 if tensor == 1 else 1
    first = max(first // tensor, least)
    groups = first_that_fits(lambda groups: planned(groups).verdict == "fits", first, max(first, most // tensor), least)
    return None if groups is None else Placement(device, groups * tensor, planned(groups))
