"""What follows from errors and times of orthogonalisation, a sentence each, made from the rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from memplan.lab.experiment_record import Row, row_of
from memplan.lab.matrices.matrix_draws import mean, mean_ratio

QR = "qr"
MEASURES = {"frobenius": "Frobenius", "largest_element": "largest-element"}
"""Keys of the two errors of ``matrices.errors``, and their names."""

OTHER_ITERATIONS = 5
"""Of all shapes but the first: as many as Muon takes."""


def findings(rows: Sequence[Row], measure: str) -> list[str]:
    """Return what follows from the rows, a sentence each."""
    shape = {"rows": rows[0]["rows"], "columns": rows[0]["columns"]}
    last = max(row["iterations"] for row in rows if row_of([row], **shape))
    usual = min(OTHER_ITERATIONS, last)
    at = f"{shape['rows']}x{shape['columns']}"
    ordered = sorted(MEASURES, key=lambda name: name != measure)
    said = [_schedules_compared(rows, shape, usual, name) for name in ordered]
    said += [_caught_up(rows, shape, usual, last, measure), _not_converging(rows, shape, last)]
    said += [_by_size(rows, measure), _by_aspect(rows, measure)]
    said += [_qr_is_another(rows, shape, usual, at), _error_per_time(rows)]
    return [sentence for sentence in said if sentence] or [_least(rows, measure)]


def _least(rows: Sequence[Row], measure: str) -> str:
    """Name the best row, where nothing that the notes compare was run."""
    finite = [row for row in rows if row[measure] and row["schedule"] != QR]
    if not finite:
        return "No result is finite."
    best = min(finite, key=lambda row: float(row[measure]["mean"]))
    return (
        f"The least {MEASURES[measure]} error is {best[measure]['mean']:.3f}: {best['schedule']}, {best['iterations']} "
        f"iterations, {best['rows']}x{best['columns']}."
    )


def _schedules_compared(rows: Sequence[Row], shape: Row, count: int, measure: str) -> str:
    pair = [row_of(rows, schedule=name, iterations=count, **shape) for name in ("cubic", "you-jiacheng")]
    first, second = pair
    if first is None or second is None or not first[measure] or not second[measure]:
        return ""
    word = MEASURES[measure]
    return (
        f"After {count} iterations at {shape['rows']}x{shape['columns']} the {word} error is "
        f"{first[measure]['mean']:.3f} with cubic and {second[measure]['mean']:.3f} with you-jiacheng "
        f"({second[measure]['low']:.3f} to {second[measure]['high']:.3f} over {len(second[measure]['values'])} "
        f"matrices): {mean_ratio(first, second, measure):.1f} times smaller."
    )


def _caught_up(rows: Sequence[Row], shape: Row, count: int, last: int, measure: str) -> str:
    """Say when the cubic is where the tuned schedule is after ``count`` iterations."""
    goal = mean(row_of(rows, schedule="you-jiacheng", iterations=count, **shape), measure)
    end = mean(row_of(rows, schedule="cubic", iterations=last, **shape), measure)
    if goal is None or end is None or last <= count:
        return ""
    for step in range(1, last + 1):
        reached = mean(row_of(rows, schedule="cubic", iterations=step, **shape), measure)
        if reached is not None and reached <= goal:
            return f"Cubic takes {step} iterations to where you-jiacheng is after {count} ({goal:.3f})."
    return f"Cubic does not get there in {last} iterations: its error is then {end:.3f}, against {goal:.3f}."


def _not_converging(rows: Sequence[Row], shape: Row, last: int) -> str:
    """Say that the default schedule of Muon does not converge, by design."""
    course = [mean(row_of(rows, schedule="keller-jordan", iterations=n, **shape), "frobenius") for n in range(5, 99)]
    values = [value for value in course if value is not None]
    if len(values) < 2:
        return ""
    return (
        f"keller-jordan, Muon's default, stays between {min(values):.2f} and {max(values):.2f} in the Frobenius measure "
        f"from 5 to {last} iterations: it is made to be steep at zero, not to converge."
    )


def _by_size(rows: Sequence[Row], measure: str) -> str:
    count = min(OTHER_ITERATIONS, max(row["iterations"] for row in rows))
    sizes = sorted({row["rows"] for row in rows if row["rows"] == row["columns"]})
    pairs = [
        (n, mean(row_of(rows, schedule="you-jiacheng", iterations=count, rows=n, columns=n), measure)) for n in sizes
    ]
    known = [(n, value) for n, value in pairs if value is not None]
    if len(known) < 2:
        return ""
    grows = all(one[1] <= two[1] for one, two in pairwise(known))
    text = ", ".join(f"{value:.3f} at {n}" for n, value in known)
    return f"The error of square matrices {'grows with' if grows else 'depends on'} their size: you-jiacheng {text}."


def _by_aspect(rows: Sequence[Row], measure: str) -> str:
    short = rows[0]["rows"]
    long = sorted({row["columns"] for row in rows if row["rows"] == short and row["columns"] >= short})
    pairs = [
        (n, mean(row_of(rows, schedule="you-jiacheng", iterations=5, rows=short, columns=n), measure)) for n in long
    ]
    known = [f"{value:.3f} at {short}x{n}" for n, value in pairs if value is not None]
    if len(known) < 2:
        return ""
    return f"A matrix that is not square has no small singular values, and is easier: you-jiacheng {', '.join(known)}."


def _qr_is_another(rows: Sequence[Row], shape: Row, count: int, at: str) -> str:
    away = mean(row_of(rows, schedule=QR, **shape), "polar_distance")
    near = mean(row_of(rows, schedule="you-jiacheng", iterations=count, **shape), "polar_distance")
    error = mean(row_of(rows, schedule=QR, **shape), "frobenius")
    if away is None or near is None or error is None:
        return ""
    return (
        f"QR is orthogonal up to rounding ({error:.4f}) but is not what Muon asks for: at {at} its factor is "
        f"{away:.2f} away from the nearest orthogonal matrix, U V^T (you-jiacheng's result is {near:.2f} away)."
    )


def _error_per_time(rows: Sequence[Row]) -> str:
    """Redo the notes' speed against quality with errors and times of one size, the largest square one."""
    square = [row for row in rows if row["rows"] == row["columns"]]
    n = max((row["rows"] for row in square), default=0)
    cells = []
    for name, count in (("cubic", OTHER_ITERATIONS), ("you-jiacheng", OTHER_ITERATIONS), (QR, 0)):
        row = row_of(square, rows=n, schedule=name, iterations=count)
        error, seconds = mean(row, "frobenius"), mean(row, "seconds")
        if error is None or seconds is None:
            return ""
        cells.append(f"{name} {error:.3f} in {1000 * seconds:,.0f} ms ({error / (1000 * seconds):.2g} per ms)")
    return (
        f"Errors and times of one size, {n}x{n}, as the notes' table of speed and quality should have them: "
        f"{'; '.join(cells)}. Error per millisecond rewards being slow: a method that takes twice the time scores "
        "twice as good."
    )
