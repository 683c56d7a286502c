"""Batch against sequence length: every cell's bytes, and the line between what fits and what does not."""

from collections.abc import Callable, Sequence

from memplan.documents.frozen_values import dataclass
from memplan.plan.memory_plan import VERDICTS, Device, Verdict, verdict_of
from memplan.plan.planner import CompiledPlan
from memplan.solver.largest_value import Answer, beyond_peak, gauge_of, largest_batch, longest_sequence, settled

DEFAULT_BATCHES = (1, 2, 4, 8, 16, 32, 64)
DEFAULT_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)


Bounds = Sequence[tuple[int, Sequence[Verdict]]]
"""The most requested bytes with which a job FITS, and with which it is at least TIGHT, each with its verdicts."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One batch at one sequence length."""

    batch: int
    length: int
    verdict: Verdict
    requested_bytes: int
    device_bytes: int
    upper_bytes: int


@dataclass(frozen=True, slots=True)
class Edge:
    """Where the frontier runs at one sequence length, or at one batch."""

    at: int  # The sequence length or batch
    fits: Answer  # The largest batch, or longest sequence, that FITS; the next one does not
    tight: Answer  # The same for TIGHT, which is never less


@dataclass(frozen=True, slots=True)
class Frontier:
    """The grid and its frontier."""

    plan: CompiledPlan
    device: Device
    usable_bytes: int
    batches: tuple[int, ...]
    lengths: tuple[int, ...]
    cells: tuple[tuple[Cell, ...], ...]  # One row for each sequence length, in it one cell for each batch
    by_length: tuple[Edge, ...]  # Largest batch at each sequence length
    by_batch: tuple[Edge, ...]  # Longest sequence at each batch


def frontier(plan: CompiledPlan, device: Device, batches: Sequence[int], lengths: Sequence[int]) -> Frontier:
    """Return the grid over ``batches`` and ``lengths`` for one compiled plan and device."""
    plan = plan.on(device.gpu)
    gauge = gauge_of(plan.setup, device, plan.forms.stream_bytes)
    rounding = plan.rounding_bytes
    bounds = tuple((gauge.most_requested_bytes(tight) - rounding, VERDICTS[: 1 + tight]) for tight in (False, True))

    def cell(batch: int, length: int) -> Cell:
        if beyond_peak(plan.setup, device):
            own = plan.evaluate(device, batch, length)
            return Cell(batch, length, own.verdict, own.requested_bytes, own.device_bytes, own.upper_bytes)
        requested = plan.requested_bytes(batch, length)
        device_bytes = gauge.device_bytes(requested, rounding)
        upper = gauge.upper_bytes(plan.upper_requested_bytes(batch, length), rounding)
        verdict = verdict_of(device_bytes, upper, gauge.usable_bytes)
        return Cell(batch, length, verdict, requested, device_bytes, upper)

    return Frontier(
        plan=plan,
        device=device,
        usable_bytes=gauge.usable_bytes,
        batches=tuple(batches),
        lengths=tuple(lengths),
        cells=tuple(tuple(cell(batch, length) for batch in batches) for length in lengths),
        by_length=tuple(_at_length(plan, device, length, bounds) for length in lengths),
        by_batch=_by_batch(plan, device, batches, bounds),
    )


def _at_length(plan: CompiledPlan, device: Device, length: int, bounds: Bounds) -> Edge:
    """Return the largest batches at a length."""
    answers = [
        _as_planned(
            plan, device, largest_batch(plan, length, most, upper=len(verdicts) == 1), lambda b: (b, length), verdicts
        )
        for most, verdicts in bounds
    ]
    return Edge(length, *answers)


def _by_batch(plan: CompiledPlan, device: Device, batches: Sequence[int], bounds: Bounds) -> tuple[Edge, ...]:
    """Return the longest sequence at each batch, each search starting from the result of the one before."""
    edges: list[Edge] = []
    guess = 0
    for batch in batches:
        answers: list[Answer] = []
        for most, verdicts in bounds:
            answer = longest_sequence(plan, batch, most, guess, upper=len(verdicts) == 1)
            answers.append(
                _as_planned(plan, device, answer, lambda length, batch=batch: (batch, length), verdicts)  # type: ignore[misc]
            )
            guess = answer.value
        edges.append(Edge(batch, *answers))
    return tuple(edges)


def _as_planned(
    plan: CompiledPlan,
    device: Device,
    answer: Answer,
    cell: Callable[[int], tuple[int, int]],
    verdicts: Sequence[Verdict],
) -> Answer:
    """Return a largest value as its plan at that batch and length has it, where that counts more than the peak."""
    if not beyond_peak(plan.setup, device):
        return answer
    return settled(answer, lambda value: plan.evaluate(device, *cell(value)).verdict in verdicts)
