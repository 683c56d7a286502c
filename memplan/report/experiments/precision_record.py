"""Tables and picture of ``memplan lab precision``."""

from typing import Any

from memplan.report.document import Table
from memplan.report.experiments import interval_text, row_of
from memplan.report.figures import PALETTE, Axes, Figure, line_style, new_figure

Row = dict[str, Any]

PRODUCTS = {"input": "X alone", "gram": "factors of X Xᵀ", "all": "all products", "all-rows": "all, a scale a row"}
STYLES = ("fp32", "bf16", "int4", "fp16", "fp8-e4m3", "fp8-e5m2", "int8", "int8-native")
FORMATS = ("fp8-e4m3", "fp8-e5m2", "int8", "int4")
DIVERGED = 2.0
"""Largest-element error beyond which a result is lost."""

EDGE = 1e3
"""Largest error drawn at its place."""


def blocks(record: Row) -> tuple[Table | str, ...]:
    """Return errors, differences and times, both errors by iteration, buffers and traffic."""
    return (
        _results(record),
        _by_iteration(record, "frobenius", "Frobenius error"),
        _by_iteration(record, "largest_element", "Largest-element error"),
        _buffers(record),
        _traffic(record),
    )


def figure(record: Row) -> Figure:
    """Return error and difference by iteration, X alone being rounded, beside the error when more is rounded."""
    drawn, (left, middle, right) = new_figure(3, width=12.0, height=4.6)
    width, precisions = record["settings"]["widths"][0], record["settings"]["precisions"]
    for name in precisions:
        at = {"precision": name, "products": "input", "rows": width}
        course = [row for row in record["rows"] if row.items() >= at.items()]
        _course(left, course, "frobenius", name, name)
        _course(middle, course, "difference", name, "")
    left.set_ylabel("Frobenius error, norm(X Xᵀ - I) / √n")
    middle.set_ylabel("Largest difference of X from fp32's")
    for axes in (left, middle):
        axes.set_yscale("log")
        axes.set_xlabel("Iterations")
        axes.set_xticks(range(1, record["settings"]["iterations"] + 1))
    left.set_title("Error, X alone rounded")
    middle.set_title("Difference, X alone rounded")
    fp32 = row_of(record["rows"], precision="fp32", rows=width, iterations=record["settings"]["iterations"])
    if fp32 and fp32["frobenius"] and "int4" in precisions:
        point = (fp32["iterations"], fp32["frobenius"]["mean"])
        left.annotate("all others", point, (-8, -14), textcoords="offset points", ha="right", fontsize=9)
        left.set_ylim(bottom=0.4 * point[1])
    _by_products(right, record, width)
    drawn.suptitle(_title(record, width), fontsize=12)
    drawn.legend(loc="outside lower center", ncols=8)
    return drawn


def _style(name: str) -> dict[str, Any]:
    """Return the look of a precision: INT4 stands out, and nothing that is thin is yellow."""
    style = line_style(STYLES.index(name))
    return {**style, "color": "#777777"} if style["color"] == PALETTE[-1] else style


def _title(record: Row, width: int) -> str:
    for count in range(1, record["settings"]["iterations"] + 1):
        row = row_of(record["rows"], precision="int4", products="input", rows=width, iterations=count)
        if row and (row["largest_element"] is None or row["largest_element"]["low"] > DIVERGED):
            where = f"{width}x{width}, {record['settings']['schedule']}"
            return f"INT4 Newton-Schulz diverges at iteration {count}; 8 bits hold where X alone is rounded ({where})"
    return f"Newton-Schulz by precision ({width}x{width}, {record['settings']['schedule']})"


def _course(axes: Axes, course: list[Row], key: str, name: str, label: str) -> None:
    shown = [row for row in course if row[key] and row[key]["mean"] > 0]
    style = _style(name)
    x, values = [row["iterations"] for row in shown], [row[key] for row in shown]
    axes.plot(x, [value["mean"] for value in values], label=label or None, zorder=3 if name == "int4" else 2, **style)
    low, high = [value["low"] for value in values], [value["high"] for value in values]
    axes.fill_between(x, low, high, color=style["color"], alpha=0.18, linewidth=0)


