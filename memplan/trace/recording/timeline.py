"""A trace as a picture and as data: bytes by component over the events of one step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from memplan.documents.escaping import xml
from memplan.trace.recording.trace_result import COMPONENTS, Component, Trace
from memplan.units import format_bytes

WIDTH, HEIGHT = 960, 420
LEFT, TOP, PLOT_WIDTH, PLOT_HEIGHT = 80, 50, 680, 300
MAXIMUM_COLUMNS = 680

COLOURS: Mapping[Component, str] = {
    "weights": "#0072b2",
    "master_weights": "#56b4e9",
    "gradients": "#e69f00",
    "optimizer_states": "#009e73",
    "buffers": "#999999",
    "activations": "#f0e442",
    "logits": "#cc79a7",
    "temporaries": "#d55e00",
    "communication": "#000000",
    "library_workspaces": "#666666",
}
"""Colours that remain distinct without red-green vision (Okabe and Ito, https://jfly.uni-koeln.de/color/)."""


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


def timeline_svg(trace: Trace, title: str = "Memory of one training step") -> str:
    """Return a stacked area chart of the reported step, with the peak marked, as an SVG document.

    Where there are more events than columns, each column shows its fullest event, so that no
    peak is lost.
    """
    shown = _shown(trace)
    columns = _columns(trace, shown)
    top = max((sum(column.values()) for _, column in columns), default=1) or 1
    peak = f"{format_bytes(trace.peak_bytes)} at {trace.peak_instant}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        'font-family="sans-serif" font-size="12" fill="#222222">',
        f"<title>{xml(title)}</title>",
        f"<desc>{xml(_description(trace, shown, peak))}</desc>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="24" font-size="16">{xml(title)}</text>',
        f'<text x="{LEFT}" y="42">peak {xml(peak)} ({xml(trace.peak.operation or "no operation")})</text>',
        *_areas(columns, shown, top),
        *_axis(top),
        *_instants(trace, columns),
        *_peak(trace, columns, top),
        *_legend(trace, shown),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


Column = tuple[int, Mapping[Component, int]]
"""Index of an event and the bytes by component after it."""


def _shown(trace: Trace) -> tuple[Component, ...]:
    present = {storage.component for storage in trace.storages}
    return tuple(name for name in COMPONENTS if name in present)


def _columns(trace: Trace, shown: Sequence[Component]) -> list[Column]:
    """Return at most so many columns as are drawn, each the fullest of its events."""
    count = len(trace.events) - trace.steady_from
    best: dict[int, tuple[int, Column]] = {}
    for index, totals in trace.curve():
        place = (index - trace.steady_from) * MAXIMUM_COLUMNS // max(count, 1)
        total = sum(totals.values())
        if place not in best or total > best[place][0]:
            best[place] = (total, (index, {name: totals[name] for name in shown}))
    return [column for _, (_, column) in sorted(best.items())]


def _x(position: int, count: int) -> float:
    return LEFT + PLOT_WIDTH * position / max(count - 1, 1)


def _y(size: int, top: int) -> float:
    return TOP + PLOT_HEIGHT * (1 - size / top)


def _areas(columns: Sequence[Column], shown: Sequence[Component], top: int) -> list[str]:
    """Return one polygon for each component, stacked in the order of the components."""
    below = [0] * len(columns)
    areas = []
    for name in shown:
        above = [low + column[name] for low, (_, column) in zip(below, columns, strict=True)]
        upper = [f"{_x(i, len(columns)):.1f},{_y(size, top):.1f}" for i, size in enumerate(above)]
        lower = [f"{_x(i, len(columns)):.1f},{_y(size, top):.1f}" for i, size in enumerate(below)]
        points = " ".join([*upper, *reversed(lower)])
        areas.append(f'<polygon points="{points}" fill="{COLOURS[name]}"><title>{name}</title></polygon>')
        below = above
    return areas


def _axis(top: int) -> list[str]:
    lines = []
    for step in range(5):
        size = top * step // 4
        y = _y(size, top)
        lines.append(
            f'<line x1="{LEFT}" x2="{LEFT + PLOT_WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#000000" stroke-opacity="0.15"/>'
        )
        lines.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{format_bytes(size)}</text>')
    return lines


def _instants(trace: Trace, columns: Sequence[Column]) -> list[str]:
    """Return a label under the stretch of each instant that is wide enough to carry one."""
    spans: list[tuple[str, int, int]] = []
    for position, (index, _) in enumerate(columns):
        name = trace.events[index].instant
        name = "layers backward" if name.startswith("layer ") else name
        if spans and spans[-1][0] == name:
            spans[-1] = (name, spans[-1][1], position)
        else:
            spans.append((name, position, position))
    base = TOP + PLOT_HEIGHT
    labels = []
    for name, first, last in spans:
        left, right = _x(first, len(columns)), _x(last, len(columns))
        labels.append(f'<line x1="{left:.1f}" x2="{left:.1f}" y1="{base}" y2="{base + 6}" stroke="#222222"/>')
        if right - left > 7 * len(name):
            middle = (left + right) / 2
            labels.append(f'<text x="{middle:.1f}" y="{base + 20}" text-anchor="middle">{xml(name)}</text>')
    return labels


def _peak(trace: Trace, columns: Sequence[Column], top: int) -> list[str]:
    """Return the mark at the peak."""
    nearest = min(range(len(columns)), key=lambda i: abs(columns[i][0] - trace.peak.event), default=0)
    x, y = _x(nearest, len(columns)), _y(trace.peak_bytes, top)
    base = TOP + PLOT_HEIGHT
    return [
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{base}" stroke="#222222" stroke-dasharray="4 3"/>',
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="#ffffff" stroke="#222222" stroke-width="2"/>',
    ]


def _legend(trace: Trace, shown: Sequence[Component]) -> list[str]:
    """Return the components, topmost first, with their bytes at the peak."""
    left = LEFT + PLOT_WIDTH + 16
    rows = []
    for row, name in enumerate(reversed(shown)):
        y = TOP + 30 * row
        size = format_bytes(trace.peak.components.get(name, 0))
        rows.append(f'<rect x="{left}" y="{y}" width="12" height="12" fill="{COLOURS[name]}"/>')
        rows.append(f'<text x="{left + 18}" y="{y + 10}">{name}</text>')
        rows.append(f'<text x="{left + 18}" y="{y + 23}" font-size="10" fill="#555555">{size}</text>')
    return rows


def _description(trace: Trace, shown: Sequence[Component], peak: str) -> str:
    listed = ", ".join(f"{name} {format_bytes(trace.peak.components.get(name, 0))}" for name in shown)
    return f"Stacked bytes by component over the events of one step. Peak {peak}: {listed}."
