"""The result of a trace: every storage, every birth and death in order, what follows from them, and its timeline as data."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, get_args

from memplan.allocator.pools import Turn

Component = Literal[
    "weights",
    "master_weights",
    "gradients",
    "optimizer_states",
    "buffers",
    "activations",
    "logits",
    "temporaries",
    "communication",
    "library_workspaces",
]
COMPONENTS: tuple[Component, ...] = get_args(Component)

PERSISTENT: tuple[Component, ...] = ("weights", "master_weights", "gradients", "optimizer_states")
"""Components that a rank holds between steps."""


LATER_MICRO_STEP = "second backward"
"""The one instant of each later micro-step of gradient accumulation, forward and backward."""


class Event(NamedTuple):
    """A storage is born or dies."""

    allocates: bool  # True for a birth
    storage: int  # Index into :attr:`Trace.storages`
    bytes: int  # Its size, without rounding
    operation: str  # What made the storage (for both events)
    instant: str  # Part of the step that the event belongs to


@dataclass(frozen=True, slots=True)
class TracedStorage:
    """Memory that one or more tensors share."""

    bytes: int  # Its size
    component: Component  # Where the planner books it
    operation: str  # Operator that made it
    instant: str  # Part of the step in which it was made
    line: str  # ``file:line`` of the model's code that made it; empty for what backward and optimizers make
    shape: tuple[int, ...]  # Shape of the first tensor in it
    name: str = ""  # Name of the parameter that it belongs to, or empty
    stream: int = 0  # CUDA stream that it was asked for on, whose memory serves no other; 0 computes


@dataclass(frozen=True, slots=True)
class Moment:
    """One point of the event stream: where an instant, or the whole step, needs most."""

    bytes: int  # Requested bytes after the event
    event: int  # Index into :attr:`Trace.events`
    operation: str  # What ran
    components: Mapping[Component, int]  # Bytes by component; those without any are left out


@dataclass(frozen=True)
class Trace:
    """A traced training run, of which the last step, the steady state, is reported.

    Library workspaces are in the event stream, for the allocator, and in no requested figure.
    """

    storages: tuple[TracedStorage, ...]  # Every storage, in order of birth
    events: tuple[Event, ...]  # Births and deaths in order, from the first weight on
    steady_from: int  # Index of the first event of the reported step
    instants: Mapping[str, Moment]  # The greatest need of each part of the reported step, in order of appearance
    notes: tuple[str, ...] = ()  # What is left out, one sentence each
    host_bytes: int = 0  # Optimizer states in host memory, step counters included; in no other figure
    turns: tuple[Turn, ...] = ()  # What the program asks of the allocator between the events

    @cached_property
    def peak_instant(self) -> str:
        """Name of the instant that needs most; the first of equals."""
        return max(self.instants, key=lambda name: self.instants[name].bytes)

    @property
    def peak(self) -> Moment:
        """The point at which the step needs most."""
        return self.instants[self.peak_instant]

    @property
    def peak_bytes(self) -> int:
        """Requested bytes at the peak."""
        return self.peak.bytes

    @property
    def streams(self) -> dict[int, int]:
        """The stream of each storage that was not asked for on the one that computes."""
        return {index: storage.stream for index, storage in enumerate(self.storages) if storage.stream}

    @property
    def instant_bytes(self) -> dict[str, int]:
        """Requested bytes by instant."""
        return {name: moment.bytes for name, moment in self.instants.items()}

    @cached_property
    def persistent_bytes(self) -> int:
        """Weights, master weights, gradients kept until the step, and optimizer states, before an update uses any up."""
        steps = (i for i in range(self.steady_from, len(self.events)) if self.events[i].instant == "optimizer step")
        first = next(steps, len(self.events))
        if first == len(self.events) and "optimizer step" in self.instants:
            components = self.instants["optimizer step"].components
            return sum(components.get(name, 0) for name in PERSISTENT)
        alive = self.alive_after(first - 1)
        return sum(s.bytes for s in map(self.storages.__getitem__, alive) if s.component in PERSISTENT)

    def alive_after(self, event: int) -> set[int]:
        """Return the storages that are alive after the event with that index."""
        alive: set[int] = set()
        for item in self.events[: event + 1]:
            if item.allocates:
                alive.add(item.storage)
            else:
                alive.discard(item.storage)
        return alive

    def largest_at_peak(self, count: int = 10) -> tuple[TracedStorage, ...]:
        """Return the largest storages alive at the peak, largest first."""
        alive = (self.storages[index] for index in sorted(self.alive_after(self.peak.event)))
        requested = (storage for storage in alive if storage.component != "library_workspaces")
        return tuple(sorted(requested, key=lambda storage: -storage.bytes)[:count])

    def curve(self) -> Iterator[tuple[int, dict[Component, int]]]:
        """Yield the index of each event of the reported step and the bytes by component after it.

        The same dictionary is yielded again and again; copy it to keep it.
        """
        totals: dict[Component, int] = dict.fromkeys(COMPONENTS, 0)
        for index, event in enumerate(self.events):
            totals[self.storages[event.storage].component] += event.bytes if event.allocates else -event.bytes
            if index >= self.steady_from:
                yield index, totals


def timeline_json(trace: Trace) -> dict[str, Any]:
    """Return every event of the reported step with the bytes by component after it.

    ``largest_at_peak`` has the storages alive at the peak, largest first, with the line of
    model code that made each.
    """
    shown = _shown(trace)
    events = [
        {
            "instant": trace.events[index].instant,
            "operation": trace.events[index].operation,
            "allocates": trace.events[index].allocates,
            "bytes": trace.events[index].bytes,
            "components": {name: totals[name] for name in shown},
        }
        for index, totals in trace.curve()
    ]
    return {
        "schema": "memplan/timeline/1",
        "peak": {
            "event": max(trace.peak.event - trace.steady_from, 0),
            "instant": trace.peak_instant,
            "operation": trace.peak.operation,
            "requested_bytes": trace.peak_bytes,
            "components": dict(trace.peak.components),
        },
        "instants": [{"name": name, "requested_bytes": size} for name, size in trace.instant_bytes.items()],
        "largest_at_peak": [
            {
                "bytes": storage.bytes,
                "component": storage.component,
                "operation": storage.operation,
                "name": storage.name,
                "shape": list(storage.shape),
                "line": storage.line,
            }
            for storage in trace.largest_at_peak(20)
        ],
        "events": events,
    }


def _shown(trace: Trace) -> tuple[Component, ...]:
    present = {storage.component for storage in trace.storages}
    return tuple(name for name in COMPONENTS if name in present)
