"""The answer of ``memplan frontier``: a grid of batch and sequence length, and the line through it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from memplan.report.document import Document, Table
from memplan.report.plans.plan_answer import BY_SHARE, of_each, sized, stack_data, stack_words
from memplan.units import format_bytes

if TYPE_CHECKING:
    from memplan.solver.batch_frontier import Cell, Edge, Frontier
    from memplan.solver.largest_value import Answer

LETTERS = {"fits": "", "tight": " T", "no": " x"}


def frontier_document(grid: Frontier, catalog_hash: str, unit: str, *, strict: bool, tidy: bool) -> Document:
    """Return the grid as tables and JSON.

    Args:
        tidy: Whether each cell is to be a row of its own, as CSV has it.
    """
    data = {
        "schema": "memplan/frontier/1",
        "catalog_hash": catalog_hash,
        "model": grid.plan.model.spec.name,
        "config": grid.plan.setup.name,
        "stack": stack_data(grid.plan.setup.stack),
        "gpu": {
            "name": grid.device.name,
            "count": grid.plan.setup.config.parallel.gpus,
            "usable_bytes": grid.usable_bytes,
        },
        "rows": [_cell_data(cell) for row in grid.cells for cell in row],
        "largest_batch": [_edge_data("sequence_length", edge, "batch") for edge in grid.by_length],
        "longest_sequence": [_edge_data("micro_batch_size", edge, "length") for edge in grid.by_batch],
    }
    if tidy:
        return Document(data, (_tidy(grid),), heat_map_code(grid, strict))
    blocks = (
        _heading(grid),
        _grid(grid, unit),
        _edges("sequence", "largest micro-batch", grid.by_length),
        _edges("micro-batch", "longest sequence", grid.by_batch),
        _note(grid),
        _sentence(grid),
    )
    return Document(data, blocks, heat_map_code(grid, strict))


def heat_map_code(grid: Frontier, strict: bool) -> int:
    """Return 0 where a cell fits (or is TIGHT, unless strict), else 1."""
    good = ("fits",) if strict else ("fits", "tight")
    return 0 if any(cell.verdict in good for row in grid.cells for cell in row) else 1


def _cell_data(cell: Cell) -> dict[str, Any]:
    return {
        "micro_batch_size": cell.batch,
        "sequence_length": cell.length,
        "verdict": cell.verdict,
        "requested_bytes": cell.requested_bytes,
        "device_bytes": cell.device_bytes,
        "upper_bytes": cell.upper_bytes,
    }


def _edge_data(key: str, edge: Edge, what: str) -> dict[str, Any]:
    return {
        key: edge.at,
        f"fits_{what}": edge.fits.value,
        f"tight_{what}": edge.tight.value,
        "bounded": edge.fits.bounded,
    }


def _heading(grid: Frontier) -> str:
    plan, config = grid.plan, grid.plan.setup.config
    name = of_each(grid.device, plan.setup)
    return (
        f"{sized(plan.model)} with {plan.setup.name}, {stack_words([plan.setup])}, on "
        f"{name}: {format_bytes(grid.usable_bytes)} usable, checkpointing {config.checkpointing_words}"
    )


def _grid(grid: Frontier, unit: str) -> Table:
    """Return the device bytes of every cell; T marks what is TIGHT and x what does not fit."""
    headers = (">sequence \\ batch", *(f">{batch}" for batch in grid.batches))
    rows = tuple(
        (str(length), *(f"{format_bytes(cell.device_bytes, unit)}{LETTERS[cell.verdict]}" for cell in row))
        for length, row in zip(grid.lengths, grid.cells, strict=True)
    )
    return Table(headers, tuple(tuple(cell if cell[-1] in "Tx" else f"{cell}  " for cell in row) for row in rows))


def _tidy(grid: Frontier) -> Table:
    rows = tuple(
        (
            str(cell.batch),
            str(cell.length),
            cell.verdict.upper(),
            str(cell.requested_bytes),
            str(cell.device_bytes),
            str(cell.upper_bytes),
        )
        for row in grid.cells
        for cell in row
    )
    headers = ("micro_batch_size", "sequence_length", "verdict", "requested_bytes", "device_bytes", "upper_bytes")
    return Table(headers, rows)


def _edges(key: str, what: str, edges: Sequence[Edge]) -> Table:
    rows = tuple((str(edge.at), answer_text(edge.fits), answer_text(edge.tight)) for edge in edges)
    return Table((f">{key}", f">{what} that FITS", ">TIGHT up to"), rows)


def answer_text(answer: Answer) -> str:
    """Return an answer as text: ``none``, or a number, or ``at least`` it where a limit of the input ended it."""
    if not answer.value:
        return "none"
    return f"{answer.value} (limit)" if answer.bounded else str(answer.value)


def _note(grid: Frontier) -> tuple[str, ...]:
    lines = [
        "Bytes are what nvidia-smi would show. T: TIGHT, fits as expected but not at the upper end; x: does not fit. "
        "The next batch, or the next longer sequence, no longer fits.",
        BY_SHARE,
    ]
    made_for = grid.plan.model.spec.max_position_embeddings
    if made_for and any(edge.fits.value > made_for for edge in grid.by_batch):
        lines.append(f"The model's max_position_embeddings is {made_for}; memory allows longer sequences.")
    return tuple(lines)


def _sentence(grid: Frontier) -> str:
    fitting = [cell for row in grid.cells for cell in row if cell.verdict == "fits"]
    name = f"{grid.plan.model.spec.name} with {grid.plan.setup.name} on {grid.device.name}"
    if not fitting:
        least = grid.cells[0][0]
        over = least.upper_bytes - grid.usable_bytes
        tight = "TIGHT" if any(cell.verdict == "tight" for row in grid.cells for cell in row) else "NO"
        return f"{tight}: no cell of the grid FITS for {name}; batch {least.batch} at {least.length} may need {format_bytes(over)} too much."
    best = max(fitting, key=lambda cell: (cell.batch * cell.length, cell.length))
    return (
        f"FITS: {len(fitting)} of {len(grid.batches) * len(grid.lengths)} cells for {name}; the most tokens are "
        f"{best.batch} x {best.length} at {format_bytes(best.device_bytes)}."
    )