def _by_products(axes: Axes, record: Row, width: int) -> None:
    """Draw the error at the last iteration, a band of dots for each choice of what is rounded."""
    settings = record["settings"]
    chosen = [name for name in PRODUCTS if name in settings["products"]]
    several = [name for name in settings["precisions"] if name in FORMATS]
    for index, name in enumerate(several):
        at = {"precision": name, "rows": width, "iterations": settings["iterations"]}
        for place, which in enumerate(chosen):
            row = row_of(record["rows"], products=which, **at)
            if row:
                value = row["frobenius"]["mean"] if row["frobenius"] else None
                _dot(axes, value, place + 0.16 * (index - (len(several) - 1) / 2), name)
    reference = row_of(record["rows"], precision="fp32", rows=width, iterations=settings["iterations"])
    if reference and reference["frobenius"]:
        axes.axvline(reference["frobenius"]["mean"], color="#000000", linewidth=1, linestyle=":")
        axes.annotate(" fp32", (reference["frobenius"]["mean"], -0.5), ha="left", va="center", fontsize=9)
    axes.set_xscale("log")
    axes.set_xlim(0.2, EDGE * 2)
    axes.set_yticks(range(len(chosen)), [PRODUCTS[name] for name in chosen])
    axes.set_ylim(len(chosen) - 0.5, -0.6)
    axes.set_xlabel("Frobenius error")
    axes.set_title(f"What is rounded, {settings['iterations']} iterations")


def _dot(axes: Axes, value: float | None, place: float, name: str) -> None:
    """Draw a value; what lies beyond the edge is an arrow there, with its value beside it."""
    style = {**_style(name), "linestyle": "none", "markersize": 7}
    if value is not None and value <= EDGE:
        axes.plot([value], [place], **style)
        return
    axes.plot([EDGE], [place], **{**style, "marker": ">"})
    text = "not finite" if value is None else f"{value:.0e}".replace("e+", "e")
    axes.annotate(f"{name} {text}  ", (EDGE, place), ha="right", va="center", fontsize=9)


def _results(record: Row) -> Table:
    last = record["settings"]["iterations"]
    lines = []
    for width in record["settings"]["widths"]:
        fp32 = row_of(record["rows"], precision="fp32", rows=width, iterations=last)
        for row in record["rows"]:
            if (row["rows"], row["iterations"]) != (width, last):
                continue
            speed = _seconds(fp32) / _seconds(row) if fp32 else 0
            lines.append(
                (
                    str(width),
                    row["precision"],
                    row["products"],
                    interval_text(row["frobenius"]),
                    interval_text(row["largest_element"]),
                    _mean(row["difference"]),
                    f"{1000 * _seconds(row):.3g}",
                    f"{speed:.2g}x",
                )
            )
    headers = ("n", "precision", "rounded", ">Frobenius", ">largest element", ">from fp32", ">least ms", ">speed")
    return Table(headers, tuple(lines), f"After {last} iterations of {record['settings']['schedule']}")


def _seconds(row: Row) -> float:
    """Return the least time of any seed, which findings compare too: the first can include the loading of kernels."""
    return float(row["seconds"]["low"])


def _by_iteration(record: Row, key: str, words: str) -> Table:
    settings = record["settings"]
    counts = range(1, settings["iterations"] + 1)
    lines = []
    for width in settings["widths"]:
        for name in settings["precisions"]:
            at = {"precision": name, "products": "input", "rows": width}
            cells = [row_of(record["rows"], iterations=count, **at) for count in counts]
            if any(cells):
                lines.append((str(width), name, *(_mean(row[key] if row else None) for row in cells)))
    return Table(("n", "precision", *(f">{count}" for count in counts)), tuple(lines), f"{words} by iteration, X alone")


def _buffers(record: Row) -> Table:
    keys = ("notes_bytes", "min_bytes", "fast_bytes", "torch_muon_bytes")
    headers = ("precision", ">notes' 3 n^2", ">memplan min", ">memplan fast", ">torch.optim.Muon")
    return _computed(record, "buffers", keys, headers, "Temporary MB for one {n}x{n} matrix; - is not implemented")


def _traffic(record: Row) -> Table:
    keys = ("notes_bytes", "fused_bytes", "unfused_bytes")
    headers = ("precision", ">notes' 8 n^2", ">fused, 10 n^2", ">unfused, 15 n^2", ">operations per byte")
    return _computed(record, "traffic", keys, headers, "MB moved by one iteration on a {n}x{n} matrix")


def _computed(record: Row, table: str, keys: tuple[str, ...], headers: tuple[str, ...], title: str) -> Table:
    rows = [row for row in record.get("computed", ()) if row["table"] == table]
    lines = []
    for row in rows:
        cells = [f"{row[key] / 1e6:.0f}" if key in row else "-" for key in keys]
        more = [f"{row['operations_per_byte']:,}"] if "operations_per_byte" in row else []
        lines.append((row["precision"], *cells, *more))
    return Table(headers, tuple(lines), title.format(n=rows[0]["rows"]) if rows else "")


def _mean(value: Row | None) -> str:
    return "not finite" if value is None else f"{value['mean']:.3g}"
