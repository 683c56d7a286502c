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
from memplan.plan.reserve.simulation import exceeds_in_blocks
from memplan.plan.sizes.largest_model import (
    able_devices,
    fewest_devices,
    first_that_fits,
    least_devices,
    refuse_parallel,
)
from memplan.training.resolved import TrainingSetup

SINGLY = 4
"""Numbers of GPUs below what a share as the reserve says, and from there on, that are tried one by one before steps that double or halve."""

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
    edge: bool = False  # Whether one fewer, or one group that shares matrices, does not do, but not every smaller number was tried

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
    largest_first = sorted(able, key=lambda device: -device.usable_bytes(first.setup.reserve_bytes))
    for number, device in enumerate(largest_first):  # a run that takes more than it has takes more than smaller ones
        told(number, len(able))
        if alone is not None and (plan := _alone(alone, device, simulated)) is not None:
            rows.append(Placement(device, 1, plan))
            continue
        row, refusal = _on_several(compiled, alone, device, simulated, refusal)
        rows += [] if row is None else [row]
    told(len(able), len(able))
    return Placements(tuple(sorted(rows, key=lambda row: able.index(row.device))), refusal)


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
    """Return the fewest GPUs that a job fits on, as :meth:`_Counts.fewest` has it, or None.

    Of several ways to share matrices it is the one that takes the fewest with a share as its reserve.
    """
    ways = [_Counts(way, compiled, device, simulated) for way in sorted({_way(plan) for plan in compiled(MOST_RANKS)})]
    by_share = [(row.count, row.plan.upper_bytes, way) for way in ways if (row := way.by_share())]
    return min(by_share, key=lambda one: one[:2])[2].fewest() if by_share else None


def _way(plan: CompiledPlan) -> tuple[int, bool]:
    """Return how a plan's GPUs share each layer's matrices."""
    parallel = plan.setup.config.parallel
    return parallel.tensor, parallel.sequence


class _Counts:
    """Numbers of GPUs of one kind that share matrices in one way: groups of as many as a matrix has parts."""

    def __init__(
        self,
        way: tuple[int, bool],
        compiled: Callable[[int], Sequence[CompiledPlan]],
        device: Device,
        simulated: Callable[[MemoryPlan], MemoryPlan],
    ) -> None:
        self._way, self._compiled, self._device, self._simulated = way, compiled, device, simulated
        self._tensor, _ = way
        self._least = 2 if self._tensor == 1 else 1
        self._most = max(self._least, MOST_RANKS // self._tensor)
        self._evaluated, self._played = cache(self._plan), cache(self._simulation)

    def by_share(self) -> Placement | None:
        """Return the fewest by share, which takes less of more GPUs until single rows of a tensor are left, or None up to ``MOST_RANKS``."""
        fewest = first_that_fits(
            lambda groups: self._evaluated(groups).verdict == "fits", self._least, self._most, self._least
        )
        return None if fewest is None else Placement(self._device, fewest * self._tensor, self._evaluated(fewest))

    def fewest(self) -> Placement | None:
        """Return the fewest with their reserve simulated, or None up to ``MOST_RANKS``, or nearly.

        Segments do not shrink evenly as blocks do. Every number is tried from where the blocks of each stream fit, where by share
        ``SINGLY`` more or fewer suffice; else from those by share, in steps that halve the way down, or up in single ones first.
        """
        if (row := self.by_share()) is None:
            return None
        first = row.count // self._tensor
        least = first_that_fits(
            lambda groups: not exceeds_in_blocks(self._evaluated(groups)), first, first, self._least
        )
        near = least is not None and first - least <= SINGLY
        if not near and self._fits(first):
            return self._placement(first_that_fits(self._fits, first, first, self._least), edge=True)
        tried = range(least if near and least else first, first + SINGLY)
        fewest = next(filter(self._fits, tried), None)
        edge = not near or fewest is None
        return self._placement(fewest or first_that_fits(self._fits, tried[-1], self._most, tried[-1]), edge=edge)

    def _fits(self, groups: int) -> bool:
        return self._played(groups).verdict == "fits"

    def _placement(self, groups: int | None, *, edge: bool) -> Placement | None:
        if groups is None:
            return None
        return Placement(self._device, groups * self._tensor, self._played(groups), edge=edge)

    def _plan(self, groups: int) -> MemoryPlan:
        plans = self._compiled(groups * self._tensor)
        return next(plan for plan in plans if _way(plan) == self._way).evaluate(self._device)

    def _simulation(self, groups: int) -> MemoryPlan:
        plan = self._evaluated(groups)
        return replace(plan, verdict="no") if exceeds_in_blocks(plan) else self._simulated(plan)
