"""Layouts whose batch is not chosen yet, and the front of time and memory of those that fit.

Times take no plan and come first; a layout is planned only where it can still take notably less than what was found before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from memplan.catalog.training_config import TrainingConfig
from memplan.documents.frozen_values import dataclass
from memplan.errors import CannotAnswerError, InvalidFileError
from memplan.plan.memory_plan import Device, MemoryPlan
from memplan.plan.planner import CompiledPlan
from memplan.solver.largest_value import gauge_of
from memplan.solver.layouts.step_time import StepClock, StepTime

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
        plans: Its plan, by how many micro-batches a step has.
        batches: Micro-batches to try, and how many a step takes of each.

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
        requested = plan.requested_bytes(batch, self.length)
        expected, upper = (size(requested, plan.rounding_bytes) for size in (gauge.device_bytes, gauge.upper_bytes))
        if expected > gauge.usable_bytes:
            self._misfit = batch
            return None
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
        arms: Layouts whose batch is not chosen yet.
        device: What each has to fit on.
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
