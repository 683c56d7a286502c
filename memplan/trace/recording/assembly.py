"""A :class:`Trace` from a recorder's events: components, instants, peaks."""

from bisect import bisect_right
from functools import cache
from pathlib import Path
from types import CodeType

from memplan.trace.recording.recorder import Record, Recorder
from memplan.trace.recording.trace_result import COMPONENTS, Component, Event, Moment, Trace, TracedStorage


def assembled(recorder: Recorder, vocab_size: int, notes: tuple[str, ...] = ()) -> Trace:
    """Return the trace of everything that ``recorder`` saw.

    Args:
        recorder: A recorder that has been left.
        vocab_size: Width of tensors that count as logits.
    """
    deaths = {index: position for position, (born, index) in enumerate(recorder.events) if not born}
    births = {index: position for position, (born, index) in enumerate(recorder.events) if born}
    outliving = _outliving(recorder, births, deaths)
    storages = tuple(
        _storage(recorder, record, index in outliving, vocab_size) for index, record in enumerate(recorder.records)
    )
    events = _events(recorder, storages)
    marks = [(position, name) for position, name, _ in recorder.marks[recorder.steady_mark :]]
    steady_from = recorder.steady_from
    instants = _instants(events, storages, steady_from, marks)
    return Trace(storages, events, steady_from, instants, notes, recorder.host_bytes, tuple(recorder.turns))


def _outliving(recorder: Recorder, births: dict[int, int], deaths: dict[int, int]) -> set[int]:
    """Return the storages that were made in forward, or made again in backward, and outlived it.

    What is computed again may end in the middle of a function, whose variables go after it and before anything else is made.
    """
    end = len(recorder.events) + 1
    outliving: set[int] = set()
    for begin, ended in recorder.forward_spans:
        born = [index for allocates, index in recorder.events[begin:ended] if allocates]
        finish = next((place for place in range(ended, end - 1) if recorder.events[place][0]), end)
        outliving.update(index for index in born if deaths.get(index, end) >= finish)
    return outliving & births.keys()


def _storage(recorder: Recorder, record: Record, outlives: bool, vocab_size: int) -> TracedStorage:
    instant = recorder.marks[record.mark][1]
    component = record.component or _component(record, outlives, vocab_size)
    return TracedStorage(
        record.bytes, component, record.operation, instant, _text(record.line), record.shape, record.name, record.stream
    )


def _component(record: Record, outlives: bool, vocab_size: int) -> Component:
    """Return the component of a storage that was not marked: logits, activations or temporaries."""
    shape = record.shape
    if not record.in_layer and shape and shape[-1] == vocab_size and len(shape) > 1 and shape[0] != vocab_size:
        return "logits"
    return "activations" if outlives else "temporaries"


def _text(line: tuple[CodeType, int] | None) -> str:
    if line is None:
        return ""
    code, number = line
    return f"{_shown_file(code.co_filename)}:{number}"


@cache
def _shown_file(name: str) -> str:
    path = Path(name)
    return f"{path.parent.name}/{path.name}"


def _events(recorder: Recorder, storages: tuple[TracedStorage, ...]) -> tuple[Event, ...]:
    positions = [position for position, _, _ in recorder.marks]
    events = []
    for position, (allocates, index) in enumerate(recorder.events):
        storage = storages[index]
        instant = recorder.marks[bisect_right(positions, position) - 1][1]
        events.append(Event(allocates, index, storage.bytes, storage.operation, instant))
    return tuple(events)


def _instants(
    events: tuple[Event, ...], storages: tuple[TracedStorage, ...], steady_from: int, marks: list[tuple[int, str]]
) -> dict[str, Moment]:
    """Return the greatest need of each instant of the reported step, with its breakdown."""
    totals: dict[Component, int] = dict.fromkeys(COMPONENTS, 0)
    requested = 0
    moments: dict[str, Moment] = {}
    waiting = marks[::-1]

    def note(index: int, instant: str, operation: str) -> None:
        best = moments.get(instant)
        if best is None or requested > best.bytes:
            components: dict[Component, int] = {
                name: size for name, size in totals.items() if size and name != "library_workspaces"
            }
            moments[instant] = Moment(requested, index, operation, components)

    for index, event in enumerate(events):
        while waiting and waiting[-1][0] <= index:
            note(index - 1, waiting.pop()[1], "")
        component = storages[event.storage].component
        change = event.bytes if event.allocates else -event.bytes
        totals[component] += change
        if component != "library_workspaces":
            requested += change
        if index >= steady_from and event.allocates:
            note(index, event.instant, event.operation)
    for _, instant in reversed(waiting):
        note(len(events) - 1, instant, "")
    return moments
