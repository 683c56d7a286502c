"""Memory over one step by component, against what the GPU has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from memplan.documents.frozen_values import dataclass
from memplan.report.figures import Axes, Figure, new_figure
from memplan.report.pictures.plan_bars import COLOURS
from memplan.report.plans.plan_answer import device_name
from memplan.units import GIB, MIB, format_bytes

if TYPE_CHECKING:
    from memplan.plan.memory_plan import MemoryPlan
    from memplan.plan.reserve.step_timeline import Timeline

LEAST_LABEL_SHARE = 0.08
"""Share of the width that a phase takes at least to be labelled."""

FLAT = 4
"""A job that takes less than one part in so many of the GPU is drawn by itself, and the GPU's line is said to lie above."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Lines across a picture, in bytes of the device."""

    context_bytes: int  # What lies outside the allocator, below everything else
    lines: Mapping[str, int]  # What a line says -> its bytes; a line of 0 bytes is left out
    capacity: str = "usable"  # Which of the lines is what the GPU has


def plan_figure(plan: MemoryPlan, timeline: Timeline) -> Figure:
    """Return the picture of a plan's step."""
    title = f"{plan.model.spec.name} with {plan.setup.label} on {device_name(plan)}: {plan.verdict.upper()}"
    lines = {"expected": plan.device_bytes, "usable": plan.usable_bytes}
    return step_figure(timeline, title, plan.peak.name, Limits(plan.allowances.context_bytes, lines))


def step_figure(timeline: Timeline, title: str, peak: str, limits: Limits) -> Figure:
    """Return a stacked chart of a step, its peak labelled, with lines for what the GPU has and what is expected.

    Args:
        peak: The instant of the peak, in the words of the answer.
    """
    figure, (axes,) = new_figure(width=9.0, height=4.8)
    job = max(
        limits.context_bytes + timeline.columns[timeline.peak].bytes,
        *(size for name, size in limits.lines.items() if name != limits.capacity),
    )
    capacity = limits.lines.get(limits.capacity, 0)
    top = job * 3 // 2 if capacity > FLAT * job else max(job, capacity)
    unit, name = (GIB, "GiB") if top >= GIB else (MIB, "MiB")
    _stack(axes, timeline, limits.context_bytes, unit)
    _phases(axes, timeline)
    _lines(axes, limits, unit, len(timeline.columns), 1.18 * top / unit)
    _mark_peak(axes, timeline, peak, limits.context_bytes, unit)
    axes.set(title=title, ylabel=name, xlim=(0, len(timeline.columns)), ylim=(0, 1.18 * top / unit))
    axes.grid(visible=False, axis="x")
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles[::-1], labels[::-1], loc="outside right center", fontsize=8, title="at the peak", title_fontsize=8
    )
    return figure


def _stack(axes: Axes, timeline: Timeline, context_bytes: int, unit: int) -> None:
    """Draw the components one over another, each down to the floor behind those below it: only its top is written."""
    peak, height = timeline.columns[timeline.peak], [context_bytes] * len(timeline.columns)
    layers = [("device_context", context_bytes, height)] if context_bytes else []
    for index, name in enumerate(timeline.components):
        height = [below + column.sizes[index] for below, column in zip(height, timeline.columns, strict=True)]
        layers.append((name, peak.sizes[index], height))
    for order, (name, size, heights) in enumerate(layers):
        places = [0, *(place for place in range(1, len(heights)) if heights[place] != heights[place - 1])]
        axes.stairs(
            [heights[place] / unit for place in places],
            [*places, len(heights)],
            fill=True,
            color=COLOURS[name],
            linewidth=0,
            label=f"{name}  {format_bytes(size)}",
            zorder=1 - order / 100,
        )


def _phases(axes: Axes, timeline: Timeline) -> None:
    """Write under the axis what the step does, and part it."""
    count, labels = len(timeline.columns), []
    for phase, first, last in timeline.phases:
        if first:
            axes.axvline(first, color="#888888", linewidth=0.6)
        if (last + 1 - first) / count >= LEAST_LABEL_SHARE:
            labels.append(((first + last + 1) / 2, phase))
    names = [phase if timeline.from_events else phase.replace(" ", "\n") for _, phase in labels]
    axes.set_xticks([place for place, _ in labels], names, fontsize=9)
    axes.tick_params(axis="x", length=0)
    axes.set_xlabel(
        "one step, in the order of its events" if timeline.from_events else "instants of one step, each at its fullest"
    )


def _lines(axes: Axes, limits: Limits, unit: int, count: int, highest: float) -> None:
    """Draw what is expected and what the GPU has; a line that is higher than the picture is named at its top."""
    for name, size in limits.lines.items():
        usable = name == limits.capacity
        if size:
            style = {"color": "#b00020" if usable else "#222222", "linestyle": "-" if usable else "--"}
            above = size / unit > highest
            if not above:
                axes.axhline(size / unit, linewidth=1.4 if usable else 1.0, **style)  # type: ignore[arg-type]
            text = f"{name} {format_bytes(size)}{' (above)' if above else ''}"
            place = (0.995 if usable else 0.005) * count
            side = "right" if usable else "left"
            height, edge = (0.99 * highest, "top") if above else (size / unit, "bottom")
            axes.text(place, height, text, ha=side, va=edge, fontsize=8, color=style["color"])


def _mark_peak(axes: Axes, timeline: Timeline, peak: str, context_bytes: int, unit: int) -> None:
    column, count = timeline.peak, len(timeline.columns)
    size = timeline.columns[column].bytes
    text = f"peak: {format_bytes(size)} live, {peak}"
    right = column > count / 2
    axes.annotate(
        text,
        (column + 0.5, (context_bytes + size) / unit),
        xytext=(-14 if right else 14, 12),
        textcoords="offset points",
        ha="right" if right else "left",
        fontsize=9,
        bbox={"boxstyle": "round,pad=0.2", "facecolor": "#ffffff", "edgecolor": "#222222", "linewidth": 0.6},
        arrowprops={"arrowstyle": "-", "color": "#222222"},
    )
    axes.plot([column + 0.5], [(context_bytes + size) / unit], marker="o", color="#222222", markersize=5)
