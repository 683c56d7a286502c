"""``memplan max`` and ``memplan where`` by a rule of the notes: labelled as theirs in every answer."""

from collections.abc import Sequence
from dataclasses import asdict
from fractions import Fraction
from typing import Any

from memplan.published.notes_accounting import ACCOUNTINGS
from memplan.published.notes_answers import NotesLargest, NotesPlacement
from memplan.report.document import Document, Table
from memplan.units import format_bytes, format_count, format_fraction

WARNING = (
    "This is the notes' accounting, not memplan's: nothing is left for activations, embeddings, scales or the CUDA "
    "context but the share that the rule keeps free. Without --accounting memplan plans the real job."
)


def _label(accounting: str) -> str:
    return f"By the notes' accounting {accounting}, not memplan's: {ACCOUNTINGS[accounting]}"


def _cards(row: NotesLargest) -> str:
    return row.gpu if row.count == 1 else f"{row.count} x {row.gpu}"


def max_by_notes_document(rows: Sequence[NotesLargest]) -> Document:
    """Return the largest parameter counts by a rule of the notes."""
    accounting = rows[0].accounting
    cells = tuple(
        (
            accounting,
            _cards(row),
            format_bytes(row.memory_bytes, "GB"),
            row.config,
            format_fraction(row.bytes_per_parameter),
            format_count(row.max_parameters),
        )
        for row in rows
    )
    table = Table(("accounting", "gpu", ">memory", "config", ">B/param", ">max_parameters"), cells, _label(accounting))
    best = max(rows, key=lambda row: row.max_parameters)
    sentence = (
        f"By {accounting} the largest is {format_count(best.max_parameters)} parameters, with {best.config} on "
        f"{_cards(best)}; that is the notes' figure, not memplan's."
    )
    data = {"schema": "memplan/max/1", "accounting": accounting, "rows": [_max_data(row) for row in rows]}
    return Document(data, (table, WARNING, sentence))


def _max_data(row: NotesLargest) -> dict[str, Any]:
    figures = asdict(row) | {"bytes_per_parameter": float(row.bytes_per_parameter)}
    return {**figures, "stack": None, "largest_fitting_model": None, "largest_fitting_parameters": 0}


def where_by_notes_document(model: str, billions: Fraction, rows: Sequence[NotesPlacement]) -> Document:
    """Return the GPUs that the notes say a model needs."""
    accounting = rows[0].accounting
    cells = tuple(
        (accounting, row.config, format_bytes(row.device_bytes, "GB"), str(row.count), row.gpu) for row in rows
    )
    size = f"{format_fraction(billions)}B"
    table = Table(("accounting", "config", ">needed", ">count", "gpu"), cells, f"{_label(accounting)}; {size} nominal")
    counts = " or ".join(f"{row.count} x {row.gpu} ({row.config})" for row in rows)
    sentence = f"By {accounting} {size} parameters take {counts}; that is the notes' figure, not memplan's."
    data = {
        "schema": "memplan/where/1",
        "accounting": accounting,
        "model": model,
        "rows": [_where_data(row) for row in rows],
    }
    return Document(data, (table, WARNING, sentence))


def _where_data(row: NotesPlacement) -> dict[str, Any]:
    return {
        "accounting": row.accounting,
        "config": row.config,
        "gpu": row.gpu,
        "count": row.count,
        "pooled": row.count > 1,
        "usable_bytes": row.usable_bytes,
        "device_bytes": row.device_bytes,
        "upper_bytes": row.device_bytes,
        "verdict": "fits",
    }
