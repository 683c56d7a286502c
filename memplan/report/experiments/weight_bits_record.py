"""The record of ``memplan lab weight-bits`` as a table and a picture."""

from typing import Any

from memplan.report.document import Table
from memplan.report.experiments.gaps import Series, draw_gaps, gap_table, line_label
from memplan.report.figures import Figure, new_figure

ROUNDINGS = {"nearest": "to nearest", "stochastic": "stochastically"}


def blocks(record: dict[str, Any]) -> tuple[Table | str, ...]:
    """Return one table."""
    return (gap_table(record["rows"], ("weights", "rounding"), "Weights without a master copy"),)


def figure(record: dict[str, Any]) -> Figure:
    """Return gaps to fp32 weights by format, for both roundings."""
    rows = [row for row in record["rows"] if row["rounding"] in ROUNDINGS]
    lines = {row["weights"]: line_label(row["weights"], row["bytes_per_parameter"]) for row in rows}
    series = [
        Series(f"rounded {name}", {lines[row["weights"]]: row for row in rows if row["rounding"] == rounding}, place)
        for place, (rounding, name) in enumerate(ROUNDINGS.items(), 1)
    ]
    drawn, (axes,) = new_figure(width=7.0, height=3.9)
    draw_gaps(axes, list(lines.values()), series, apart=0.26)
    axes.set_title(_headline(rows))
    axes.set_ylabel("Weights, and bytes for each")
    axes.set_xlabel("Validation loss above that with fp32 weights (bar: seeds)")
    axes.legend(loc="upper center", bbox_to_anchor=(0.45, -0.17), ncols=2)
    return drawn


def _headline(rows: list[dict[str, Any]]) -> str:
    """Return what is to be seen, as far as the rows say so."""
    losses: dict[str, dict[str, float]] = {name: {} for name in ROUNDINGS}
    for row in rows:
        if row["weights"] != "bf16":
            losses[row["rounding"]][row["weights"]] = row["loss"]["mean"] if row["loss"] else float("inf")
    nearest, random = losses["nearest"], losses["stochastic"]
    if nearest and all(random.get(name, float("inf")) < loss for name, loss in nearest.items()):
        return "Without a master copy stochastic rounding beats nearest"
    return "Weights without a master copy"
