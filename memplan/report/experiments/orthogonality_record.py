"""Tables and picture of ``memplan lab orthogonality``."""

from collections.abc import Sequence
from typing import Any

from memplan.report.document import Table
from memplan.report.experiments import interval_text, row_of
from memplan.report.figures import Axes, Figure, line_style, new_figure

Row = dict[str, Any]

MEASURES = {"frobenius": "Frobenius error", "largest_element": "Largest-element error"}
FORMULAS = {"frobenius": "norm(X Xᵀ - I) / √rows", "largest_element": "max |X Xᵀ - I|"}
QR = "qr"


def blocks(record: Row) -> tuple[Table | str, ...]:
    """Return both errors by iteration, and all that was measured at the last common iteration."""
    tables = tuple(_by_iteration(record, measure) for measure in _ordered(record))
    return (*tables, _by_shape(record))


def figure(record: Row) -> Figure:
    """Return error by iteration beside error against time."""
    drawn, (left, right) = new_figure(2, width=9.0, height=4.4)
    measure, (rows, columns) = record["settings"]["measure"], record["settings"]["shapes"][0]
    main = [row for row in record["rows"] if (row["rows"], row["columns"]) == (rows, columns)]
    for index, name in enumerate(record["settings"]["schedules"]):
        course = [row for row in main if row["schedule"] == name and row[measure]]
        _curve(left, course, [row["iterations"] for row in course], measure, index, name)
        _curve(right, course, [1000 * row["seconds"]["mean"] for row in course], measure, index, "")
    exact = row_of(main, schedule=QR)
    if exact and exact[measure]:
        style = {**line_style(4), "marker": "*", "linestyle": "none", "markersize": 12, "label": "QR"}
        right.plot([1000 * exact["seconds"]["mean"]], [exact[measure]["mean"]], **style)
    for axes in (left, right):
        axes.set_yscale("log")
        axes.set_ylabel(f"{MEASURES[measure]}, {FORMULAS[measure]}")
    left.set_xlabel("Iterations")
    left.set_xticks(range(1, record["settings"]["iterations"] + 1))
    right.set_xlabel(f"Time on the {record['settings']['device'].upper()} (ms)")
    left.set_title("by iteration")
    right.set_title("against time, each marker an iteration")
    drawn.suptitle(_title(main, measure, f"{rows}x{columns}, {record['settings']['dtype']}"), fontsize=12)
    drawn.legend(loc="outside lower center", ncols=5)
    return drawn


def _title(main: Sequence[Row], measure: str, where: str) -> str:
    last = min(5, max(row["iterations"] for row in main))
    first, second = (row_of(main, schedule=name, iterations=last) for name in ("cubic", "you-jiacheng"))
    if not (first and second and first[measure] and second[measure]):
        return f"Error of Newton-Schulz ({where})"
    ratio = first[measure]["mean"] / second[measure]["mean"]
    word = "five iterations" if last == 5 else f"{last} iterations"
    return f"After {word} tuned coefficients leave {ratio:.1f} times less error than the cubic ({where})"


def _curve(axes: Axes, course: Sequence[Row], x: Sequence[float], measure: str, index: int, label: str) -> None:
    values = [row[measure] for row in course]
    style = line_style(index)
    axes.plot(x, [value["mean"] for value in values], label=label or None, **style)
    low, high = [value["low"] for value in values], [value["high"] for value in values]
    axes.fill_between(x, low, high, color=style["color"], alpha=0.18, linewidth=0)


def _ordered(record: Row) -> list[str]:
    """Return both measures, the one that was asked for first."""
    return sorted(MEASURES, key=lambda name: name != record["settings"]["measure"])


def _by_iteration(record: Row, measure: str) -> Table:
    settings = record["settings"]
    rows, columns = settings["shapes"][0]
    lines = []
    for count in range(1, settings["iterations"] + 1):
        at = {"rows": rows, "columns": columns, "iterations": count}
        cells = [row_of(record["rows"], schedule=name, **at) for name in settings["schedules"]]
        lines.append((str(count), *(_mean(row[measure] if row else None) for row in cells)))
    title = f"{MEASURES[measure]}, {FORMULAS[measure]}: {rows}x{columns}, {settings['dtype']}, mean"
    return Table((">iterations", *(f">{name}" for name in settings["schedules"])), tuple(lines), title)


def _by_shape(record: Row) -> Table:
    """Return every shape at five iterations, or the last where there are fewer, and QR."""
    last = min(5, record["settings"]["iterations"])
    lines = []
    for index, (rows, columns) in enumerate(record["settings"]["shapes"]):
        for name in (*record["settings"]["schedules"], QR):
            count = 0 if name == QR else last if index == 0 else 5
            row = row_of(record["rows"], schedule=name, iterations=count, rows=rows, columns=columns)
            if row is None:
                continue
            seconds = row["seconds"]
            lines.append(
                (
                    f"{rows}x{columns}",
                    name,
                    interval_text(row["frobenius"], ".3f" if count else ".4f"),
                    _mean(row["largest_element"], ".3f" if count else ".4f"),
                    _mean(row["polar_distance"]) if row["polar_distance"] else "-",
                    _milliseconds(seconds),
                )
            )
    headers = ("shape", "method", ">Frobenius (range)", ">largest", ">from U V^T", ">ms")
    return Table(headers, tuple(lines), f"After {last} iterations, and QR")


def _milliseconds(seconds: Row | None) -> str:
    value = 1000 * seconds["mean"] if seconds else 0.0
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _mean(value: Row | None, form: str = ".3f") -> str:
    return "not finite" if value is None else format(value["mean"], form)
