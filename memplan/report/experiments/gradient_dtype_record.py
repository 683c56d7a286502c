"""The record of ``memplan lab gradient-dtype`` as a table and a picture."""

from typing import Any

from memplan.report.document import Table
from memplan.report.experiments.gaps import Series, draw_gaps, gap_table, line_label
from memplan.report.figures import Figure, new_figure

SCALED = {False: "plain cast", True: "one scale for each tensor"}


def blocks(record: dict[str, Any]) -> tuple[Table | str, ...]:
    """Return one table."""
    return (gap_table(record["rows"], ("gradient", "scaled"), "Gradients between backward and step"),)


def figure(record: dict[str, Any]) -> Figure:
    """Return gaps to fp32 gradients by dtype, scaled and not."""
    rows = [row for row in record["rows"] if row["gradient"] != "fp32"]
    lines = {row["gradient"]: line_label(row["gradient"], row["bytes_per_parameter"]) for row in rows}
    series = [
        Series(name, {lines[row["gradient"]]: row for row in rows if row["scaled"] is scaled}, place)
        for place, (scaled, name) in enumerate(SCALED.items(), 1)
    ]
    drawn, (axes,) = new_figure(width=6.6, height=3.1)
    draw_gaps(axes, list(lines.values()), series, apart=0.26)
    axes.set_title(_headline(rows))
    axes.set_ylabel("Gradient, bytes for each")
    axes.set_xlabel("Validation loss above that with fp32 gradients (bar: seeds)")
    axes.legend(loc="upper center", bbox_to_anchor=(0.45, -0.22), ncols=2)
    return drawn


def _headline(rows: list[dict[str, Any]]) -> str:
    """Return what is to be seen, as far as the rows say so."""
    gaps = {row["scaled"]: row["gap_percent"] for row in rows if row["gradient"] == "fp8-e4m3"}
    if len(gaps) == 2 and gaps[True] and (gaps[False] is None or gaps[False]["low"] > gaps[True]["high"]):
        return "E4M3 gradients need a scale"
    return "Gradients between backward and step"
