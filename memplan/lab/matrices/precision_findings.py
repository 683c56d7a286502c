"""What follows from Newton-Schulz in several precisions, a sentence each, made from the rows."""

from collections.abc import Sequence
from typing import Any

from memplan.lab.experiment_record import Row
from memplan.lab.matrices.matrix_draws import mean
from memplan.report.experiments import row_of

EXPLODED = 2.0
"""Largest-element error beyond which a result is lost: an entry of X X^T is then off by more than two."""

_ROUNDED = ("fp8-e4m3", "fp8-e5m2", "int8", "int4")


def findings(rows: Sequence[Row], computed: Sequence[Row]) -> list[str]:
    """Return what follows from measured and computed rows."""
    last = max(row["iterations"] for row in rows)
    first, widths = rows[0]["rows"], sorted({row["rows"] for row in rows})
    ends = dict.fromkeys((first, widths[-1]))
    said = [_near(rows, width, last) for width in ends]
    said += [_int4(rows, width, last) for width in widths]
    said += [text for width in reversed(widths) if (text := _flattered(rows, width, last))][:1]
    said += [_all_products(rows, first, last), _fp8(rows, first, last)]
    said += [_times(rows, width, last) for width in ends]
    said += [_buffers(computed), _traffic(computed)]
    return [sentence for sentence in said if sentence]


def _near(rows: Sequence[Row], width: int, last: int) -> str:
    """Name the precisions that lose nothing where X alone is rounded, in the Frobenius measure."""
    at = {"rows": width, "iterations": last, "products": "input"}
    cells = [
        f"{name} {error:.3f}"
        for name in ("fp32", "bf16", "fp16", "fp8-e4m3", "fp8-e5m2", "int8", "int8-native")
        if (error := mean(row_of(rows, precision=name, **at), "frobenius")) is not None
    ]
    if len(cells) < 2:
        return ""
    return f"X alone in each precision, {width}x{width}, {last} iterations, Frobenius error: {', '.join(cells)}."


def _int4(rows: Sequence[Row], width: int, last: int) -> str:
    """Say when INT4 leaves, and for how many matrices."""
    at = {"rows": width, "precision": "int4", "products": "input"}
    course = [(count, row_of(rows, iterations=count, **at)) for count in range(1, last + 1)]
    for count, row in course:
        if row is None:
            return ""
        value = row["largest_element"]
        if value is None or value["low"] > EXPLODED:
            before = mean(course[count - 2][1], "largest_element") if count > 1 else None
            text = "no finite number" if value is None else f"{value['low']:.3g} to {value['high']:.3g}"
            after = "" if before is None else f", after {before:.2g} the iteration before"
            return f"INT4 diverges at iteration {count} at {width}x{width}, for every matrix: {text}{after}."
    value = course[-1][1] and course[-1][1]["largest_element"]
    if value and value["high"] > EXPLODED:
        share = sum(one > EXPLODED for one in value["values"])
        return f"INT4 diverges for {share} of {len(value['values'])} matrices at {width}x{width} in {last} iterations."
    return (
        f"INT4 does not diverge within {last} iterations at {width}x{width}: {_one(course[-1][1], 'largest_element')}."
    )


def _flattered(rows: Sequence[Row], width: int, last: int) -> str:
    """Name an iteration where INT4 looks better than fp32 by one measure, and is worse by the other."""
    for count in range(last, 0, -1):
        at = {"rows": width, "iterations": count, "products": "input"}
        one, two = row_of(rows, precision="int4", **at), row_of(rows, precision="fp32", **at)
        errors = [mean(row, key) for key in ("largest_element", "frobenius") for row in (one, two)]
        if None in errors:
            continue
        largest, reference, frobenius, plain = [error or 0.0 for error in errors]
        if largest < reference and frobenius > plain:
            return (
                f"The largest-element error flatters INT4: after {count} iterations at {width}x{width} it is "
                f"{largest:.3f} against fp32's {reference:.3f}, the Frobenius error {frobenius:.3f} against {plain:.3f}."
            )
    return ""


