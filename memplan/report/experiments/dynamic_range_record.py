"""The record of ``memplan lab dynamic-range`` as a table and a picture."""

from typing import Any

from memplan.report.document import Table
from memplan.report.figures import PALETTE, Axes, Figure, new_figure

NAMES = {
    "adam-v": "Adam's v, all weights",
    "adam-v-matrices": "Adam's v, matrices",
    "adam-m": "Adam's m, all weights",
    "muon-momentum": "Muon's momentum",
    "newton-schulz-x-first": "Newton-Schulz X, start",
    "newton-schulz-x-last": "Newton-Schulz X, end",
}
CLAIMS = {
    "adam-v": (-30.0, 2.0, "the notes: 1e-30 to 1e+2"),
    "newton-schulz-x-last": (-2.0, -1.0, "the notes: to 0.1, one decade"),
}
"""What the notes say, in powers of ten; of X they give the largest magnitude, and one order of magnitude."""

NOTES_DECADES = 32


def blocks(record: dict[str, Any]) -> tuple[Table | str, ...]:
    """Return a table of the spans at each step."""
    cells = [
        (
            NAMES[row["quantity"]],
            str(row["step"]),
            *(f"{row[key]['mean']:.1f}" for key in ("lowest", "low", "median", "high", "largest", "decades")),
            f"{row['zeros_percent']['mean']:.2g}",
            _bits(row),
        )
        for row in record["rows"]
    ]
    headers = (
        "log10 of", ">step", ">lowest", ">0.1 %", ">median", ">99.9 %", ">largest", ">decades", ">zeros, %", ">bits",
    )  # fmt: skip
    return (Table(headers, tuple(cells), "Spans in powers of ten, means of the seeds"),)


def _bits(row: dict[str, Any]) -> str:
    return "-" if row["absmax_bits"] is None else f"{row['absmax_bits']['mean']:.0f}"


def figure(record: dict[str, Any]) -> Figure:
    """Return the spans after the last step, beside the notes' claims."""
    last = max(row["step"] for row in record["rows"])
    rows = {row["quantity"]: row for row in record["rows"] if row["step"] == last}
    drawn, (axes,) = new_figure(width=7.4, height=4.4)
    for height, quantity in enumerate(NAMES):
        _draw(axes, height, rows[quantity])
        if quantity in CLAIMS:
            _claim(axes, height - 0.3, *CLAIMS[quantity])
    axes.set_yticks(range(len(NAMES)), list(NAMES.values()))
    axes.set_ylim(len(NAMES) - 0.5, -0.9)
    axes.set_xlim(-31, 3)
    axes.set_xticks(range(-30, 5, 5), [f"1e{power:+d}" if power else "1" for power in range(-30, 5, 5)])
    axes.set_xlabel("Magnitude of elements that are not zero (logarithmic)")
    widest = format(rows["adam-v"]["decades"]["mean"], ".0f")
    axes.set_title(f"Adam's second moment spans {widest} decades after {last} steps, not {NOTES_DECADES}")
    _legend(axes)
    return drawn


def _draw(axes: Axes, height: float, row: dict[str, Any]) -> None:
    ends = row["lowest"]["low"], row["largest"]["high"]
    axes.plot(ends, [height, height], color=PALETTE[0], linewidth=1, marker="|", markersize=8)
    axes.plot(
        [row["low"]["mean"], row["high"]["mean"]],
        [height, height],
        color=PALETTE[1],
        linewidth=6,
        solid_capstyle="butt",
    )
    axes.plot([row["median"]["mean"]], [height], color="white", marker="o", markeredgecolor=PALETTE[0], markersize=6)


def _claim(axes: Axes, height: float, low: float, high: float, said: str) -> None:
    color = PALETTE[2]
    axes.barh(height, high - low, 0.16, low, facecolor="none", edgecolor=color, hatch="////", linewidth=1)
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
    if high - low > 10:
        axes.text(low, height - 0.32, said, ha="left", va="center", fontsize=9, color=color, bbox=box)
    else:
        axes.text(low - 0.4, height, said, ha="right", va="center", fontsize=9, color=color, bbox=box)


def _legend(axes: Axes) -> None:
    axes.plot([], [], color=PALETTE[0], linewidth=1, marker="|", label="smallest to largest")
    axes.plot([], [], color=PALETTE[1], linewidth=6, label="0.1 % to 99.9 %")
    axes.plot([], [], linestyle="", color="white", marker="o", markeredgecolor=PALETTE[0], label="median")
    axes.legend(loc="upper center", bbox_to_anchor=(0.4, -0.16), ncols=3)
