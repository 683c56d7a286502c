"""The answer of ``memplan tables``: the notes' tables as printed, recomputed and corrected."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from memplan.published.judged_tables import STATUSES, JudgedCell, JudgedTable, JudgedTables
from memplan.published.table_schema import PublishedFile
from memplan.report.document import Block, Document, Table
from memplan.units import format_count

WHAT = (
    "recomputed is what the notes' own rule gives, corrected what memplan holds true (real layouts, parameter counts, "
    "routing, planned jobs, our own runs), both in the printed form. A cell is wrong where it does not follow its rule, "
    "is not in its source, differs from corrected, or holds in the notes' own setting only."
)
WIDEST = 116
"""Columns of the widest table of figures; wider ones are told in words."""

SHAPES_TITLE = "The shapes planned to the byte: fp32 weights and gradients, Muon on matrices, AdamW in fp32 on the rest"


def tables_document(judged: JudgedTables, only_wrong: bool, flat: bool = False, summary: bool = False) -> Document:
    """Return the notes' tables.

    Args:
        only_wrong: Whether to leave out the cells that are right.
        flat: Whether all cells come in one table, as CSV needs.
        summary: Whether each table is a row.
    """
    counts = judged.counts
    data: dict[str, Any] = {
        "schema": "memplan/tables/1",
        "tables": [_table_data(table, only_wrong) for table in judged.tables],
        "counts": counts,
        "statuses": dict(STATUSES),
        "rules": dict(judged.rules),
        "statements": [statement for file in judged.files for statement in file.statements],
        "shapes": list(_shapes_data(judged)),
    }
    if flat:
        return Document(data, (_flat(judged.tables, only_wrong),))
    blocks = [_summary(judged.tables)] if summary else _blocks(judged, only_wrong)
    return Document(data, (*blocks, WHAT, _legend(counts), _sentence(counts)))


# ------------------------------------------------------------------ data
def _table_data(judged: JudgedTable, only_wrong: bool) -> dict[str, Any]:
    table, file = judged.table, judged.file
    return {
        "id": table.id,
        "title": table.title,
        "section": table.section,
        "document": file.title,
        "rule": None if table.rule == "none" else table.rule,
        "reason": table.reason,
        "unit": table.unit,
        "source": file.source.url,
        "notes": list(table.notes),
        "counts": judged.counts,
        "cells": [asdict(cell) for cell in _shown(judged, only_wrong)],
    }


def _shown(judged: JudgedTable, only_wrong: bool) -> list[JudgedCell]:
    return [cell for cell in judged.cells if cell.wrong or not only_wrong]


def _shapes_data(judged: JudgedTables) -> Iterator[dict[str, Any]]:
    for shape in judged.shapes:
        yield {key: value for key, value in asdict(shape).items() if key != "document"}


# ------------------------------------------------------------------ text
def _summary(judged: Sequence[JudgedTable]) -> Table:
    headers = ("id", ">cells", ">follow", ">differ", ">no rule", ">wrong", "what it shows")
    rows = []
    for table in judged:
        counts = table.counts
        follow = counts["reproduces"] + counts["within-spread"]
        differ = counts["differs"] + counts["not-in-source"] + counts["left-out"]
        rest = counts["cells"] - follow - differ
        figures = (counts["cells"], follow, differ, rest, counts["wrong"])
        rows.append((table.table.id, *map(str, figures), table.table.title))
    return Table(headers, tuple(rows), "The tables of the notes, published on training in few bits")


def _blocks(judged: JudgedTables, only_wrong: bool) -> list[Block]:
    blocks = [block for table in judged.tables for block in _table_blocks(table, judged, only_wrong)]
    return blocks + [block for file in judged.files for block in _file_blocks(file, judged)]


def _table_blocks(table: JudgedTable, judged: JudgedTables, only_wrong: bool) -> tuple[Block, ...]:
    """Return one table and what is to be said of it; nothing where no cell is shown."""
    cells = _shown(table, only_wrong)
    if not cells:
        return ()
    shown, reasons = _figures(table, cells), _reasons(cells)
    if _width(shown) > WIDEST:
        shown, reasons = _words(table, cells), []
    names = sorted({cell.rule for cell in cells if cell.rule})
    lines = [*reasons, *(f"Rule {name}: {judged.rules[name]}" for name in names)]
    lines += [f"Note: {note}" for note in table.table.notes]
    lines.append(f"Source: {table.file.source.url}, {table.table.section}")
    return shown, tuple(lines)


def _figures(judged: JudgedTable, cells: Sequence[JudgedCell]) -> Table:
    """Return one table's cells, a column for each figure; columns that no cell fills are left out."""
    columns = {
        "row": [cell.row for cell in cells],
        "column": [cell.column for cell in cells],
        "printed": [cell.printed for cell in cells],
        "recomputed": [cell.recomputed or "" for cell in cells],
        "corrected": [cell.corrected or "" for cell in cells],
        "status": [_verdict(cell) for cell in cells],
    }
    filled = {name: values for name, values in columns.items() if any(values)}
    return Table(tuple(filled), tuple(zip(*filled.values(), strict=True)), _title(judged))


