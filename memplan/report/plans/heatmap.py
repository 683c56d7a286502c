"""A frontier as a picture: a grid of cells whose colour, hatching and words all say the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from memplan.documents.escaping import xml
from memplan.report.plans.plan_answer import VERDICT_WORDS
from memplan.units import format_bytes

if TYPE_CHECKING:
    from memplan.solver.batch_frontier import Cell, Frontier

CELL_WIDTH, CELL_HEIGHT = 76, 38
LEFT, TOP, BOTTOM = 96, 84, 72

FILLS = {"fits": ("#0072b2", "#ffffff"), "tight": ("url(#tight)", "#000000"), "no": ("url(#no)", "#222222")}
"""Verdict -> fill and text. Blue and orange differ without red-green vision, and in print by their hatching.

Source: Okabe and Ito, https://jfly.uni-koeln.de/color/.
"""

PATTERNS = """<defs>
<pattern id="tight" width="9" height="9" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
<rect width="9" height="9" fill="#f6d58a"/><line x1="0" y1="0" x2="0" y2="9" stroke="#e69f00" stroke-width="4"/>
</pattern>
<pattern id="no" width="8" height="8" patternUnits="userSpaceOnUse">
<rect width="8" height="8" fill="#f4f4f4"/><circle cx="4" cy="4" r="1" fill="#b0b0b0"/>
</pattern>
</defs>"""


def heat_map(grid: Frontier) -> str:
    """Return the grid as an SVG document: sequence lengths down, batches across, the frontier as a thick line."""
    width = max(LEFT + CELL_WIDTH * len(grid.batches) + 24, 620)
    height = TOP + CELL_HEIGHT * len(grid.lengths) + BOTTOM
    plan = grid.plan
    title = f"{plan.model.spec.name} with {plan.setup.name} on {grid.device.name}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'role="img" font-family="sans-serif" font-size="12" fill="#222222">',
        f"<title>{xml(title)}</title>",
        f"<desc>{xml(_description(grid))}</desc>",
        PATTERNS,
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="22" font-size="15">{xml(title)}</text>',
        f'<text x="{LEFT}" y="40">{format_bytes(grid.usable_bytes)} usable; what nvidia-smi would show</text>',
        *_axes(grid),
        *(
            part
            for row, cells in enumerate(grid.cells)
            for column, cell in enumerate(cells)
            for part in _cell(row, column, cell)
        ),
        f'<path d="{_line(grid)}" fill="none" stroke="#000000" stroke-width="3"/>',
        *_legend(height - 44),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _axes(grid: Frontier) -> Iterator[str]:
    for column, batch in enumerate(grid.batches):
        x = LEFT + CELL_WIDTH * column + CELL_WIDTH // 2
        yield f'<text x="{x}" y="{TOP - 9}" text-anchor="middle">{batch}</text>'
    for row, length in enumerate(grid.lengths):
        y = TOP + CELL_HEIGHT * row + CELL_HEIGHT // 2 + 4
        yield f'<text x="{LEFT - 8}" y="{y}" text-anchor="end">{length}</text>'
    yield f'<text x="{LEFT}" y="{TOP - 26}" font-size="11" fill="#555555">micro-batch across, sequence length down</text>'


def _cell(row: int, column: int, cell: Cell) -> Iterator[str]:
    """Yield a rectangle with its bytes and verdict in words."""
    x, y = LEFT + CELL_WIDTH * column, TOP + CELL_HEIGHT * row
    fill, text = FILLS[cell.verdict]
    word = VERDICT_WORDS[cell.verdict]
    full = f"{cell.batch} x {cell.length}: {word}, {format_bytes(cell.device_bytes)}, up to {format_bytes(cell.upper_bytes)}"
    middle = x + CELL_WIDTH // 2
    yield (
        f'<rect x="{x}" y="{y}" width="{CELL_WIDTH}" height="{CELL_HEIGHT}" fill="{fill}" stroke="#ffffff">'
        f"<title>{xml(full)}</title></rect>"
    )
    if cell.verdict != "fits":
        yield f'<rect x="{x + 5}" y="{y + 4}" width="{CELL_WIDTH - 10}" height="{CELL_HEIGHT - 8}" rx="3" fill="#ffffff" fill-opacity="0.85"/>'
    size = format_bytes(cell.device_bytes)
    yield f'<text x="{middle}" y="{y + 17}" text-anchor="middle" fill="{text}">{size}</text>'
    yield f'<text x="{middle}" y="{y + 30}" text-anchor="middle" font-size="10" fill="{text}">{word}</text>'


def _line(grid: Frontier) -> str:
    """Return the path between cells that FIT, which are the first of each row, and the others."""
    counts = [sum(cell.verdict == "fits" for cell in row) for row in grid.cells]
    x = LEFT + CELL_WIDTH * counts[0]
    parts = [f"M{x} {TOP}"]
    for row, count in enumerate(counts):
        x = LEFT + CELL_WIDTH * count
        parts.append(f"H{x}V{TOP + CELL_HEIGHT * (row + 1)}")
    return "".join(parts)


def _legend(y: int) -> Iterator[str]:
    texts = (("fits", "FITS at the upper end"), ("tight", "TIGHT: may not fit"), ("no", "NO"))
    x = LEFT
    for verdict, text in texts:
        yield f'<rect x="{x}" y="{y}" width="18" height="14" fill="{FILLS[verdict][0]}" stroke="#555555"/>'
        yield f'<text x="{x + 24}" y="{y + 12}" font-size="11">{text}</text>'
        x += 60 + 6 * len(text)
    yield f'<text x="{LEFT}" y="{y + 32}" font-size="11" fill="#555555">The thick line is the frontier of what FITS.</text>'


def _description(grid: Frontier) -> str:
    edges = ", ".join(f"{edge.fits.value or 'none'} at {edge.at}" for edge in grid.by_length)
    return f"Largest micro-batch that fits by sequence length: {edges}."
