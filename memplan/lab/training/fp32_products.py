"""Matrix products of 16-bit tensors on a CPU, at the speed of fp32."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
PRODUCTS = frozenset(
    overload for product in (aten.mm, aten.addmm, aten.bmm, aten.baddbmm) for overload in (product.default, product.out)
)


class SinglePrecisionProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Multiplies 16-bit matrices of the CPU as fp32 ones, and rounds what comes out to 16 bits.

    Operands are exact in fp32, and kernels for 16 bits sum in fp32 too, so only the order of the sums
    differs: 1 in 10,000 elements by a unit in the last place, for products of 2048 x 96 by 96 x 256 in bf16.
    Without instructions for bf16 (AVX2 alone) oneDNN's own kernels take ten times as long.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in PRODUCTS or args[0].dtype.itemsize != 2 or args[0].device.type != "cpu":
            return func(*args, **kwargs)
        wide = [value.float() if isinstance(value, torch.Tensor) else value for value in args]
        out = kwargs.pop("out", None)
        # Every overload in PRODUCTS has one that returns its product
        product = func.overloadpacket.default(*wide, **kwargs)
        return product.to(args[0].dtype) if out is None else out.copy_(product)


def formed_in_fp32(device: str, compute_dtype: str) -> bool:
    """Tell whether 16-bit products are slow there: on a CPU in fp16, and in bf16 where it has no instructions for that."""
    bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return device == "cpu" and not (bf16 and compute_dtype != "fp16")


def fast_products(device: str, compute_dtype: str) -> AbstractContextManager[Any]:
    """Return what to train under on ``device``: where they are slow, 16-bit products are formed in fp32 and rounded.

    With instructions for bf16 its own products take 0.1 to 0.6 of the time of fp32's, and the mode 30 us of every operation.
    """
    return SinglePrecisionProducts() if formed_in_fp32(device, compute_dtype) else nullcontext()  # type: ignore[no-untyped-call]


def products_of(device: str, compute_dtype: str) -> str:
    """Return how ``fast_products`` forms 16-bit products on ``device``, for a record."""
    return (
        "16-bit operands, formed in fp32 and rounded" if formed_in_fp32(device, compute_dtype) else "the device's own"
    )
