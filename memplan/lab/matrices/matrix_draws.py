"""What the experiments on matrices share: draws, the plain iteration, two measures of error, and time."""

import os
import time
from collections.abc import Iterable, Sequence
from statistics import fmean

import torch
from torch import Tensor

from memplan.errors import UnitError
from memplan.lab.experiment_record import Row
from memplan.muon.orthogonalisation.schedules import Coefficients
from memplan.muon.stores.optimizer_errors import unknown_choice

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DEVIATION = 0.1
"""Standard deviation of the drawn matrices, as in the notes; the norm divides it out."""

_COPIES = 12
"""Matrices in fp32 of the longer side squared that an experiment may hold at a time, generously."""


def gaussian(rows: int, columns: int, seed: int, device: str = "cpu") -> Tensor:
    """Return a matrix of independent normal numbers, ``(rows, columns)`` in fp32; the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator).mul_(DEVIATION).to(device)


def normalised(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``matrix`` in ``dtype``, lying on its longer side, divided by its Frobenius norm."""
    wide = matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix
    cast = wide.to(dtype)
    norm: Tensor = torch.linalg.matrix_norm(cast.float())
    return cast / norm.clamp_min(1e-7).to(dtype)


def iterated(x: Tensor, coefficients: Coefficients) -> Tensor:
    """Return ``x`` after one iteration, as ``newton_schulz_reference`` does it.

    Without a fifth power there is no ``A @ A`` to multiply, so that a cubic takes two products, a quintic three.
    """
    a, b, c = coefficients
    gram = _product(x, x.mT)
    mixed = b * gram if c == 0 else b * gram + c * _product(gram, gram)
    return a * x + _product(mixed, x)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Return ``left @ right``; in fp16 on a CPU added up in fp32 and rounded, since torch takes 70 times as long."""
    if left.dtype == torch.float16 and not left.is_cuda:
        return (left.float() @ right.float()).half()
    return left @ right


def errors(x: Tensor) -> tuple[float, float]:
    """Return how far the rows of ``x`` are from orthonormal: the Frobenius and the largest-element error.

    Formula:
        with ``D = X @ X.mT - I`` in fp32 and ``m`` the shorter side: ``norm(D) / sqrt(m)``, which the
        notes' tables of schedules have, and ``max(abs(D))``, which their tables of precisions have.
    """
    wide = (x.mT if x.shape[0] > x.shape[1] else x).float()
    difference = wide @ wide.mT
    difference.diagonal().sub_(1)
    frobenius = torch.linalg.matrix_norm(difference) / len(difference) ** 0.5
    return float(frobenius), float(difference.abs_().max())


def polar_factor(matrix: Tensor) -> Tensor:
    """Return the nearest matrix with orthonormal rows, by a singular value decomposition in fp32."""
    wide = matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix
    left, _, right = torch.linalg.svd(wide.float(), full_matrices=False)
    factor: Tensor = left @ right
    return factor


def distance(x: Tensor, target: Tensor) -> float:
    """Return the Frobenius norm of ``x - target``, divided by the square root of the shorter side."""
    return float(torch.linalg.matrix_norm(x.float() - target) / min(x.shape) ** 0.5)


def clock(device: str) -> float:
    """Return seconds, after the device has done what it was told.

    On one thread of a CPU they are the process' own, so that what else runs there does not count.
    """
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    elif torch.get_num_threads() == 1:
        return time.process_time()
    return time.perf_counter()


def check_sizes(sides: Iterable[int], iterations: int, device: str) -> None:
    """Raise unless matrices with such sides can be held here, and so many iterations are run.

    Raises:
        UnitError: A side is smaller than 2, or too large for the memory, or iterations are out of range.
    """
    for side in sides:
        needed = _COPIES * 4 * side * side
        if side < 2:
            raise UnitError(f"a matrix needs sides of at least 2, got {side}")
        if needed > _memory_bytes(device):
            have = _memory_bytes(device) >> 30
            raise UnitError(f"a side of {side:,} takes up to {needed / 2**30:,.0f} GiB; there are {have:,} GiB")
    if not 1 <= iterations <= 50:
        raise UnitError(f"--iterations: expected 1 to 50, got {iterations}")


def checked_names(kind: str, given: Sequence[str], known: Iterable[str]) -> tuple[str, ...]:
    """Return the names, each once; raise unless all are known."""
    choices = tuple(known)
    for name in given:
        if name not in choices:
            raise unknown_choice(kind, name, choices)
    return tuple(dict.fromkeys(given))


def mean(row: Row | None, key: str) -> float | None:
    """Return the mean of a measurement, or None where it was not made or is not finite."""
    value = row and row.get(key)
    return value["mean"] if value else None


def mean_ratio(first: Row, second: Row, key: str) -> float:
    """Return by how much the mean of a measurement is larger in the first row."""
    return fmean(first[key]["values"]) / fmean(second[key]["values"])


def _memory_bytes(device: str) -> int:
    if device.startswith("cuda"):
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
