"""The largest batch, sequence length, adapter rank or number of layers on each of several devices."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from memplan.catalog.entries import Gpu
from memplan.catalog.training_config import MAXIMUM_TOKENS
from memplan.errors import InvalidFileError, MemplanError
from memplan.model.model import Model
from memplan.plan.job_allowances import devices_for
from memplan.plan.memory_plan import Device, MemoryPlan, Verdict
from memplan.plan.planner import CompiledPlan
from memplan.plan.sizes.largest_model import able_devices
from memplan.solver.largest_value import (
    MOST_LAYERS,
    MOST_RANK,
    Answer,
    Gauge,
    beyond_peak,
    gauge_of,
    largest,
    largest_batch,
    largest_multiple,
    longest_sequence,
    settled,
    with_layers,
)
from memplan.step.compiled_layers.compiled_layer import multiple_of_tokens
from memplan.training.resolved import TrainingSetup
from memplan.units import round_up

LAYERS_PLAYED, MOST_LAYERS_PLAYED, FEWEST_PLAYS = 1_600, 400, 4
"""Layers, times micro-steps, of all runs that a search simulates, and of one at most: some ten seconds; halvings at least."""

Quantity = Literal["batch", "sequence", "lora-rank", "layers"]


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest value on one device."""

    device: Device
    fits: Answer  # The largest value that FITS; the next one does not
    tight: Answer  # The same for TIGHT, never less; where reserves are simulated, a larger one may be
    plan: MemoryPlan | None  # The plan at the value that FITS, or None where not even 1 does
    following: MemoryPlan | None  # The plan at the next value, or None where that is no valid input


@dataclass(slots=True)
class _Plans:
    """Plans by value; what depends on no device is compiled once for all of them."""

    make: Callable[[int], CompiledPlan]
    gpu: Gpu  # The card that plans are for
    made: dict[int, CompiledPlan] = field(default_factory=dict)

    def __getitem__(self, value: int) -> CompiledPlan:
        if value not in self.made:
            self.made[value] = self.make(value)
        return self.made[value].on(self.gpu)


