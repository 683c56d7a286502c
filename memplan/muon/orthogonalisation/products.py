"""The three matrix products of an iteration, behind one signature, so that each can be replaced.

``product(left, right, out, addend, beta, alpha)`` writes ``beta * addend + alpha * left @ right``
into ``out``; without ``addend`` it writes ``alpha * left @ right``. Shapes are ``(rows, inner)``,
``(inner, columns)`` and ``(rows, columns)``, or the same with one leading batch dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from memplan.units import ceil_div

PARTS = 4
HALVED_FROM = 512
"""Least side of a matrix on the CPU whose symmetric products are halved by ``halved_product``."""


class Product(Protocol):
    """A matrix product into a given tensor; see the module."""

    def __call__(
        self,
        left: Tensor,
        right: Tensor,
        out: Tensor,
        addend: Tensor | None = None,
        beta: float = 0.0,
        alpha: float = 1.0,
    ) -> None:
        """Write ``beta * addend + alpha * left @ right`` into ``out``."""


def plain_product(
    left: Tensor, right: Tensor, out: Tensor, addend: Tensor | None = None, beta: float = 0.0, alpha: float = 1.0
) -> None:
    """Multiply in the operands' own dtype with torch's kernel; the judge of every other product."""
    if left.ndim == 3:
        if addend is None:
            torch.bmm(left, right, out=out)
        else:
            torch.baddbmm(addend, left, right, beta=beta, alpha=alpha, out=out)
    elif addend is None:
        torch.mm(left, right, out=out)
    else:
        torch.addmm(addend, left, right, beta=beta, alpha=alpha, out=out)
    if addend is None and alpha != 1.0:
        out.mul_(alpha)


def halved_product(
    left: Tensor, right: Tensor, out: Tensor, addend: Tensor | None = None, beta: float = 0.0, alpha: float = 1.0
) -> None:
    """Multiply as ``plain_product`` does where the result is symmetric: below the diagonal, then mirrored.

    Rows are taken in ``PARTS`` stretches, each with the columns up to its end: of the operations
    ``(PARTS + 1) / (2 * PARTS)`` are left, and nothing is allocated. ``out`` must not share memory
    with an operand.
    """
    size = left.shape[-2]
    length = ceil_div(size, PARTS)
    for start in range(0, size, length):
        end = min(start + length, size)
        given = None if addend is None else addend[..., start:end, :end]
        plain_product(left[..., start:end, :], right[..., :, :end], out[..., start:end, :end], given, beta, alpha)
        out[..., :start, start:end].copy_(out[..., start:end, :start].mT)


@dataclass(frozen=True, slots=True)
class Products:
    """Which kernel multiplies where."""

    gram: Product = plain_product  # ``X @ X.mT``, whose result is symmetric
    square: Product = plain_product  # Products of symmetric matrices that commute, whose results are symmetric
    apply: Product = plain_product  # A symmetric matrix times columns of ``X``


PLAIN = Products()
HALVED = Products(gram=halved_product, square=halved_product)


def default_products(matrix: Tensor) -> Products:
    """Return the products that are fastest for the device and size of ``matrix``.

    Source:
        tests/benchmarks/bench_newton_schulz.py on two cores and on an H200. There Triton's kernel takes 0.75
        of cuBLAS's time at 4096 x 4096 and 0.66 at 4096 x 16384, but more below, and so do halves by cuBLAS.
    """
    side = min(matrix.shape[-2:])
    if matrix.device.type == "cpu":
        return HALVED if side >= HALVED_FROM else PLAIN
    if matrix.is_cuda and matrix.dtype in (torch.bfloat16, torch.float16):
        from memplan.muon.orthogonalisation.triton_kernels import AVAILABLE, SMALLEST, symmetric_product

        if AVAILABLE and side >= SMALLEST:
            return Products(gram=symmetric_product, square=symmetric_product)
    return PLAIN
