"""Gaps to a baseline, drawn as a dot for each mean and a bar over the seeds."""

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from memplan.documents.frozen_values import dataclass
from memplan.report.document import Table
from memplan.report.experiments import interval_text
from memplan.report.figures import MARKERS, PALETTE, Axes

TICKS = {15: (-1, -0.5, 0, 0.5, 1, 2, 5, 10), 150: (-1, 0, 1, 3, 10, 30, 100), inf: (-1, 0, 1, 10, 100, 1000, 10000)}
"""Percent to name on an axis that ends below each key."""

LINEAR_TO = 1.0
"""Percent up to which the axis is linear; beyond, it is logarithmic."""


@dataclass(frozen=True, slots=True)
class Series:
    """Gaps that share a colour and a marker."""

    name: str  # What the legend says
    rows: Mapping[str, Mapping[str, Any]]  # Rows of a record by the line that they stand on
    place: int  # Which colour and marker


def gap_table(rows: Sequence[Mapping[str, Any]], keys: Sequence[str], title: str) -> Table:
    """Return losses and their gaps to fp32, a line for each row, which the values of ``keys`` tell from the others."""
    cells = [
        (
            *(("no", "yes")[row[key]] if key == "scaled" else row[key] for key in keys),
            f"{row['bytes_per_parameter']:.4g}",
            interval_text(row["loss"], ".4f"),
            gap_cell(row),
            str(row["diverged"]),
        )
        for row in rows
    ]
    headers = (*(key.replace("_", " ") for key in keys), ">B/param", ">loss", ">gap to fp32, %", ">diverged")
    return Table(headers, tuple(cells), title)


def draw_gaps(axes: Axes, lines: Sequence[str], series: Sequence[Series], *, apart: float = 0.0) -> None:
    """Draw gaps from top to bottom.

    Args:
        lines: What stands at the left, from the top.
        apart: How far the series of a line are moved against each other, in lines.
    """
    axes.set_xscale("symlog", linthresh=LINEAR_TO, linscale=0.7)
    axes.axvline(0, color="#666666", linewidth=1)
    edge = _largest(series) * 2.5
    axes.set_xlim(min(-2.0, 1.6 * _lowest(series)), edge)
    for index, one in enumerate(series):
        for line, row in one.rows.items():
            alone = sum(line in other.rows for other in series) == 1
            shift = 0.0 if alone else (index - (len(series) - 1) / 2) * apart
            _draw(axes, lines.index(line) + shift, row, one.place, edge)
        axes.plot([], [], linestyle="", color=PALETTE[one.place], marker=MARKERS[one.place], label=one.name)
    axes.set_yticks(range(len(lines)), lines)
    axes.set_ylim(len(lines) - 0.4, -0.6)
    ticks = [tick for tick in next(named for end, named in TICKS.items() if edge < end) if tick < edge]
    axes.set_xticks(ticks, [f"{tick:+g} %" if tick else "0" for tick in ticks])
    axes.minorticks_off()


def _largest(series: Sequence[Series]) -> float:
    gaps: list[float] = [
        row["gap_percent"]["high"] for one in series for row in one.rows.values() if row["gap_percent"]
    ]
    return max(4.0, *gaps)


def _lowest(series: Sequence[Series]) -> float:
    return min(
        (row["gap_percent"]["low"] for one in series for row in one.rows.values() if row["gap_percent"]), default=0
    )


def _draw(axes: Axes, height: float, row: Mapping[str, Any], place: int, edge: float) -> None:
    gap, color = row["gap_percent"], PALETTE[place]
    if gap is None:
        axes.annotate(
            "", (edge, height), (edge / 3, height), arrowprops={"arrowstyle": "->", "color": color, "lw": 1.6}
        )
        axes.plot([edge / 3], [height], color=color, marker="x", markersize=7, markeredgewidth=2)
        axes.text(edge / 4, height, bad_text(row), ha="right", va="center", color=color, fontsize=9)
        return
    axes.plot([gap["low"], gap["high"]], [height, height], color=color, linewidth=2.2, solid_capstyle="butt")
    axes.plot([gap["mean"]], [height], color=color, marker=MARKERS[place], markersize=6)


def bad_text(row: Mapping[str, Any]) -> str:
    """Return from which step on losses were not finite."""
    step = row.get("first_bad_step")
    if step is None:
        return "not finite"
    low, high = round(step["low"]), round(step["high"])
    return f"not finite from step {low}" if low == high else f"not finite from step {low} to {high}"


def line_label(name: str, bytes_per_parameter: float) -> str:
    """Return a name and its bytes for each parameter, in binary's usual three digits."""
    return f"{name}  {bytes_per_parameter:.3g} B"


def gap_cell(row: Mapping[str, Any]) -> str:
    """Return a gap as a table has it."""
    gap = row["gap_percent"]
    if gap is None:
        return bad_text(row)
    if gap["low"] == gap["high"] == 0:
        return "baseline"
    return f"{gap['mean']:+.1f} ({gap['low']:+.1f} to {gap['high']:+.1f})"
