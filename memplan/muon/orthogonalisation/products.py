"""The matrix products of an iteration behind one signature: in floats, or in FP8, INT8 and INT4 as the device can or emulated."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from memplan.muon.stores.optimizer_errors import OptimizerError, unknown_choice
from memplan.units import ceil_div

HALVED_FROM = 384
"""Least side of a matrix on the CPU whose symmetric products are halved by ``halved_product``."""
FOUR_PARTS_FROM = 512
"""Least side from which that is done in four stretches and not in two, each of which costs another call."""


class Product(Protocol):
    """A matrix product into a given tensor; see the module."""

    def __call__(
        self, left: Tensor, right: Tensor, out: Tensor, addend: Tensor | None = None, beta: float = 0.0, alpha: float = 1.0
    ) -> None:  # fmt: skip
        """Write ``beta * addend + alpha * left @ right`` into ``out``."""


def plain_product(
    left: Tensor, right: Tensor, out: Tensor, addend: Tensor | None = None, beta: float = 0.0, alpha: float = 1.0
) -> None:
    """Multiply in the operands' own dtype with torch's kernel; the judge of every other product.

    On a CPU a batch whose results lie column by column is multiplied transposed: torch's own loop, which it takes for
    16 bits there, needs 500 times as long (8 x 352 x 128, tests/benchmarks/bench_newton_schulz.py).
    """
    if left.ndim == 3 and out.stride(-1) != 1 and out.device.type == "cpu":
        left, right, out, addend = right.mT, left.mT, out.mT, None if addend is None else addend.mT
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

    Rows are taken in ``p`` stretches, each with the columns up to its end: of the operations ``(p + 1) / (2 * p)`` are
    left, and nothing is allocated. ``out`` must not share memory with an operand.
    """
    size = left.shape[-2]
    length = ceil_div(size, 4 if size >= FOUR_PARTS_FROM else 2)
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


Scaling = Literal["row", "tensor"] | int
PRODUCT_NAMES = ("gram", "square", "apply")

_FLOAT8 = {"fp8-e4m3": torch.float8_e4m3fn, "fp8-e5m2": torch.float8_e5m2}
_INTEGER_MAXIMUM = {"int8": 127, "int4": 7}
FORMATS = (*_FLOAT8, *_INTEGER_MAXIMUM)

# A product of two codes is at most 127**2, so this many add up to less than 2**24: exact in fp32.
_EXACT_INNER = 1024


