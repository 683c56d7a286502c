"""A traced step as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from memplan.plan.reserve.step_timeline import COLUMNS, STACKED, Timeline, fullest_columns
from memplan.report.pictures.step_figure import Limits, step_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from memplan.library.answers.trace_answer import TracedStep
    from memplan.trace.recording.trace_result import Trace


def traced_figure(step: TracedStep) -> Figure:
    """Return what is alive over a traced step, by component, with what its GPU has where one was named."""
    trace, device = step.trace, step.device
    lines = {"segments, and context": step.replayed.reserved_peak_bytes + step.context_bytes}
    if device is not None:
        lines["usable"] = device.usable_bytes(step.setup.reserve_bytes)
    title = f"{step.title}, {step.setup.name}, traced{f' for {device.name}' if device else ''}"
    return step_figure(traced_timeline(trace), title, trace.peak_instant, Limits(step.context_bytes, lines))


def traced_timeline(trace: Trace) -> Timeline:
    """Return what is alive over the reported step of a trace."""
    return fullest_columns(STACKED, _moments(trace), COLUMNS, len(trace.events) - trace.steady_from)


def _moments(trace: Trace) -> Iterator[tuple[str, Sequence[int]]]:
    """Yield what the step does and the bytes of each component, after each event; layers are one phase."""
    for index, totals in trace.curve():
        name = trace.events[index].instant
        yield ("layers backward" if name.startswith("layer ") else name), list(totals.values())
