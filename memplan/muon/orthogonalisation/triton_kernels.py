# ruff: noqa: ANN001 - the kernel is Triton code, whose arguments are pointers and numbers of the device
"""Half of each symmetric product on CUDA: tiles on and below the diagonal, mirrored as they are stored.

The idea is public (flash-muon; dion, https://github.com/microsoft/dion). ``plain_product`` is the
judge: tests marked ``cuda`` compare the two on a device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memplan.muon.orthogonalisation.products import plain_product

if TYPE_CHECKING:
    from torch import Tensor

try:
    import triton
    import triton.language as tl

    AVAILABLE = True
except ImportError:  # the plain product is always there
    AVAILABLE = False

TILE = 128
TILE_INNER = 64
WARPS = 4
STAGES = 3
SMALLEST = 4096
"""Sides below this go to the plain product, which is faster there: half of their tiles do not fill an H200."""

if AVAILABLE:

    @triton.jit  # type: ignore[untyped-decorator]
    # Tiles on and below the diagonal are numbered row by row: row r begins at r (r + 1) / 2.
    def _symmetric_kernel(  # type: ignore[no-untyped-def]
        left, right, addend, out, size, inner, beta, alpha,
        left_batch, left_row, left_column, right_batch, right_row, right_column,
        addend_batch, addend_row, addend_column, out_batch, out_row, out_column,
        HAS_ADDEND: tl.constexpr, WHOLE: tl.constexpr, FULL: tl.constexpr, SIDE: tl.constexpr, INNER: tl.constexpr,
    ) -> None:  # fmt: skip
        number, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
        tile_row = ((tl.sqrt(8.0 * number + 1.0) - 1.0) * 0.5).to(tl.int32)
        tile_row = tl.where(tile_row * (tile_row + 1) // 2 > number, tile_row - 1, tile_row)
        tile_row = tl.where((tile_row + 1) * (tile_row + 2) // 2 <= number, tile_row + 1, tile_row)
        tile_column = number - tile_row * (tile_row + 1) // 2
        rows, columns = tile_row * SIDE + tl.arange(0, SIDE), tile_column * SIDE + tl.arange(0, SIDE)
        steps = tl.arange(0, INNER)
        # Rows beyond the end are read from the start again: they are not stored, and need no mask.
        a_rows, b_columns = rows, columns
        if not FULL:
            a_rows, b_columns = rows % size, columns % size
        a_places = left + batch * left_batch + a_rows[:, None] * left_row + steps[None, :] * left_column
        b_places = right + batch * right_batch + b_columns[None, :] * right_column + steps[:, None] * right_row
        total = tl.zeros((SIDE, SIDE), dtype=tl.float32)
        for start in range(0, inner, INNER):
            if WHOLE:
                a, b = tl.load(a_places), tl.load(b_places)
            else:
                a = tl.load(a_places, mask=steps[None, :] < inner - start, other=0.0)
                b = tl.load(b_places, mask=steps[:, None] < inner - start, other=0.0)
            total = tl.dot(a, b, total)
            a_places += INNER * left_column
            b_places += INNER * right_row
        total = total * alpha
        inside = (rows[:, None] < size) & (columns[None, :] < size)
        if HAS_ADDEND:
            places = addend + batch * addend_batch + rows[:, None] * addend_row + columns[None, :] * addend_column
            if FULL:
                total += beta * tl.load(places).to(tl.float32)
            else:
                total += beta * tl.load(places, mask=inside, other=0.0).to(tl.float32)
        result = total.to(out.dtype.element_ty)
        here = out + batch * out_batch + rows[:, None] * out_row + columns[None, :] * out_column
        mirrored = out + batch * out_batch + columns[:, None] * out_row + rows[None, :] * out_column
        whole = tile_column < tile_row  # with a mask that differs between neighbours stores are slow
        if not FULL:
            whole = whole & False
        if whole:
            tl.store(here, result)
            tl.store(mirrored, tl.trans(result))
        else:
            below = inside & (rows[:, None] >= columns[None, :])  # so that the result is symmetric to the bit
            tl.store(here, result, mask=below)
            tl.store(mirrored, tl.trans(result), mask=tl.trans(below))


def symmetric_product(
    left: Tensor, right: Tensor, out: Tensor, addend: Tensor | None = None, beta: float = 0.0, alpha: float = 1.0
) -> None:
    """Multiply as ``plain_product`` does, where the result is known to be symmetric.

    Args:
        left: ``(rows, inner)`` or ``(batch, rows, inner)``, bf16 or fp16, on CUDA. Places in one matrix
            are counted in 32 bits; larger ones go to the plain product.
        right: ``(inner, rows)``, such that ``left @ right`` is symmetric.
        out: ``(rows, rows)``; must not share memory with an operand.
        addend: Symmetric, ``(rows, rows)``, or None.
        beta: Factor of ``addend``.
        alpha: Factor of the product.
    """
    far = max(sum((n - 1) * step for n, step in zip(t.shape[-2:], t.stride()[-2:], strict=True)) for t in (left, out))
    if not AVAILABLE or not left.is_cuda or left.shape[-2] < SMALLEST or far >= 2**31:
        plain_product(left, right, out, addend, beta, alpha)
        return
    launch(left, right, out, addend, beta, alpha)


def launch(
    left: Tensor,
    right: Tensor,
    out: Tensor,
    addend: Tensor | None,
    beta: float,
    alpha: float,
    tile: int = TILE,
    tile_inner: int = TILE_INNER,
    warps: int = WARPS,
    stages: int = STAGES,
) -> None:
    """Run the kernel whatever the size, in tiles of ``tile`` x ``tile``, ``tile_inner`` columns at a time."""
    size, inner = left.shape[-2], left.shape[-1]
    given = out if addend is None else addend
    tiles = triton.cdiv(size, tile)
    batch = left.shape[0] if left.ndim == 3 else 1
    _symmetric_kernel[(tiles * (tiles + 1) // 2, batch)](
        left, right, given, out, size, inner, beta, alpha,
        *_strides(left), *_strides(right), *_strides(given), *_strides(out),
        HAS_ADDEND=addend is not None, WHOLE=inner % tile_inner == 0, FULL=size % tile == 0, SIDE=tile, INNER=tile_inner,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip


def _strides(tensor: Tensor) -> tuple[Any, ...]:
    """Return batch, row and column strides, the batch's zero for a single matrix."""
    return (tensor.stride(0) if tensor.ndim == 3 else 0, tensor.stride(-2), tensor.stride(-1))