@dataclass(frozen=True, slots=True)
class QuantisedProduct:
    """A product whose operands are rounded to ``format``."""

    format: str  # ``fp8-e4m3``, ``fp8-e5m2``, ``int8`` or ``int4``
    # ``row`` (one scale for each row or column), ``tensor``, or a block length along the inner dimension.
    scaling: Scaling = "row"
    native: bool = True  # Whether the device's own product is used where it exists; else always emulated

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise unknown_choice("format of a product", self.format, FORMATS)
        if self.scaling not in ("row", "tensor") and (not isinstance(self.scaling, int) or self.scaling < 1):
            raise OptimizerError(f"scaling: expected 'row', 'tensor' or a block length, got {self.scaling!r}")

    def __call__(
        self, left: Tensor, right: Tensor, out: Tensor, addend: Tensor | None = None, beta: float = 0.0, alpha: float = 1.0
    ) -> None:  # fmt: skip
        """Write ``beta * addend + alpha * quantised(left) @ quantised(right)`` into ``out``."""
        if left.ndim == 3:
            for index in range(left.shape[0]):
                given = None if addend is None else addend[index]
                self(left[index], right[index], out[index], given, beta, alpha)
            return
        result = self._native(left, right) if self.native and self.runs_natively(left, right) else None
        if result is None:
            result = self._emulated(left, right)
        result.mul_(alpha)
        if addend is not None:
            result.add_(addend, alpha=beta)
        out.copy_(result)

    def runs_natively(self, left: Tensor, right: Tensor) -> bool:
        """Whether the device multiplies these operands in this format by itself.

        ``torch._scaled_mm`` needs compute capability 8.9, sides that divide by 16, and at most
        one operand in E5M2, so that E5M2 times itself is always emulated; ``torch._int_mm``
        needs more than 16 rows and sides that divide by 8. Blocks of scales are emulated.
        """
        if not left.is_cuda or isinstance(self.scaling, int):
            return False
        sides = (*left.shape, right.shape[-1])
        if self.format == "fp8-e4m3":
            return torch.cuda.get_device_capability(left.device) >= (8, 9) and all(side % 16 == 0 for side in sides)
        return self.format == "int8" and left.shape[0] > 16 and all(side % 8 == 0 for side in sides)

    def _emulated(self, left: Tensor, right: Tensor) -> Tensor:
        """Return the product in fp32, with the codes' products added up without rounding where they are integers."""
        inner = left.shape[-1]
        block = self.scaling if isinstance(self.scaling, int) else inner
        total = left.new_zeros((left.shape[0], right.shape[1]), dtype=torch.float32)
        for start in range(0, inner, block):
            codes, scales = self._quantised(left[:, start : start + block])
            other, others = self._quantised(right[start : start + block].mT)
            total.addcmul_(_exact_product(codes.float(), other.float().mT), scales * others.mT)
        return total

    def _native(self, left: Tensor, right: Tensor) -> Tensor:
        codes, scales = self._quantised(left)
        other, others = self._quantised(right.mT)
        if self.format == "int8":
            product: Tensor = torch._int_mm(codes, other.mT).float()
            return product.mul_(scales).mul_(others.mT)
        if self.scaling == "tensor":
            scales, others = scales[:1], others[:1]
            return torch._scaled_mm(codes, other.mT, scales, others, out_dtype=torch.bfloat16).float()
        return torch._scaled_mm(codes, other.mT, scales, others.mT, out_dtype=torch.bfloat16).float()

    def _quantised(self, operand: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes ``(rows, inner)`` and fp32 scales ``(rows, 1)`` of ``operand``."""
        values = operand.float()
        largest = values.abs().amax(dim=1, keepdim=True)
        if self.scaling == "tensor":
            largest = largest.amax().expand_as(largest).contiguous()
        if self.format in _FLOAT8:
            dtype = _FLOAT8[self.format]
            scales = largest.div_(torch.finfo(dtype).max).clamp_min_(torch.finfo(torch.float32).tiny)
            return (values / scales).to(dtype), scales
        maximum = _INTEGER_MAXIMUM[self.format]
        scales = largest.div_(maximum).clamp_min_(torch.finfo(torch.float32).tiny)
        return (values / scales).round_().clamp_(-maximum, maximum).to(torch.int8), scales


def _exact_product(left: Tensor, right: Tensor) -> Tensor:
    """Return ``left @ right`` of integer codes in fp32, added up in parts that fp32 holds exactly."""
    if left.shape[1] <= _EXACT_INNER:
        return left @ right
    total = (left[:, :_EXACT_INNER] @ right[:_EXACT_INNER]).double()
    for start in range(_EXACT_INNER, left.shape[1], _EXACT_INNER):
        total += left[:, start : start + _EXACT_INNER] @ right[start : start + _EXACT_INNER]
    return total.float()


def quantised_products(
    format: str, which: Iterable[str] = ("gram",), scaling: Scaling = "row", native: bool = True
) -> Products:
    """Return products of which those named in ``which`` are quantised and the others plain.

    Args:
        format: ``fp8-e4m3``, ``fp8-e5m2``, ``int8`` or ``int4``.
        which: Of ``gram`` (X@X.mT), ``square`` (A@A) and ``apply`` (B@X).
        scaling: ``row``, ``tensor``, or a block length along the inner dimension.
        native: Whether the device's own product is used where it exists.

    Raises:
        UnknownNameError: If the format or a product is not known.
    """
    chosen = tuple(which)
    for name in chosen:
        if name not in PRODUCT_NAMES:
            raise unknown_choice("product of an iteration", name, PRODUCT_NAMES)
    product = QuantisedProduct(format, scaling, native)

    def of(name: str) -> Product:
        return product if name in chosen else plain_product

    return Products(gram=of("gram"), square=of("square"), apply=of("apply"))
