"""``memplan max`` as a picture: what the notes print, the uniform bound, and a model that really fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from memplan.errors import InvalidFileError
from memplan.report.figures import MARKERS, PALETTE, Axes, Figure, new_figure
from memplan.report.largest.largest_value_answer import WORDS

if TYPE_CHECKING:
    from memplan.solver.largest_per_device import Largest, Quantity

MOST_ROWS = 40
KINDS = (
    ("notes_max_parameters", "what the published tables print (memplan tables)", "none"),
    ("max_parameters", "bound: usable bytes over true bytes per parameter", "none"),
    ("largest_fitting_parameters", "largest catalog model that fits, planned whole", "full"),
)
"""Key of a row, what the legend calls it, and how its marker is filled."""


def largest_figure(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Return a picture of the rows of ``memplan max``: a panel for each config, a line for each GPU.

    Where the notes have figures, only GPUs and configs that they have are drawn.

    Raises:
        InvalidFileError: There are more GPUs than a picture can hold.
    """
    if len({row["gpu"] for row in rows}) == 1:
        return _by_config(rows)
    noted = [row for row in rows if "notes_max_parameters" in row]
    shown = noted or list(rows)
    configs = list(dict.fromkeys(row["config"] for row in shown))
    gpus = list(dict.fromkeys(row["gpu"] for row in shown))
    if len(gpus) > MOST_ROWS:
        raise InvalidFileError([f"--plot: {len(gpus)} GPUs are too many for one picture; give --gpu"])
    height = 1.6 + 0.34 * len(gpus)
    figure, panels = new_figure(len(configs), width=3.4 + 2.6 * len(configs), height=height)
    for axes, config in zip(panels, configs, strict=True):
        mine = [row for row in shown if row["config"] == config]
        _panel(axes, gpus, mine)
        axes.set_title(f"{config}: {mine[0]['bytes_per_parameter']:.2f} bytes per parameter")
        axes.set_xlabel("parameters, billions")
    for axes in panels[1:]:
        axes.tick_params(labelleft=False)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=1)
    return figure


def _by_config(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Return a bar for each config on one GPU: the largest catalog model that fits, by its name."""
    figure, (axes,) = new_figure(height=1.4 + 0.4 * len(rows))
    sizes = [row["largest_fitting_parameters"] / 1e9 for row in rows]
    places = range(len(rows))
    axes.barh(places, sizes, color="#0072b2", height=0.62)
    for place, row, size in zip(places, rows, sizes, strict=True):
        axes.text(size, place, f" {row['largest_fitting_model'] or 'none'} ({size:.2f}B)", va="center", fontsize=8)
    axes.set_yticks(places, [row["config"] for row in rows])
    title = f"largest catalog model that fits on {rows[0]['gpu']}, planned whole"
    axes.set(
        ylim=(len(rows) - 0.4, -0.6), xlim=(0, 1.45 * max(*sizes, 0.1)), xlabel="parameters, billions", title=title
    )
    axes.grid(visible=False, axis="y")
    return figure


def _panel(axes: Axes, gpus: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    lines = {gpu: place for place, gpu in enumerate(gpus)}
    for row in rows:
        sizes = [row[key] / 1e9 for key, _, _ in KINDS if row.get(key)]
        axes.plot([min(sizes), max(sizes)], [lines[row["gpu"]]] * 2, color="#bbbbbb", linewidth=1.2, zorder=1)
    for index, (key, label, filled) in enumerate(KINDS):
        points = [(row[key] / 1e9, lines[row["gpu"]]) for row in rows if row.get(key)]
        if points:
            axes.plot(
                *zip(*points, strict=True),
                linestyle="",
                marker=MARKERS[2 - index],
                markersize=(10, 7, 6)[index],
                zorder=4 - index,
                fillstyle="full" if filled == "full" else "none",
                markeredgewidth=1.6,
                color=PALETTE[(2, 1, 0)[index]],
                label=label,
            )
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xticks([tick for tick in (0.5, 1, 2, 5, 10, 20, 50, 100) if _within(tick, rows)])
    axes.minorticks_off()
    axes.set_yticks(range(len(gpus)), gpus)
    axes.set_ylim(len(gpus) - 0.5, -0.5)


def _within(tick: float, rows: Sequence[Mapping[str, Any]]) -> bool:
    sizes = [row[key] / 1e9 for row in rows for key, _, _ in KINDS if row.get(key)]
    return bool(min(sizes) * 0.7 <= tick <= max(sizes) * 1.4)


def values_figure(what: Quantity, title: str, rows: Sequence[Largest]) -> Figure:
    """Return a bar for each GPU: the largest value that FITS, and up to which it is TIGHT.

    Raises:
        InvalidFileError: There are more GPUs than a picture can hold.
    """
    if len(rows) > MOST_ROWS:
        raise InvalidFileError([f"--plot: {len(rows)} GPUs are too many for one picture; give --gpu"])
    shown = sorted(rows, key=lambda row: (-row.fits.value, row.device.gpu.cuda_total_bytes, row.device.name))
    figure, (axes,) = new_figure(height=1.6 + 0.34 * len(shown))
    places = range(len(shown))
    tight = [row.tight.value for row in shown]
    fits = [row.fits.value for row in shown]
    axes.barh(places, tight, color="#f6d58a", hatch="///", edgecolor="#e69f00", height=0.62, label="TIGHT: may not fit")
    axes.barh(places, fits, color="#0072b2", height=0.62, label="FITS at the upper end")
    for place, row in zip(places, shown, strict=True):
        axes.text(max(row.fits.value, row.tight.value), place, f" {row.fits.value:,}", va="center", fontsize=8)
    axes.set_yticks(places, [row.device.counted_name for row in shown])
    axes.set(ylim=(len(shown) - 0.4, -0.6), xlim=(0, 1.15 * max(*tight, *fits, 1)), xlabel=WORDS[what], title=title)
    axes.grid(visible=False, axis="y")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8)
    return figure