def _words(judged: JudgedTable, cells: Sequence[JudgedCell]) -> Table:
    """Return the cells of a table of claims, with what became of each in words."""
    rows = []
    several = len({cell.column for cell in cells}) > 1
    for cell in cells:
        name = f"{cell.row} | {cell.column}" if several else cell.row
        parts = [_verdict(cell)]
        parts += [f"recomputed {cell.recomputed}"] if cell.recomputed is not None else []
        parts += [f"corrected {cell.corrected}"] if cell.corrected is not None else []
        text = "; ".join(parts)
        rows.append((name, cell.printed, f"{text}. {cell.reason}" if cell.reason else text))
    return Table(("cell", "printed", "what became of it"), tuple(rows), _title(judged))


def _title(judged: JudgedTable) -> str:
    unit = f", {judged.table.unit}" if judged.table.unit else ""
    return f"{judged.table.id}  {judged.table.title}{unit}"


def _verdict(cell: JudgedCell) -> str:
    """Return a cell's status, and that it is wrong where the status does not say so."""
    said = cell.status in ("differs", "not-in-source", "left-out")
    return f"{cell.status}, wrong" if cell.wrong and not said else cell.status


def _width(table: Table) -> int:
    lines = [table.names, *table.rows]
    return sum(max(len(line[index]) for line in lines) + 2 for index in range(len(table.headers)))


def _reasons(cells: Sequence[JudgedCell]) -> list[str]:
    """Return each reason once, with the cells that it is about."""
    by_reason: dict[str, list[JudgedCell]] = {}
    for cell in cells:
        if cell.reason:
            by_reason.setdefault(cell.reason, []).append(cell)
    return [f"{_about(group, cells)}: {reason}" for reason, group in by_reason.items()]


def _about(group: Sequence[JudgedCell], cells: Sequence[JudgedCell]) -> str:
    """Return what cells have in common: all of the table, of their columns or of their rows, or each by name."""
    if len(group) == len(cells) > 1:
        return "All"
    columns, rows = ({getattr(cell, side) for cell in group} for side in ("column", "row"))
    if len(group) == sum(cell.column in columns for cell in cells):
        return ", ".join(dict.fromkeys(cell.column for cell in group))
    if len(group) == sum(cell.row in rows for cell in cells):
        return ", ".join(dict.fromkeys(cell.row for cell in group))
    return "; ".join(f"{cell.row} | {cell.column}" for cell in group)


def _flat(judged: Sequence[JudgedTable], only_wrong: bool) -> Table:
    headers = ("id", "row", "column", "printed", "rule", "recomputed", "corrected", "status", "wrong", "reason")
    rows = tuple(
        (
            table.table.id,
            cell.row,
            cell.column,
            cell.printed,
            cell.rule or "",
            cell.recomputed or "",
            cell.corrected or "",
            cell.status,
            "yes" if cell.wrong else "no",
            cell.reason,
        )
        for table in judged
        for cell in _shown(table, only_wrong)
    )
    return Table(headers, rows)


def _file_blocks(file: PublishedFile, judged: JudgedTables) -> list[Block]:
    """Return what a document's paper says, and its shapes."""
    blocks: list[Block] = []
    if file.statements and file.paper is not None:
        blocks.append((f"What the paper says, {file.paper.url}:", *(f"  {line}" for line in file.statements)))
    rows = tuple(
        (
            row.shape,
            row.optimizer,
            format_count(row.parameters),
            f"{row.weight_bytes:,}",
            f"{row.gradient_bytes:,}",
            f"{row.matrix_state_bytes:,}",
            f"{row.state_bytes:,}",
        )
        for row in judged.shapes
        if row.document == file.title
    )
    if rows:
        headers = ("shape", "optimizer", ">parameters", ">weights", ">gradients", ">states, matrices", ">states, all")
        blocks.append(Table(headers, rows, SHAPES_TITLE))
    return blocks


def _legend(counts: dict[str, int]) -> tuple[str, ...]:
    width = max(map(len, STATUSES))
    return tuple(
        f"{counts[status]:>4}  {status:<{width}}  {text}" for status, text in STATUSES.items() if counts[status]
    )


def _sentence(counts: dict[str, int]) -> str:
    tables = "1 table" if counts["tables"] == 1 else f"{counts['tables']} tables"
    parts = ", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status])
    return f"{counts['cells']} cells in {tables}: {parts}; {counts['wrong']} are wrong."
