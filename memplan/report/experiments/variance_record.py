"""Tables and picture of ``memplan lab variance``."""

from collections.abc import Mapping
from typing import Any

from memplan.report.document import Table
from memplan.report.experiments import interval_text
from memplan.report.figures import MARKERS, PALETTE, Axes, Figure, new_figure

Row = dict[str, Any]

NAMES = {"raw": "raw gradient", "cubic": "cubic", "you-jiacheng": "you-jiacheng", "qr": "QR"}
ELEMENTS = {"element_variance": "element variance, as printed", "relative_variance": "relative to mean square"}
NORMS = {"norm_dispersion": "variance / mean, printed as “Norm CV”", "norm_cv": "coefficient of variation"}


def blocks(record: Row) -> tuple[Table | str, ...]:
    """Return the notes' table, and what it leaves out beside it."""
    keys = ("error", "element_variance", "norm_dispersion")
    headers = ("method", ">error", ">element variance", ">norm variance/mean")
    more = ("norm_cv", "relative_variance", "signal")
    titles = ("method", ">norm CV", ">relative variance", ">cosine with the direction")
    width, samples = record["settings"]["width"], record["settings"]["samples"]
    return (
        Table(headers, _lines(record, keys), f"The notes' table: {samples} gradients of {width}x{width} for each seed"),
        Table(titles, _lines(record, more), "What it leaves out"),
    )


def figure(record: Row) -> Figure:
    """Return spread of elements and spread of norms, as printed and relative to their own size."""
    drawn, (left, right) = new_figure(2, width=9.0, height=3.8)
    _dots(left, record, ELEMENTS)
    _dots(right, record, NORMS)
    right.tick_params(labelleft=False)
    left.set_title("Elements")
    right.set_title("Norms")
    left.set_xlabel("Variance over the samples")
    right.set_xlabel("Spread of the results' Frobenius norms")
    samples, width = record["settings"]["samples"], record["settings"]["width"]
    drawn.suptitle(f"{_title(record)} ({samples} noisy {width}x{width} gradients)", fontsize=12)
    return drawn


def _title(record: Row) -> str:
    relative = [row["relative_variance"]["mean"] for row in record["rows"] if row["relative_variance"]]
    if relative and max(relative) - min(relative) < 0.01:
        return "Orthogonalising scales variance, it averages none out"
    return "Spread of results, as printed and relative to their size"


def _dots(axes: Axes, record: Row, keys: Mapping[str, str]) -> None:
    """Draw a row of dots for each method, one for each key, hollow first."""
    rows = record["rows"]
    for index, (key, label) in enumerate(keys.items()):
        color = PALETTE[index + 1]
        face = "none" if index == 0 else color
        places = [place for place, row in enumerate(rows) if row[key]]
        means = [rows[place][key]["mean"] for place in places]
        style: dict[str, Any] = {"marker": MARKERS[index], "color": color, "markerfacecolor": face, "linestyle": "none"}
        axes.plot(means, places, label=label, markersize=8, **style)
    axes.set_xscale("log")
    axes.set_yticks(range(len(rows)), [NAMES.get(row["method"], row["method"]) for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=1, fontsize=9)


def _lines(record: Row, keys: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    return tuple(
        (NAMES.get(row["method"], row["method"]), *(interval_text(row[key]) for key in keys)) for row in record["rows"]
    )
