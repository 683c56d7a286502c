"""One look for all pictures: legible in print, without colour, and as a file that does not change by itself."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memplan.documents.escaping import escaped_lines
from memplan.documents.opening import require_folder_of
from memplan.documents.writing import write_file
from memplan.errors import CannotAnswerError, InvalidFileError

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Axes
    from matplotlib.figure import Figure as Figure
else:  # matplotlib is imported when a picture is drawn; those who draw take its names from here
    Axes = Figure = Any

# Eight colours that people with any colour vision tell apart: Okabe and Ito,
# https://jfly.uni-koeln.de/color/ (checked 2026-11-20). Yellow comes last, since it is faint on paper.
PALETTE = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#F0E442")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)), (0, (7, 2)), (0, (3, 3)))
SUFFIXES = (".svg", ".png")
MISSING = "pictures need matplotlib, which is not installed: pip install '.[plots]' in a checkout of memplan"

STYLE: Any = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
    "svg.hashsalt": "memplan",
    "figure.constrained_layout.use": True,
}


def check_drawable(path: Path) -> None:
    """Raise where no picture can be drawn to ``path``: before the work, not after it.

    Raises:
        InvalidFileError: The name ends in something else than ``.svg`` or ``.png``, or there is no such folder.
        CannotAnswerError: matplotlib is missing.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise InvalidFileError([f"{path}: expected a name that ends in {' or '.join(SUFFIXES)}"])
    require_folder_of(path)
    if find_spec("matplotlib") is None:
        raise CannotAnswerError(MISSING)


def new_figure(columns: int = 1, width: float = 7.0, height: float = 4.2) -> tuple[Figure, list[Axes]]:
    """Return a figure of ``width`` x ``height`` inches with ``columns`` axes side by side."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams.update(STYLE)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    return figure, list(figure.subplots(1, columns, squeeze=False)[0])


def line_style(index: int) -> dict[str, Any]:
    """Return colour, marker and dashes of the curve of that number: each alone tells it apart."""
    return {
        "color": PALETTE[index % len(PALETTE)],
        "marker": MARKERS[index % len(MARKERS)],
        "linestyle": LINES[index % len(LINES)],
    }


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as SVG or PNG.

    Raises:
        InvalidFileError: It cannot be written.
    """
    write_file(path, picture_of(figure, path.suffix.lower()))


def picture_of(figure: Figure, suffix: str) -> bytes:
    """Return a figure as a file, without date and version, so that the same record gives the same file.

    Its texts are shown as they are: what stands between dollar signs is no formula.

    Args:
        suffix: ``.svg`` or ``.png``.
    """
    keys = ("Date", "Creator", "Format", "Type") if suffix == ".svg" else ("Software",)
    _show_texts_as_they_are(figure)
    picture = BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # a box stands for it
        figure.savefig(picture, format=suffix[1:], dpi=160, metadata=dict.fromkeys(keys))
    return picture.getvalue()


def _show_texts_as_they_are(figure: Figure) -> None:
    """Escape every text; labels of ticks are made anew when they are drawn, those that are words by a function."""
    from matplotlib.text import Text
    from matplotlib.ticker import FuncFormatter

    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        formatter = axis.get_major_formatter()
        if isinstance(formatter, FuncFormatter):
            axis.set_major_formatter(FuncFormatter(partial(_tick, formatter.func)))
    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        text.set_text(_plain(text.get_text()))


def _tick(label: Callable[[float, int], str], value: float, position: int) -> str:
    return _plain(label(value, position))


def _plain(text: str) -> str:
    return escaped_lines(text).replace("$", r"\$")
