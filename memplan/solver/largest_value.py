"""The largest value of one quantity that fits: an exact search, and the limits of each quantity.

Every answer here fits, and the next larger value does not. The requested bytes of a compiled plan
are, at a fixed sequence length, the largest of a few forms that are all but linear in the batch, so
a division finds the largest batch or its neighbour. The sequence length enters squared and rounded,
so it is bisected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from math import lcm
from operator import mul

from memplan.catalog.training_config import MAXIMUM_TOKENS
from memplan.documents.frozen_values import dataclass
from memplan.errors import CannotAnswerError
from memplan.model.model import Model
from memplan.model.spec import ModelSpec, layer_runs
from memplan.plan.allowances import Allowances
from memplan.plan.job_allowances import searched_allowances
from memplan.plan.memory_plan import Device, Verdict, verdict_of
from memplan.plan.planner import CompiledPlan
from memplan.step.compiled_layers.compiled_layer import multiple_of_tokens
from memplan.step.tapes.linear_forms import EMBEDDING_DIRECT_INDICES, Coefficients
from memplan.training.resolved import TrainingSetup

MOST_BATCH = 2**24
MOST_LENGTH = 2**30
MOST_RANK = 2**16
MOST_LAYERS = 2**14
"""Largest values that a training config may have. See ``memplan/training/resolved.py``."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The largest value that fits."""

    value: int  # 0 where not even 1 fits
    bounded: bool = False  # Whether a limit of the input ended the search: the next value is no valid input
    apart: int = 1  # What lies between it and the next value: others cannot be answered


def largest(fits: Callable[[int], bool], most: int, guess: int = 1, step: int = 1, within: int = 1) -> Answer:
    """Return the largest value of which ``fits`` holds, a predicate that stays false once it is false.

    Steps that double lead from a guess to a bracket, which is then bisected: the value returned was
    evaluated and fits, the next one was evaluated and does not.

    Args:
        fits: The predicate.
        most: The largest value that may be answered.
        guess: Where to begin.
        step: The first step from there.
        within: How far above the answer the value may lie that does not fit.

    Example:
        >>> largest(lambda n: n <= 37, 1000), largest(lambda n: n <= 37, 20)
        (Answer(value=37, bounded=False, apart=1), Answer(value=20, bounded=True, apart=1))
        >>> largest(lambda n: False, 9).value
        0
    """
    low = high = max(1, min(guess, most))
    if fits(low):
        while low < most:
            high, step = min(low + step, most), 2 * step
            if not fits(high):
                break
            low = high
        if low == most:
            return Answer(most, bounded=True)
    else:
        while low:
            low, step = max(high - step, 0), 2 * step
            if not low or fits(low):
                break
            high = low
    while high - low > within:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return Answer(low, apart=high - low)