@dataclass(slots=True)
class _Simulated:
    """Plans on one device by value, their reserve simulated."""

    evaluated: Callable[[int], MemoryPlan]
    simulate: Callable[..., MemoryPlan]
    layers: int  # Layers, times micro-steps, of a run
    tight: bool  # Whether runs that do not FIT are played on the full device
    made: dict[int, MemoryPlan] = field(default_factory=dict)

    def __getitem__(self, value: int) -> MemoryPlan:
        if value not in self.made:
            self.made[value] = self.simulate(self.evaluated(value), tight=self.tight, fitting=True)
        return self.made[value]

    def whole(self, value: int) -> MemoryPlan:
        """Return the plan at a value with its figures, whether it fits or not."""
        own = self[value]
        return self.simulate(self.evaluated(value), tight=self.tight) if own.verdict == "no" else own

    def edge(self, by_share: Answer, by_blocks: Answer) -> Answer:
        """Return the largest value that fits, or is at least TIGHT, sought between what a share and what blocks alone allow.

        A larger one may fit again: what the allocator rounds and splits does not grow evenly. Where a run takes long to
        play, fewer are, and the next value that does not fit lies further away.
        """
        if not by_blocks.value or self[max(by_share.value, by_blocks.apart)].by_share is None:
            return by_share
        plays = FEWEST_PLAYS if self.tight else max(FEWEST_PLAYS, LAYERS_PLAYED // self.layers)
        result = largest_multiple(
            lambda value: self[value].verdict != "no" if self.tight else self[value].verdict == "fits",
            by_blocks.value,
            max(by_share.value, by_blocks.apart),
            by_blocks.apart,
            step=(by_blocks.value - by_share.value) // 4,
            within=(by_blocks.value - by_share.value) >> plays,
        )
        return replace(result, bounded=result.bounded and by_blocks.bounded)


def largest_values(
    what: Quantity,
    model: Model,
    setup: TrainingSetup,
    devices: Sequence[Device],
    plan: CompiledPlan | None = None,
    simulate: Callable[..., MemoryPlan] | None = None,
) -> list[Largest]:
    """Return the largest value of one quantity on each device, all else being as the setup says.

    Args:
        plan: The plan of model and setup where it is compiled already: what batch and sequence are looked for in.
        simulate: Simulates the reserve of a plan, a tenth of a second each and some twenty of them for a device; none where shares do.

    Raises:
        InvalidFileError: The rank of a config without adapters.
        CannotAnswerError: No device can do all that the setup needs.
    """
    if what == "lora-rank" and setup.config.adapter is None:
        raise InvalidFileError(
            [f"--for lora-rank: {setup.name} has no adapters; add --config lora or --set adapter.kind=lora"]
        )
    setup = setup if plan is not None else _begun(what, setup)
    make, made = _maker(what, model, setup, plan), dict[int, CompiledPlan]()
    able = able_devices(make(1), devices_for(setup, devices))
    return [_on(what, setup, _Plans(make, device.gpu, made), device, simulate) for device in able]


def fitting_batch(compiled: CompiledPlan, plan: MemoryPlan) -> int:
    """Return the largest micro-batch that FITS by share on the device of a plan, which is not sought where one sequence does not.

    Raises:
        CannotAnswerError: The device is none that the setup is for.
    """
    setup, device = plan.setup, plan.device
    devices_for(setup, [device])
    if plan.micro_batch_size == 1 and plan.verdict != "fits":
        return 0
    plans = _Plans(lambda _: compiled, device.gpu)
    return _fitting("batch", setup, plans, device, partial(_evaluated, "batch", plans, device))[1].value


def room_left(plan: MemoryPlan) -> dict[str, int]:
    """Return how large batch and sequence of a plan may be, each by itself, by key of the training config.

    The sequence is no longer than the model was made for. Where nothing can be sought, there is nothing.
    """
    positions = plan.model.spec.max_position_embeddings or MAXIMUM_TOKENS
    try:
        compiled = CompiledPlan(plan.model, plan.setup)
        (batch,), (length,) = (
            largest_values(what, plan.model, plan.setup, [plan.device], compiled) for what in ("batch", "sequence")
        )
    except MemplanError:
        return {}
    return {"micro_batch_size": batch.fits.value, "sequence_length": min(length.fits.value, positions)}


def _begun(what: Quantity, setup: TrainingSetup) -> TrainingSetup:
    """Return a setup whose own batch or length, where that is looked for, is one that can be planned."""
    config = setup.config
    if what == "batch":
        apart = multiple_of_tokens(setup, config.sequence_length)
        config = replace(config, micro_batch_size=round_up(config.micro_batch_size, apart))
    elif what == "sequence":
        apart = multiple_of_tokens(setup, config.micro_batch_size)
        config = replace(config, sequence_length=round_up(config.sequence_length, apart))
    return setup if config == setup.config else replace(setup, config=config)


def _maker(
    what: Quantity, model: Model, setup: TrainingSetup, known: CompiledPlan | None
) -> Callable[[int], CompiledPlan]:
    """Return the function that compiles the plan at a value; batch and sequence length share one plan."""
    if what == "layers":
        return lambda count: CompiledPlan(with_layers(model, count), setup)
    adapter = setup.config.adapter
    if what == "lora-rank" and adapter is not None:
        return lambda rank: CompiledPlan(
            model, replace(setup, config=replace(setup.config, adapter=replace(adapter, rank=rank)))
        )
    plan = known or CompiledPlan(model, setup)
    return lambda _: plan


def _on(
    what: Quantity, setup: TrainingSetup, plans: _Plans, device: Device, simulate: Callable[..., MemoryPlan] | None
) -> Largest:
    evaluated: Callable[[int], MemoryPlan] = partial(_evaluated, what, plans, device)
    gauge, fits = _fitting(what, setup, plans, device, evaluated)
    tight = _answer(what, setup, plans, gauge, fits.value, tight=True)
    tight = _as_planned(tight, setup, device, evaluated, ("fits", "tight"))
    alone = gauge.without_reserve()
    most = _answer(what, setup, plans, alone, tight=True)
    layers = most.value if what == "layers" else sum(run.count for run in plans[1].model.spec.runs)
    layers *= setup.config.gradient_accumulation_steps
    if simulate is not None and 0 < layers <= MOST_LAYERS_PLAYED:
        surely, just = (_Simulated(evaluated, simulate, layers, tight) for tight in (False, True))
        evaluated = surely.whole
        fits = surely.edge(fits, _answer(what, setup, plans, alone))
        tight = just.edge(max(fits, tight, key=lambda one: one.value), most)
    plan = evaluated(fits.value) if fits.value else None
    following = None if fits.bounded else evaluated(fits.value + fits.apart)
    return Largest(device, fits, tight, plan, following)


def _fitting(
    what: Quantity, setup: TrainingSetup, plans: _Plans, device: Device, evaluated: Callable[[int], MemoryPlan]
) -> tuple[Gauge, Answer]:
    """Return the gauge of a device, and the largest value that FITS by share."""
    gauge = gauge_of(setup, device, plans[1].forms.stream_bytes if setup.config.parallel.data > 1 else 0, least=True)
    fits = _answer(what, setup, plans, gauge)
    return gauge, _as_planned(fits, setup, device, evaluated, ("fits",))


def _answer(
    what: Quantity, setup: TrainingSetup, plans: _Plans, gauge: Gauge, guess: int = 0, *, tight: bool = False
) -> Answer:
    """Return the largest value whose requested bytes, rounded to blocks, FIT by a gauge, or are at least ``tight``."""
    config, most, upper = setup.config, gauge.most_requested_bytes(tight), not tight
    if what == "batch":
        plan = plans[1]
        return largest_batch(plan, config.sequence_length, most - plan.rounding_bytes, upper=upper)
    if what == "sequence":
        plan = plans[1]
        return longest_sequence(plan, config.micro_batch_size, most - plan.rounding_bytes, guess, upper=upper)

    def fits(value: int) -> bool:
        plan = plans[value]
        requested = plan.upper_requested_bytes if upper else plan.requested_bytes
        return requested(config.micro_batch_size, config.sequence_length) + plan.rounding_bytes <= most

    return largest(fits, MOST_LAYERS if what == "layers" else MOST_RANK, guess or 16)


def _as_planned(
    result: Answer,
    setup: TrainingSetup,
    device: Device,
    evaluated: Callable[[int], MemoryPlan],
    verdicts: Sequence[Verdict],
) -> Answer:
    """Return the largest value, up to one that bytes alone allow, whose plan has a verdict; it rests on more than these."""
    rollout = setup.config.method.rollout
    if not beyond_peak(setup, device) and not (rollout and rollout.sleeps):
        return result
    return settled(result, lambda value: evaluated(value).verdict in verdicts)


def _evaluated(what: Quantity, plans: _Plans, device: Device, value: int) -> MemoryPlan:
    if what == "batch":
        return plans[1].evaluate(device, batch=value)
    if what == "sequence":
        return plans[1].evaluate(device, length=value)
    return plans[value].evaluate(device)
