"""What is alive over a step, component by component: the plan's own events, or its instants where events are not told."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby, pairwise

from memplan.documents.frozen_values import dataclass
from memplan.plan.components import COMPONENTS
from memplan.plan.memory_plan import MemoryPlan
from memplan.plan.reserve.simulation import events_of, shares_reason
from memplan.step.events.event_stream import RunEvents
from memplan.step.tapes.linear_forms import Part, Storage
from memplan.step.tapes.moments import Instant
from memplan.step.tapes.taped_operations import Reduction

COLUMNS = 400
"""Columns of a picture: more are not to be told apart on paper."""

STACKED = COMPONENTS[: COMPONENTS.index("library_workspaces") + 1]
"""Components that tensors and libraries make up; the others lie outside."""

OF_PART = {part: part.name.lower() for part in Part}


@dataclass(frozen=True, slots=True)
class Column:
    """The fullest moment of a stretch of the step."""

    phase: str  # What the step does then
    sizes: tuple[int, ...]  # Requested bytes of each component, in the timeline's order

    @property
    def bytes(self) -> int:
        """Requested bytes of all components."""
        return sum(self.sizes)


@dataclass(frozen=True, slots=True)
class Timeline:
    """What is alive over a step, in the order of its events."""

    components: tuple[str, ...]  # Components that there are, in the order of every table
    columns: tuple[Column, ...]  # Moments in order
    from_events: bool = True  # Whether they are events; else each is an instant at its fullest, and ``reason`` says why
    reason: str = ""  # Why events are not told, or nothing

    @property
    def peak(self) -> int:
        """The place of the fullest column, the first of those that are equal."""
        totals = [column.bytes for column in self.columns]
        return totals.index(max(totals))

    @property
    def phases(self) -> tuple[tuple[str, int, int], ...]:
        """Each phase with its first and its last column."""
        spans, start = [], 0
        for phase, group in groupby(self.columns, key=lambda column: column.phase):
            end = start + sum(1 for _ in group)
            spans.append((phase, start, end - 1))
            start = end
        return tuple(spans)


def step_timeline(plan: MemoryPlan, columns: int = COLUMNS) -> Timeline:
    """Return what is alive over the step that follows the first, in at most so many columns.

    Each column is the fullest moment of its stretch, so that no peak is lost. Where a plan's events are not told, there
    is a column for each instant, at its fullest.
    """
    if reason := shares_reason(plan):
        return _by_instant(plan, reason)
    events = events_of(plan, steps=2)
    return fullest_columns(STACKED, _moments(events), columns, len(events.codes) - events.steady_from)


def fullest_columns(
    components: Sequence[str], moments: Iterator[tuple[str, Sequence[int]]], columns: int, count: int
) -> Timeline:
    """Return moments as a timeline of at most so many columns; components that there are none of are left out.

    Args:
        moments: What the step does, and the bytes of each component: one list, which may change from one to the next.
        columns: How many columns at most.
    """
    best: dict[int, tuple[int, Column]] = {}
    for number, (phase, sizes) in enumerate(moments):
        place, total = number * columns // max(count, columns), sum(sizes)
        if place not in best or total > best[place][0]:
            best[place] = total, Column(phase, tuple(sizes))
    result = [column for _, (_, column) in sorted(best.items())]
    shown = [index for index, _ in enumerate(components) if any(column.sizes[index] for column in result)]
    return Timeline(
        tuple(components[index] for index in shown),
        tuple(Column(column.phase, tuple(column.sizes[index] for index in shown)) for column in result),
    )


def _moments(events: RunEvents) -> Iterator[tuple[str, Sequence[int]]]:
    """Yield what the last step does and the bytes of each component, after each of its events."""
    kinds = _component_numbers(events)
    alive = [0] * len(STACKED)
    phases = dict(events.stream.phases)
    phase = ""
    for place, code in enumerate(events.codes):
        phase = phases.get(place, phase)
        storage = code >> 1
        alive[kinds[storage]] += -events.sizes[storage] if code & 1 else events.sizes[storage]
        if place >= events.steady_from:
            yield phase, alive


def _component_numbers(events: RunEvents) -> list[int]:
    """Return the number of the component that each storage is of."""
    number = {name: index for index, name in enumerate(STACKED)}
    kinds = [number["temporaries"]] * len(events.sizes)
    changes = [*events.stream.components, (len(kinds), "")]
    for (first, name), (end, _) in pairwise(changes):
        kinds[first:end] = [number[name]] * (end - first)
    of_section: dict[int, list[int]] = {}
    for first, section in events.stream.sections:
        if id(section) not in of_section:
            of_section[id(section)] = [number[_component(storage)] for storage in section.storages]
        own = of_section[id(section)]
        kinds[first : first + len(own)] = own
    for storage in events.libraries:
        kinds[storage] = number["library_workspaces"]
    return kinds


def _component(storage: Storage | Reduction) -> str:
    """Return what a section's storage is of; the partial sums of a reduction pass."""
    return "temporaries" if isinstance(storage, Reduction) else OF_PART[storage[0]]


def _by_instant(plan: MemoryPlan, reason: str) -> Timeline:
    """Return each instant at its fullest moment, in the order of the step."""
    fullest: dict[str, Column] = {}
    for instant in plan.forms.candidates:
        column = Column(instant.name, tuple(_sizes(plan, instant)))
        if instant.name not in fullest or column.bytes > fullest[instant.name].bytes:
            fullest[instant.name] = column
    moments = ((column.phase, column.sizes) for column in fullest.values())
    return replace(fullest_columns(STACKED, moments, len(fullest), len(fullest)), from_events=False, reason=reason)


def _sizes(plan: MemoryPlan, instant: Instant) -> Iterator[int]:
    """Yield the bytes of each component at an instant, in the order of ``STACKED``."""
    parts = instant.form.part_bytes(plan.values)
    buckets = plan.communication_bytes - plan.peak.communication
    yield from (plan.states.weight_bytes, plan.states.master_bytes, parts[Part.GRADIENTS], plan.states.state_bytes)
    yield from (plan.buffer_bytes, parts[Part.ACTIVATIONS], parts[Part.LOGITS])
    yield parts[Part.TEMPORARIES] + instant.partial_bytes(plan.values) - instant.communication
    yield from (instant.communication + buckets, plan.allowances.library_bytes)
