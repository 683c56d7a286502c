"""How near to orthogonal Newton-Schulz comes: by iteration, schedule and shape, against time and against QR."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import median

import torch
from torch import Tensor

from memplan.lab.experiment_record import Outcome, Progress, Row, interval
from memplan.lab.matrices.matrix_draws import (
    DTYPES,
    check_sizes,
    checked_names,
    clock,
    distance,
    errors,
    gaussian,
    iterated,
    mean,
    mean_ratio,
    normalised,
    polar_factor,
)
from memplan.muon.orthogonalisation.schedules import SCHEDULES, Schedule, resolved_schedule
from memplan.report.experiments import row_of

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


Shape = tuple[int, int]

NAMES = tuple(SCHEDULES)
SHAPES: tuple[Shape, ...] = (
    *((512, 512), (128, 128), (256, 256), (1024, 1024), (2048, 2048)),
    *((512, 1024), (512, 2048)),
)
"""The first is looked at iteration by iteration, the others once."""

OTHER_SEEDS = 3
REPEATS = 3
LIMITS = (
    "Gaussian matrices: a gradient's singular values spread wider. Times are this machine's; they leave out the norm "
    "and the cast. Whether a smaller error trains better is another question."
)

_REPEATED = 2**20
"""Elements up to which times are medians of several runs."""

_DECOMPOSED = 1024
"""Shorter side up to which the polar factor is computed."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What one matrix gave: errors in order of ``MEASURES``, distance from the polar factor, seconds so far."""

    errors: tuple[float, float]
    distance: float | None
    seconds: float


def run(
    seeds: Sequence[int],
    progress: Progress,
    shapes: Sequence[Shape] = SHAPES,
    schedules: Sequence[str] = NAMES,
    iterations: int = 10,
    dtype: str = "bf16",
    measure: str = "frobenius",
    device: str = "cpu",
) -> Outcome:
    """Orthogonalise Gaussian matrices, and return errors and times of each schedule and of QR.

    Args:
        seeds: One matrix each for the first shape; the others take the first ``OTHER_SEEDS``.
        shapes: Rows and columns.
        schedules: Names of ``SCHEDULES``.
        iterations: Of the first shape; the last coefficients of a schedule are repeated.
        dtype: Of the iterates, ``bf16``, ``fp16`` or ``fp32``.
        measure: The error that findings and picture are about; both are recorded.

    Raises:
        UnknownNameError: A schedule, dtype or measure that is none.
        UnitError: A shape or number of iterations out of range.
    """
    schedules = checked_names("Newton-Schulz schedule", schedules, SCHEDULES)
    checked_names("dtype", [dtype], DTYPES)
    checked_names("measure", [measure], MEASURES)
    check_sizes([side for shape in shapes for side in shape], iterations, device)
    shapes = tuple(dict.fromkeys(shapes))
    samples = defaultdict[tuple[str, int, Shape], list[Sample]](list)
    for done, (shape, seed) in enumerate(_draws(seeds, shapes), 1):
        counts = range(1, iterations + 1) if shape == shapes[0] else [OTHER_ITERATIONS]
        matrix = gaussian(*shape, seed, device)
        for (name, count), sample in _samples(matrix, schedules, counts, DTYPES[dtype]).items():
            samples[name, count, shape].append(sample)
        progress(done, f"{shape[0]}x{shape[1]}, seed {seed}")
    rows = [_row(*key, dtype, group) for key, group in samples.items()]
    settings = {
        "shapes": [list(shape) for shape in shapes],
        "schedules": list(schedules),
        "iterations": iterations,
        "dtype": dtype,
        "measure": measure,
        "matrix": "gaussian",
        "device": device,
    }
    return Outcome("orthogonality", settings, seeds, rows, findings(rows, measure), LIMITS)


def parts(seeds: Sequence[int], shapes: Sequence[Shape]) -> int:
    """Return how often ``run`` reports."""
    return len(_draws(seeds, tuple(dict.fromkeys(shapes))))


def _draws(seeds: Sequence[int], shapes: Sequence[Shape]) -> list[tuple[Shape, int]]:
    """Return the shape and the seed of each matrix."""
    return [(shape, seed) for shape in shapes for seed in (seeds if shape == shapes[0] else seeds[:OTHER_SEEDS])]


def _samples(
    matrix: Tensor, schedules: Iterable[str], counts: Sequence[int], dtype: torch.dtype
) -> dict[tuple[str, int], Sample]:
    target = polar_factor(matrix) if min(matrix.shape) <= _DECOMPOSED else None
    repeats = REPEATS if matrix.numel() <= _REPEATED else 1
    start = normalised(matrix, dtype)
    iterated(start, (1.0, 1.0, 1.0))
    samples: dict[tuple[str, int], Sample] = {}
    for name in schedules:
        course = _course(start, resolved_schedule(name, max(counts)), counts, repeats, target)
        samples |= {(name, count): sample for count, sample in course.items()}
    samples[QR, 0] = _by_qr(matrix, dtype, repeats, target)
    return samples


def _course(
    start: Tensor, schedule: Schedule, counts: Iterable[int], repeats: int, target: Tensor | None
) -> dict[int, Sample]:
    """Return a sample after each of ``counts`` iterations; time adds up medians of single iterations."""
    device = str(start.device)
    seconds: list[list[float]] = [[] for _ in schedule]
    measurements: dict[int, tuple[tuple[float, float], float | None]] = {}
    for repeat in range(repeats):
        x = start
        for index, coefficients in enumerate(schedule):
            begin = clock(device)
            x = iterated(x, coefficients)
            seconds[index].append(clock(device) - begin)
            if repeat == 0 and index + 1 in counts:
                measurements[index + 1] = errors(x), None if target is None else distance(x, target)
    elapsed = list(accumulate(map(median, seconds)))
    return {count: Sample(*measured, elapsed[count - 1]) for count, measured in measurements.items()}


def _by_qr(matrix: Tensor, dtype: torch.dtype, repeats: int, target: Tensor | None) -> Sample:
    """Return the sample of the orthogonal factor of a QR decomposition in fp32, rounded to ``dtype``."""
    tall = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.mT
    device = str(matrix.device)
    seconds = []
    for _ in range(repeats):
        begin = clock(device)
        factor, triangle = torch.linalg.qr(tall)
        rounded = factor.to(dtype)
        seconds.append(clock(device) - begin)
    # Signs are QR's to choose; with a positive diagonal of R the factor is nearest to the polar one.
    signed = factor * triangle.diagonal().sign()
    wide = signed if matrix.shape[0] == matrix.shape[1] else signed.mT
    return Sample(errors(rounded), None if target is None else distance(wide, target), median(seconds))


def _row(name: str, count: int, shape: Shape, dtype: str, samples: Sequence[Sample]) -> Row:
    frobenius, largest = zip(*(sample.errors for sample in samples), strict=True)
    distances = [sample.distance for sample in samples if sample.distance is not None]
    return {
        "schedule": name,
        "iterations": count,
        "rows": shape[0],
        "columns": shape[1],
        "dtype": dtype,
        "frobenius": interval(frobenius),
        "largest_element": interval(largest),
        "polar_distance": interval(distances),
        "seconds": interval([sample.seconds for sample in samples]),
    }