def _all_products(rows: Sequence[Row], width: int, last: int) -> str:
    at = {"rows": width, "iterations": last}
    parts = []
    for which, words in (
        ("gram", "the factors of X X^T rounded"),
        ("all", "those of all three products"),
        ("all-rows", "the same with one scale a row"),
    ):
        cells = [(name, row_of(rows, precision=name, products=which, **at)) for name in _ROUNDED]
        if any(row is None for _, row in cells):
            return ""
        parts.append(f"{words}: " + ", ".join(f"{name} {_one(row, 'frobenius')}" for name, row in cells))
    return f"Frobenius error at {width}x{width} after {last} iterations; {'; '.join(parts)}."


def _fp8(rows: Sequence[Row], width: int, last: int) -> str:
    row = row_of(rows, precision="fp8-e4m3", products="input", rows=width, iterations=last)
    other = row_of(rows, precision="bf16", rows=width, iterations=last)
    if row is None or other is None:
        return ""
    return (
        "The notes' FP8 rows never ran in FP8: torch._scaled_mm refused their operands and bf16 took over, hence the "
        f"same figures. With X in E4M3 at {width}x{width} the largest difference from fp32's result is "
        f"{_one(row, 'difference')}, in bf16 {_one(other, 'difference')}."
    )


def _times(rows: Sequence[Row], width: int, last: int) -> str:
    """Return speeds by the least time of any seed, as the table does: in older records the first also loads kernels."""
    reference = _least(row_of(rows, precision="fp32", rows=width, iterations=last))
    cells = [
        f"{name} {reference / seconds:.2g}x"
        for name in ("bf16", "int8-native")
        if reference and (seconds := _least(row_of(rows, precision=name, rows=width, iterations=last)))
    ]
    return f"Speed against fp32 at {width}x{width} on this machine: {', '.join(cells)}." if cells and reference else ""


def _least(row: Row | None) -> float:
    return float(row["seconds"]["low"]) if row and row["seconds"] else 0.0


def _buffers(computed: Sequence[Row]) -> str:
    fp32 = row_of(computed, table="buffers", precision="fp32")
    bf16 = row_of(computed, table="buffers", precision="bf16")
    if fp32 is None or bf16 is None:
        return ""
    return (
        f"Temporary bytes at {bf16['rows']}x{bf16['rows']} in bf16: {_mb(bf16['notes_bytes'])} by the notes' 3 n^2, "
        f"{_mb(bf16['min_bytes'])} (min) or {_mb(bf16['fast_bytes'])} (fast) in memplan's Muon, "
        f"{_mb(bf16['torch_muon_bytes'])} in torch.optim.Muon, and {_mb(fp32['torch_muon_bytes'])} there with fp32 "
        f"gradients, which is the notes' figure for fp32 by chance. None of them keeps buffers of fewer than 16 bits."
    )


def _traffic(computed: Sequence[Row]) -> str:
    row = row_of(computed, table="traffic", precision="bf16")
    if row is None:
        return ""
    low, high = row["gpu_operations_per_byte"]
    return (
        f"An iteration at {row['rows']}x{row['rows']} in bf16 moves {_mb(row['fused_bytes'])} to "
        f"{_mb(row['unfused_bytes'])}, not the notes' {_mb(row['notes_bytes'])}. At {row['operations_per_byte']:,} "
        f"operations for each byte, where the catalog's GPUs need {low} to {high}, arithmetic bounds it, not bandwidth."
    )


def _one(row: Row | None, key: str) -> str:
    value: dict[str, Any] | None = row and row[key]
    return "not finite" if value is None else f"{value['mean']:.3g}"


def _mb(size: int) -> str:
    return f"{size / 1e6:.0f} MB"
