"""The answer of ``memplan tables``: the notes' tables as printed, recomputed and corrected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memplan.catalog.catalog import Catalog
from memplan.published.judgement import STATUSES, Judge, JudgedCell, JudgedTable, counts_of
from memplan.published.planned import parameters, shape_plan
from memplan.published.rules import RULES
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


def tables_document(
    text: str | None, only_wrong: bool, catalog: Catalog, flat: bool = False, whole: bool = False
) -> Document:
    """Return the notes' tables.

    Args:
        text: Id of a table, or of a document such as ``s000``; None for all.
        only_wrong: Whether to leave out the cells that are right.
        catalog: Where data, models, configs and GPUs come from.
        flat: Whether all cells come in one table, as CSV needs.
        whole: Whether the cells are wanted where no id was given; else a row for each table.

    Raises:
        UnknownNameError: No table or document has the id.
    """
    judge = Judge(catalog)
    summary = text is None and not (only_wrong or flat or whole)
    judged = [judge.table(table, remarks=not summary) for table in judge.library.chosen(text)]
    files = list({id(file): file for table in judged for file in [judge.library.file_of[table.table.id]]}.values())
    counts = counts_of(judged)
    data: dict[str, Any] = {
        "schema": "memplan/tables/1",
        "tables": [_table_data(table, judge, only_wrong) for table in judged],
        "counts": counts,
        "statuses": dict(STATUSES),
        "rules": {name: rule.text for name, rule in RULES.items()},
        "statements": [statement for file in files for statement in file.statements],
        "shapes": [row for file in files for row in _shapes_data(file, catalog)],
    }
    if flat:
        return Document(data, (_flat(judged, only_wrong),))
    blocks = [_summary(judged)] if summary else _blocks(judged, judge, only_wrong)
    if not summary:
        blocks += [block for file in files for block in _file_blocks(file, catalog)]
    return Document(data, (*blocks, WHAT, _legend(counts), _sentence(counts)))


# ------------------------------------------------------------------ data
def _table_data(judged: JudgedTable, judge: Judge, only_wrong: bool) -> dict[str, Any]:
    table = judged.table
    file = judge.library.file_of[table.id]
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
        "cells": [_cell_data(cell) for cell in _shown(judged, only_wrong)],
    }


def _cell_data(cell: JudgedCell) -> dict[str, Any]:
    return {name: getattr(cell, name) for name in JudgedCell.__slots__}


def _shown(judged: JudgedTable, only_wrong: bool) -> list[JudgedCell]:
    return [cell for cell in judged.cells if cell.wrong or not only_wrong]


def _shapes_data(file: PublishedFile, catalog: Catalog) -> list[dict[str, Any]]:
    rows = []
    for name, shape in file.shapes.items():
        for optimizer in ("muon-fp32", "muon-int8"):
            plan = shape_plan(name, shape, optimizer, catalog)
            matrices = [entry for entry in plan.states.tensors if entry.tensor.role == "hidden_matrix"]
            rows.append(
                {
                    "shape": name,
                    "optimizer": optimizer,
                    "parameters": parameters(plan),
                    "matrix_parameters": sum(e.tensor.elements * e.tensor.count for e in matrices),
                    "weight_bytes": plan.states.weight_bytes,
                    "gradient_bytes": plan.states.gradient_bytes,
                    "matrix_state_bytes": sum(e.state_bytes * e.tensor.count for e in matrices),
                    "state_bytes": plan.states.state_bytes,
                    "persistent_bytes": plan.persistent_bytes,
                }
            )
    return rows


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
    return Table(headers, tuple(rows), "The tables of the notes")


def _blocks(judged: Sequence[JudgedTable], judge: Judge, only_wrong: bool) -> list[Block]:
    blocks: list[Block] = []
    for table in judged:
        cells = _shown(table, only_wrong)
        if not cells:
            continue
        shown = _figures(table, cells)
        reasons = _reasons(cells)
        if _width(shown) > WIDEST:
            shown, reasons = _words(table, cells), []
        names = sorted({cell.rule for cell in cells if cell.rule})
        lines = [*reasons, *(f"Rule {name}: {RULES[name].text}" for name in names)]
        lines += [f"Note: {note}" for note in table.table.notes]
        lines.append(f"Source: {judge.library.file_of[table.table.id].source.url}, {table.table.section}")
        blocks += [shown, tuple(lines)]
    return blocks


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
    kept = {name: values for name, values in columns.items() if any(values)}
    return Table(tuple(kept), tuple(zip(*kept.values(), strict=True)), _title(judged))


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


def _file_blocks(file: PublishedFile, catalog: Catalog) -> list[Block]:
    blocks: list[Block] = []
    if file.statements and file.paper is not None:
        blocks.append((f"What the paper says, {file.paper.url}:", *(f"  {line}" for line in file.statements)))
    rows = [
        (
            data["shape"],
            data["optimizer"],
            format_count(data["parameters"]),
            f"{data['weight_bytes']:,}",
            f"{data['gradient_bytes']:,}",
            f"{data['matrix_state_bytes']:,}",
            f"{data['state_bytes']:,}",
        )
        for data in _shapes_data(file, catalog)
    ]
    if rows:
        headers = ("shape", "optimizer", ">parameters", ">weights", ">gradients", ">states, matrices", ">states, all")
        blocks.append(Table(headers, tuple(rows), SHAPES_TITLE))
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
