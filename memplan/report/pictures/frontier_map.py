"""A frontier as a heat map: a grid of cells whose colour, hatching and words all say the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from memplan.report.figures import Axes, Figure, new_figure
from memplan.units import format_bytes

if TYPE_CHECKING:
    from memplan.plan.memory_plan import Verdict
    from memplan.solver.batch_frontier import Frontier

FILLS: Mapping[Verdict, tuple[str, str, str]] = {
    "fits": ("#0072b2", "#ffffff", ""),
    "tight": ("#f6d58a", "#000000", "///"),
    "no": ("#f4f4f4", "#222222", ".."),
}
"""Verdict -> fill, text and hatching. Blue and orange differ without red-green vision, and in print by their hatching.

Source: Okabe and Ito, https://jfly.uni-koeln.de/color/.
"""


def frontier_map(grid: Frontier) -> Figure:
    """Return the grid: sequence lengths down, batches across, the frontier of what FITS as a thick line."""
    from matplotlib.patches import Patch

    rows, columns = len(grid.lengths), len(grid.batches)
    figure, (axes,) = new_figure(width=2.2 + 0.95 * max(columns, 5), height=1.9 + 0.5 * rows)
    for row, cells in enumerate(grid.cells):
        for column, cell in enumerate(cells):
            _cell(axes, row, column, cell.verdict, format_bytes(cell.device_bytes))
    _line(axes, grid)
    axes.set(xlim=(0, columns), ylim=(rows, 0), xlabel="micro-batch", ylabel="sequence length")
    axes.set_xticks([column + 0.5 for column in range(columns)], [str(batch) for batch in grid.batches])
    axes.set_yticks([row + 0.5 for row in range(rows)], [str(length) for length in grid.lengths])
    axes.tick_params(length=0)
    axes.grid(visible=False)
    plan = grid.plan
    axes.set_title(
        f"{plan.model.spec.name} with {plan.setup.name} on {grid.device.name}, {format_bytes(grid.usable_bytes)} usable"
    )
    words = {"fits": "FITS at the upper end", "tight": "TIGHT: may not fit", "no": "NO"}
    patches = [
        Patch(facecolor=fill, hatch=hatch, edgecolor="#999999", label=words[verdict])
        for verdict, (fill, _, hatch) in FILLS.items()
    ]
    figure.legend(handles=patches, loc="outside lower center", ncols=3, fontsize=8)
    return figure


def _cell(axes: Axes, row: int, column: int, verdict: Verdict, size: str) -> None:
    from matplotlib.patches import Rectangle

    fill, text, hatch = FILLS[verdict]
    axes.add_patch(
        Rectangle(
            (column, row),
            1,
            1,
            facecolor=fill,
            edgecolor="#ffffff" if not hatch else "#cccccc",
            hatch=hatch,
            linewidth=0.8,
        )
    )
    box = {"boxstyle": "round,pad=0.15", "facecolor": fill, "edgecolor": "none"}
    axes.text(
        column + 0.5,
        row + 0.5,
        f"{size}\n{verdict.upper()}",
        color=text,
        fontsize=8,
        ha="center",
        va="center",
        bbox=box,
    )


def _line(axes: Axes, grid: Frontier) -> None:
    """Draw the line between cells that FIT, which are the first of each row, and the others."""
    counts = [sum(cell.verdict == "fits" for cell in row) for row in grid.cells]
    across = [count for count in counts for _ in (0, 1)]
    down = [edge for row in range(len(counts)) for edge in (row, row + 1)]
    axes.plot(across, down, color="#000000", linewidth=3, clip_on=False, solid_joinstyle="miter")