def largest_multiple(
    fits: Callable[[int], bool], most: int, guess: int, apart: int, step: int = 1, within: int = 1
) -> Answer:
    """Return the largest multiple of ``apart``, up to ``most``, of which ``fits`` holds."""
    steps = (max(1, size // apart) for size in (step, within))
    result = largest(lambda count: fits(count * apart), most // apart, guess // apart, *steps)
    return Answer(result.value * apart, result.bounded, result.apart * apart)


def beyond_peak(setup: TrainingSetup, device: Device) -> bool:
    """Tell whether a verdict rests on more than the bytes of a peak, so that only a whole plan has it."""
    return setup.takes_beyond_peak or device.host_memory_bytes is not None


def settled(answer: Answer, holds: Callable[[int], bool]) -> Answer:
    """Return the largest value, up to one that the bytes of its peak allow, of which ``holds`` holds, as its plan does for sure."""
    own = largest_multiple(holds, answer.value, answer.value, answer.apart) if answer.value else answer
    return answer if own.value == answer.value else own


def largest_batch(plan: CompiledPlan, length: int, most_bytes: int, *, upper: bool = False) -> Answer:
    """Return the largest micro-batch whose requested peak, or the one that its ``upper`` end is of, is at most ``most_bytes``.

    Formula:
        Each candidate instant is ``fixed + b * each`` beyond a few thousand tokens, so
        ``b = (most - fixed) / each``, and the least of them counts. Rounding, chunks of the loss and
        sorting in the embedding's backward bend the forms a little, so b is then settled exactly.
    """
    limit, apart = min(MOST_BATCH, MAXIMUM_TOKENS // length), multiple_of_tokens(plan.setup, length)
    near = (plan.model.spec.vocab_size + EMBEDDING_DIRECT_INDICES) // length + 1
    values = plan.values(near, length), plan.values(2 * near, length)
    room = most_bytes - plan.constant_bytes
    guess = max(1, min((_crossing(form, near, values, room) for form in _forms(plan)), default=1))
    requested = plan.upper_requested_bytes if upper else plan.requested_bytes
    return largest_multiple(lambda batch: requested(batch, length) <= most_bytes, limit, guess, apart)


def _forms(plan: CompiledPlan) -> list[Coefficients]:
    """Return the coefficients of every candidate instant, buffers included."""
    return [(candidate.form + plan.forms.buffers).totals() for candidate in plan.candidates]


def _crossing(form: Coefficients, near: int, values: Sequence[Sequence[int]], room: int) -> int:
    """Return about where one form reaches so many bytes: a straight line through two far batches, ``near`` and twice it."""
    low, high = (sum(map(mul, form, each)) for each in values)
    return near + (room - low) * near // (high - low) if high > low else MOST_BATCH


def longest_sequence(plan: CompiledPlan, batch: int, most_bytes: int, guess: int = 0, *, upper: bool = False) -> Answer:
    """Return the longest sequence whose requested peak, or the one that its ``upper`` end is of, is at most ``most_bytes``; learned positions end it, completions begin it.

    Ranks that share the sequence have equal parts of it.
    """
    limit = min(MOST_LENGTH, MAXIMUM_TOKENS // batch, plan.model.spec.learned_positions or MOST_LENGTH)
    parallel, least = plan.setup.config.parallel, plan.setup.answer_length + 1
    apart = lcm(parallel.tensor if parallel.sequence else 1, multiple_of_tokens(plan.setup, batch))

    requested = plan.upper_requested_bytes if upper else plan.requested_bytes

    def fits(length: int) -> bool:
        return length >= least and requested(batch, length) <= most_bytes

    result = largest_multiple(fits, limit, max(guess or 1024, least), apart)
    return replace(result, bounded=result.bounded or (least > 1 and not result.value))


def with_layers(model: Model, count: int) -> Model:
    """Return a model with another number of layers: its first ones, the last one repeated where more are needed.

    Raises:
        CannotAnswerError: The model has no layers to repeat.
    """
    layers = [run.layer for run in model.spec.runs for _ in range(run.count)]
    if not layers:
        raise CannotAnswerError(f"{model.spec.name} has no layers")
    chosen = [*layers[:count], *[layers[-1]] * (count - len(layers))]
    spec: ModelSpec = replace(model.spec, runs=layer_runs(chosen))
    return Model.from_spec(spec, model.source)


@dataclass(frozen=True, slots=True)
class Gauge:
    """Device bytes and verdict of a requested peak, without evaluating a whole plan."""

    usable_bytes: int  # Memory of the device that a job may use, after the reserve
    allowances: Allowances  # What is added to the requested bytes on this device

    def without_reserve(self) -> Gauge:
        """Return the gauge of what blocks and context alone take."""
        none = Fraction(0)
        return Gauge(self.usable_bytes, replace(self.allowances, reserve_fraction=none, upper_reserve_fraction=none))

    def device_bytes(self, requested: int, rounding: int) -> int:
        """Return what nvidia-smi would show, as :meth:`memplan.plan.planner.CompiledPlan.evaluate` has it."""
        return self.allowances.device_bytes(self.allowances.allocated_bytes(requested, rounding))

    def upper_bytes(self, requested: int, rounding: int) -> int:
        """Return the upper end of the interval around it."""
        return self.allowances.upper_bytes(self.allowances.allocated_bytes(requested, rounding))

    def verdict(self, requested: int, rounding: int) -> Verdict:
        """Return the verdict on a requested peak."""
        sizes = self.device_bytes(requested, rounding), self.upper_bytes(requested, rounding)
        return verdict_of(*sizes, self.usable_bytes)

    def most_requested_bytes(self, tight: bool = False) -> int:
        """Return the most requested bytes that FIT, rounding to blocks included; negative where nothing does.

        Formula:
            ``a + floor(a * p / q) <= usable - context`` holds up to
            ``a = floor((q * (usable - context + 1) - 1) / (p + q))``; library workspaces are then subtracted.

        Args:
            tight: The most at which the verdict is at least TIGHT instead.

        Example:
            >>> from fractions import Fraction
            >>> gauge = Gauge(1150, Allowances(0, Fraction(5, 100), Fraction(15, 100), 0, 0))
            >>> gauge.most_requested_bytes(), gauge.upper_bytes(1000, 0), gauge.upper_bytes(1001, 0)
            (1000, 1150, 1151)
        """
        part = self.allowances
        share, context = part.upper_reserve_fraction, part.upper_context_bytes
        if tight:
            share, context = part.reserve_fraction, part.context_bytes
        room = self.usable_bytes - context
        p, q = share.numerator, share.denominator
        return (q * (room + 1) - 1) // (p + q) - part.library_bytes


def gauge_of(setup: TrainingSetup, device: Device, stream_bytes: int = 0, *, least: bool = False) -> Gauge:
    """Return the gauge of a device for a setup, whose reserve and allocator it takes into account.

    Args:
        stream_bytes: Buffers of collectives that no other stream can use.
        least: Leave out what depends on the step, for who looks at its plan besides.

    Raises:
        CannotAnswerError: Something depends on the step otherwise.
    """
    allowances = searched_allowances(setup, device, stream_bytes, least=least)
    return Gauge(device.usable_bytes(setup.reserve_bytes), allowances)
