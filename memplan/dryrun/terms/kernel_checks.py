"""What CUDA's kernels refuse and torch's functions of shapes take: factors of unlike dtypes, and numbers of rows that are not there."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
FACTORS = {aten.mm.default: 0, aten.addmm.default: 1, aten.bmm.default: 0, aten.baddbmm.default: 1}
"""Products of matrices, and where the first of the two is among their arguments."""
LOSSES = (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
_NAMES = {torch.float32: "Float", torch.float64: "Double", torch.float16: "Half", torch.bfloat16: "BFloat16"}


def check_arguments(func: Any, args: tuple[Any, ...], known: Callable[[Tensor], Tensor | None]) -> None:
    """Raise what torch raises of an operator's arguments, as far as their values are known.

    Args:
        known: Returns the values of a tensor, or nothing.

    Raises:
        RuntimeError: Factors have unlike dtypes (aten/src/ATen/native/cuda/Blas.cpp, v2.13.0), or a kernel would find a row
            that is not there (Indexing.cu, Loss.cu).
    """
    if func in FACTORS:
        first, second = args[FACTORS[func] : FACTORS[func] + 2]
        if first.dtype != second.dtype:
            names = " and ".join(_NAMES.get(one.dtype, str(one.dtype)) for one in (first, second))
            raise RuntimeError(f"mat1 and mat2 must have the same dtype, but got {names}")
    elif func is aten.embedding.default:
        _check_numbers(known(args[1]), args[0].shape[0], "an embedding has", "rows")
    elif func in LOSSES:
        numbers = known(args[1])
        classes = args[0].shape[min(1, args[0].dim() - 1)]
        _check_numbers(None if numbers is None else numbers[numbers != args[4]], classes, "a loss has", "classes")


def _check_numbers(numbers: Tensor | None, count: int, owner: str, what: str) -> None:
    if numbers is None or not numbers.numel():
        return
    least, most = int(numbers.min()), int(numbers.max())
    if least < 0 or most >= count:
        wrong = least if least < 0 else most
        raise RuntimeError(f"CUDA error: device-side assert triggered: number {wrong} where {owner} {count:,} {what}")
