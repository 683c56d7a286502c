"""How near to orthogonal Newton-Schulz comes: by iteration, schedule and shape, against time and against QR."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
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
    normalised,
    polar_factor,
)
from memplan.lab.matrices.orthogonality_findings import MEASURES, OTHER_ITERATIONS, QR, findings
from memplan.muon.orthogonalisation.schedules import SCHEDULES, Schedule, resolved_schedule

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
        progress: Told of each matrix.
        shapes: Rows and columns.
        schedules: Names of ``SCHEDULES``.
        iterations: Of the first shape; the last coefficients of a schedule are repeated.
        dtype: Of the iterates, ``bf16``, ``fp16`` or ``fp32``.
        measure: The error that findings and picture are about; both are recorded.
        device: ``cpu`` or ``cuda``.

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
