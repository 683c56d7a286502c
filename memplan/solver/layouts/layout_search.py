"""Every layout of a job over GPUs that can be planned, and the front of time and memory of those that fit.

Times take no plan and come first; a layout is planned only where it can still take notably less than what was found before.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar, get_args

from memplan.catalog.catalog import Catalog
from memplan.catalog.stacks import Stack
from memplan.catalog.training_config import CheckpointedLayers, Checkpointing, TrainingConfig
from memplan.documents.frozen_values import dataclass
from memplan.errors import CannotAnswerError, InvalidFileError
from memplan.model.model import Model
from memplan.plan.memory_plan import Device, MemoryPlan
from memplan.plan.planner import CompiledPlan
from memplan.solver.largest_value import gauge_of
from memplan.solver.layouts.degrees import LayoutSpace, layouts
from memplan.solver.layouts.step_time import StepClock, StepTime
from memplan.solver.search.axes import BATCHES
from memplan.solver.search.cluster import Cluster, rates_among
from memplan.training.own_settings import is_settable
from memplan.training.resolution.resolve_config import resolve

KINDS_OF_STEPS = 3
"""Steps that are planned alike: one micro-batch, two of them, and more."""
UNNAMED = "layout"
"""What a layout is called while it is one of many."""
Refusal = CannotAnswerError | InvalidFileError
NOTABLE = 10
"""A row takes a tenth less memory than any that is faster."""


@dataclass(frozen=True, slots=True)
class Spot:
    """One layout at one batch: what it takes, and how long."""

    config: TrainingConfig
    time: StepTime
    device_bytes: int  # What a GPU is expected to show
    upper_bytes: int  # The same at the upper end


class Arm:
    """A layout with its checkpointing, whose batch is not chosen yet.

    Args:
        plan: Returns the plan of a config.
        batches: Micro-batches to try, and how many a step takes of each.
        clock: How long steps of the first of them take, with their plan.

    Attributes:
        refusal: Why it cannot be planned; None as long as nobody knows that.
    """

    def __init__(
        self,
        config: TrainingConfig,
        plan: Callable[[TrainingConfig], CompiledPlan],
        batches: Sequence[tuple[int, int]],
        clock: StepClock,
    ) -> None:
        self.config, self.batches, self.clock, self.length = config, batches, clock, config.sequence_length
        self.refusal: Refusal | None = None
        self._plan, self._plans = plan, {min(batches[0][1], KINDS_OF_STEPS): clock.plan}
        self._misfit = batches[-1][0] + 1

    def usable_bytes(self, device: Device) -> int:
        """Return what the job may use of a device."""
        return device.usable_bytes(self.clock.plan.setup.reserve_bytes)

    def spot(self, device: Device, batch: int, steps: int, time: StepTime, most: int) -> Spot | None:
        """Return the layout at a batch; nothing where it takes more than ``most`` anyway, or cannot be planned."""
        plan = self.clock.plan
        if (
            self.refusal
            or batch >= self._misfit
            or gauge_of(plan.setup, device).device_bytes(plan.constant_bytes, 0) > most
        ):
            return None
        config = self.at(batch, steps)
        try:
            plan = self._planned(config)
            gauge = gauge_of(plan.setup, device, plan.compiled(batch, self.length).forms.stream_bytes)
        except (CannotAnswerError, InvalidFileError) as error:
            self.refusal = error
            return None
        expected = gauge.device_bytes(plan.requested_bytes(batch, self.length), plan.rounding_bytes)
        if expected > gauge.usable_bytes:
            self._misfit = batch
            return None
        upper = gauge.upper_bytes(plan.upper_requested_bytes(batch, self.length), plan.rounding_bytes)
        return Spot(config, time, expected, upper)

    def at(self, batch: int, steps: int) -> TrainingConfig:
        """Return the config at a batch."""
        return replace(self.config, micro_batch_size=batch, gradient_accumulation_steps=steps)

    def _planned(self, config: TrainingConfig) -> CompiledPlan:
        kind = min(config.gradient_accumulation_steps, KINDS_OF_STEPS)
        if kind not in self._plans:
            self._plans[kind] = self._plan(config)
        return self._plans[kind]

    def least(self, device: Device) -> MemoryPlan | None:
        """Return it planned at its smallest batch, or nothing where it cannot be planned."""
        batch, steps = self.batches[0]
        try:
            return self._planned(self.at(batch, steps)).evaluate(device, batch, self.length)
        except (CannotAnswerError, InvalidFileError) as error:
            self.refusal = error
            return None


def nearest_miss(arms: Iterable[Arm], device: Device) -> MemoryPlan | None:
    """Return what needs the least memory of all that can be planned, each at its smallest batch."""
    plans = [plan for arm in arms if (plan := arm.least(device)) is not None]
    return min(plans, key=lambda plan: plan.upper_bytes, default=None)


def front(arms: Iterable[Arm], device: Device, *, strict: bool = False) -> list[Spot]:
    """Return the fastest that fits, and of the slower ones those that take notably less memory than any faster one.

    Times come first, which take no plan; a layout is planned only where it can take notably less than what was found before.

    Args:
        strict: Whether what fits as expected only is no answer where nothing else is.
    """
    timed = [
        (arm.clock.step(batch, arm.length, steps), arm, batch, steps) for arm in arms for batch, steps in arm.batches
    ]
    timed.sort(key=lambda item: item[0].token_femtoseconds)
    retained: list[Spot] = []
    tight: list[Spot] = []
    for time, arm, batch, steps in timed:
        most = retained[-1].upper_bytes * (NOTABLE - 1) // NOTABLE if retained else arm.usable_bytes(device)
        spot = arm.spot(device, batch, steps, time, most)
        if spot is not None:
            rows, size = (
                (retained, spot.upper_bytes)
                if spot.upper_bytes <= arm.usable_bytes(device)
                else (tight, spot.device_bytes)
            )
            if size <= most:
                rows.append(spot)
    return retained or ([] if strict else _thinned(tight))


def _thinned(spots: Iterable[Spot]) -> list[Spot]:
    """Return spots, fastest first, without what takes as much as a faster one."""
    rows: list[Spot] = []
    for spot in spots:
        if not rows or spot.upper_bytes < rows[-1].upper_bytes:
            rows.append(spot)
    return rows


def reason(error: Refusal) -> str:
    """Return why a layout cannot be planned, in a line."""
    return str(error).splitlines()[0].removeprefix(f"{UNNAMED}: ")


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LayoutRequest:
    """What is searched."""

    bases: tuple[TrainingConfig, ...]  # Configs to share out, each of a stack of its own
    space: LayoutSpace  # How many GPUs, and what is fixed of their layout
    cluster: Cluster  # Where they are
    step_batch: int  # Least sequences of an optimizer step, over all GPUs
    fixed: tuple[str, ...] = ()  # Keys of the configs that stay as they are, besides those of ``parallel``
    min_batch: int = 1  # Smallest micro-batch
    strict: bool = False  # Whether what may not fit at the upper end is no answer
    most: int = 5  # How many rows at most

    def steps(self, config: TrainingConfig, batch: int) -> int:
        """Return the micro-batches of a step that reach the least number of sequences."""
        if "gradient_accumulation_steps" in self.fixed:
            return config.gradient_accumulation_steps
        return -(-self.step_batch // (batch * config.parallel.data))

    def batches(self, config: TrainingConfig) -> Sequence[int]:
        """Return the micro-batches to try, ascending."""
        if "micro_batch_size" in self.fixed:
            return (config.micro_batch_size,)
        return sorted({self.min_batch, *(batch for batch in BATCHES if batch >= self.min_batch)})


@dataclass(frozen=True, slots=True)
class LayoutRow:
    """An answer: a layout planned in full."""

    spot: Spot
    plan: MemoryPlan


@dataclass(frozen=True, slots=True)
class LayoutFront:
    """The front, or the nearest miss."""

    model: Model
    device: Device
    request: LayoutRequest
    rows: tuple[LayoutRow, ...]  # Fastest first; each takes less memory than those before it
    miss: MemoryPlan | None  # What needs the least memory where nothing fits
    layouts: int  # How many were looked at
    plans: int  # How many plans were compiled
    left_out: tuple[str, ...]  # Why others cannot be planned, each reason once
    rates_of: str  # The GPU whose rates the times are of


def find_layouts(
    model: Model,
    request: LayoutRequest,
    device: Device,
    catalog: Catalog,
    progress: Callable[[int, int], None] | None = None,
) -> LayoutFront:
    """Return how so many GPUs best share a job.

    Args:
        progress: Is told how many parts of the search are done, and of how many: one for each layout, and one for each answer.

    Raises:
        MemplanError: No layout can be planned; the first reason.
    """
    search = _Search(model, request, device, catalog, progress)
    arms = list(search.arms())
    chosen = front(arms, device, strict=request.strict)[: request.most] if arms else []
    rows = tuple(LayoutRow(spot, search.whole(spot.config, rank)) for rank, spot in enumerate(chosen, 1))
    miss = None if rows else nearest_miss(arms, device)
    refusals = search.refusals | {reason(arm.refusal): arm.refusal for arm in arms if arm.refusal is not None}
    if not rows and miss is None:
        error = next(iter(refusals.values()))
        message = f"no layout of {request.space.gpus:,} GPUs can be planned: {reason(error)}"
        raise InvalidFileError([message]) if isinstance(error, InvalidFileError) else CannotAnswerError(message)
    counts = search.layouts, len(arms), tuple(refusals)
    return LayoutFront(model, device, request, rows, miss, *counts, search.rates.source)


class _Search:
    """One search, with what it has found out so far."""

    def __init__(
        self,
        model: Model,
        request: LayoutRequest,
        device: Device,
        catalog: Catalog,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self.model, self.request, self.device, self.catalog = model, request, device, catalog
        self._progress, self._done, self._parts = progress, 0, 0
        self.rates = rates_among(1, request.cluster, device, catalog)
        self.layouts = 0
        self.refusals: dict[str, Refusal] = {}

    def arms(self) -> Iterator[Arm]:
        """Yield every layout with every kind of checkpointing."""
        stacks = [self.catalog.stack(base.stack) for base in self.request.bases]
        divided = [
            (stack, config)
            for base, stack in zip(self.request.bases, stacks, strict=True)
            for config in self._noted(layouts(base, stack, self.request.space))
        ]
        self.layouts, self._parts = len(divided), len(divided) + self.request.most
        for stack, config in divided:
            for way in _checkpointing(config, stack, self.request.fixed):
                yield from self._noted(self._arm(one) for one in (replace(config, activation_checkpointing=way),))
            self._tell()

    def _tell(self) -> None:
        """Tell of one more part that is done, and never that all are."""
        self._done = min(self._done + 1, self._parts - 1)
        if self._progress is not None:
            self._progress(self._done, self._parts)

    def _noted(self, values: Iterator[T]) -> Iterator[T]:
        """Yield values until one cannot be had, and note why."""
        try:
            yield from values
        except (CannotAnswerError, InvalidFileError) as error:
            self.refusals[reason(error)] = error

    def _arm(self, config: TrainingConfig) -> Arm:
        batches = [(batch, self.request.steps(config, batch)) for batch in self.request.batches(config)]
        batch, steps = batches[0]
        config = replace(config, micro_batch_size=batch, gradient_accumulation_steps=steps)
        clock = StepClock(self._plan(config), self.request.cluster, self.rates)
        clock.step(batch, config.sequence_length, steps)
        return Arm(config, self._plan, batches, clock)

    def _plan(self, config: TrainingConfig) -> CompiledPlan:
        return CompiledPlan(self.model, resolve(config, self.catalog, UNNAMED)).on(self.device.gpu)

    def whole(self, config: TrainingConfig, rank: int) -> MemoryPlan:
        """Return a layout planned in full, under a name of its own."""
        setup = resolve(config, self.catalog, f"suggested-{rank}-{layout_name(config)}")
        plan = CompiledPlan(self.model, setup).evaluate(self.device)
        self._tell()
        return plan


def layout_name(config: TrainingConfig) -> str:
    """Return a layout in a word.

    Example:
        >>> from memplan.catalog.config_keys.parallel_keys import Parallel
        >>> layout_name(TrainingConfig("", parallel=Parallel(data=8, zero_stage=3, tensor=8, sequence=True)))
        'tp8-sp-dp8-zero3'
    """
    parallel = config.parallel
    parts = [f"tp{parallel.tensor}" if parallel.tensor > 1 else "", "sp" if parallel.sequence else ""]
    parts += [f"ep{parallel.expert}" if parallel.expert > 1 else ""]
    parts += [f"pp{parallel.pipeline}" if parallel.pipeline > 1 else "", f"dp{parallel.data}"]
    parts += [f"hsdp{parallel.replicate}" if parallel.replicate > 1 else ""]
    engine = "ds-" if parallel.engine == "deepspeed" else ""
    return "-".join(filter(None, (*parts, f"{engine}zero{parallel.zero_stage}")))


def _checkpointing(config: TrainingConfig, stack: Stack, fixed: Sequence[str]) -> Iterator[Checkpointing | None]:
    """Yield the kinds of checkpointing that a stack has words for, or the one that is fixed."""
    if "activation_checkpointing" in fixed or config.checkpointed_layers != CheckpointedLayers():
        yield config.activation_checkpointing
        return
    own = (config.activation_checkpointing, stack.checkpointing.default)
    for kind in get_args(Checkpointing):
        if kind in own or is_settable(stack, [("activation_checkpointing", kind)]):
            yield kind
