"""The record of ``memplan lab adam-bits`` as a table and a picture."""

from typing import Any

from memplan.report.document import Table
from memplan.report.experiments.gaps import Series, draw_gaps, gap_table, line_label
from memplan.report.figures import Figure, new_figure

KINDS = {
    "linear": "evenly spaced, with zero",
    "no-zero": "evenly spaced, no zero",
    "log": "logarithmic",
    "notes": "the notes'",
}


def blocks(record: dict[str, Any]) -> tuple[Table | str, ...]:
    """Return one table."""
    return (gap_table(record["rows"], ("second_moment",), "Adam's second moment in few bits"),)


def figure(record: dict[str, Any]) -> Figure:
    """Return gaps to an fp32 second moment, by how its levels lie."""
    rows = [row for row in record["rows"] if row["second_moment"] != "fp32"]
    lines = [line_label(row["second_moment"], row["bytes_per_parameter"]) for row in rows]
    series = [
        Series(name, {line: row for line, row in zip(lines, rows, strict=True) if kind_of(row) == kind}, place)
        for place, (kind, name) in enumerate(KINDS.items(), 1)
    ]
    drawn, (axes,) = new_figure(width=6.8, height=3.9)
    draw_gaps(axes, lines, [one for one in series if one.rows])
    axes.set_title("A level at zero breaks Adam's second moment, few bits do not")
    axes.set_ylabel("Second moment, bytes for each")
    axes.set_xlabel("Validation loss above that with fp32 second moments (bar: seeds)")
    axes.legend(loc="upper center", bbox_to_anchor=(0.45, -0.18), ncols=2)
    return drawn


def kind_of(row: dict[str, Any]) -> str:
    """Return how the levels of a row lie, a key of ``KINDS``."""
    name = row["second_moment"]
    if name.startswith("notes"):
        return "notes"
    if name.startswith("log"):
        return "log"
    return "no-zero" if name.endswith("no-zero") else "linear"
