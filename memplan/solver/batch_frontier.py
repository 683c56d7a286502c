"""Batch against sequence length: every cell's bytes, and the line between what fits and what does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memplan.plan.memory_plan import Device, Verdict
from memplan.plan.planner import CompiledPlan
from memplan.solver.largest_value import Answer, gauge_of, largest_batch, longest_sequence

DEFAULT_BATCHES = (1, 2, 4, 8, 16, 32, 64)
DEFAULT_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)


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
    fits, tight = gauge.most_requested_bytes() - rounding, gauge.most_requested_bytes(tight=True) - rounding

    def cell(batch: int, length: int) -> Cell:
        requested = plan.requested_bytes(batch, length)
        device_bytes, upper = gauge.device_bytes(requested, rounding), gauge.upper_bytes(requested, rounding)
        return Cell(batch, length, gauge.verdict(requested, rounding), requested, device_bytes, upper)

    return Frontier(
        plan=plan,
        device=device,
        usable_bytes=gauge.usable_bytes,
        batches=tuple(batches),
        lengths=tuple(lengths),
        cells=tuple(tuple(cell(batch, length) for batch in batches) for length in lengths),
        by_length=tuple(Edge(t, largest_batch(plan, t, fits), largest_batch(plan, t, tight)) for t in lengths),
        by_batch=_by_batch(plan, batches, fits, tight),
    )


def _by_batch(plan: CompiledPlan, batches: Sequence[int], fits: int, tight: int) -> tuple[Edge, ...]:
    """Return the longest sequence at each batch, each search starting from the result of the one before."""
    edges: list[Edge] = []
    guess = 1024
    for batch in batches:
        first = longest_sequence(plan, batch, fits, guess)
        edges.append(Edge(batch, first, longest_sequence(plan, batch, tight, first.value)))
        guess = max(1, first.value)
    return tuple(edges)
