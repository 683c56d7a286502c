"""Composite operators on ``meta`` tensors as CUDA runs them on a named card."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._guards import TracingContext
from torch.nn.attention import SDPBackend

from memplan.step.kernels.attention_choice import AttentionCall, ChosenKernel, chosen_kernel
from memplan.trace.pretended_cuda.cuda_kernels import dropout, overridden
from memplan.trace.reference.operations import FusedRMSNorm, aten
from memplan.trace.reference.run_options import TORCH_DTYPES
from memplan.units import round_up

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
BACKENDS = {
    SDPBackend.CUDNN_ATTENTION: "cudnn",
    SDPBackend.FLASH_ATTENTION: "flash",
    SDPBackend.EFFICIENT_ATTENTION: "efficient",
    SDPBackend.MATH: "math",
}
MASK_COLUMNS = 16
"""Columns of a mask that the efficient kernel takes are a multiple of these (attention.cpp, ``pad_bias``)."""


@contextmanager
def composite_kernels(compute_capability: str) -> Iterator[None]:
    """Run attention, norms, softmax and dropout as CUDA would on a card, also where a part is computed again.

    Args:
        compute_capability: Of the card, such as ``8.6``.
    """
    overrides: dict[str, Callable[..., Tensor]] = {
        "scaled_dot_product_attention": _attention(compute_capability),
        "rms_norm": _rms_norm,
        "dropout": dropout,
        "softmax.int": _softmax,
        "one_hot": _one_hot,
    }
    with overridden(overrides, {"_fused_sdp_choice": _choice(compute_capability)}):
        yield


@contextmanager
def cpu_kernels() -> Iterator[None]:
    """Run attention as torch's CPU build would."""

    def attended(
        query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, dropout: float = 0.0, causal: bool = False,
        *, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        # aten/src/ATen/native/transformers/sdp_utils_cpp.cpp (v2.13.0), ``use_flash_attention_cpp``, which takes grouped queries
        parts = (query, key, value)
        fits = all(part.dim() == 4 and part.shape[-1] == query.shape[-1] and part.stride(-1) == 1 for part in parts)
        trained = mask is not None and mask.requires_grad
        allowed: Any = torch.backends.cuda.flash_sdp_enabled
        out: Tensor
        if fits and not trained and not dropout and (enable_gqa or key.shape[1] == query.shape[1]) and allowed():
            fused = aten._scaled_dot_product_flash_attention_for_cpu
            out = fused(*parts, dropout, causal, attn_mask=_additive(mask, query.dtype), scale=scale)[0]
        else:
            own = aten.scaled_dot_product_attention.default
            out = own._op_dk(_COMPOSITE, *parts, mask, dropout, causal, scale=scale, enable_gqa=enable_gqa)
        return out

    with overridden({"scaled_dot_product_attention": attended}):
        yield


def _attention(compute_capability: str) -> Callable[..., Tensor]:
    def scaled_dot_product_attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        call = _call_of(query, key, value, attn_mask, dropout_p, enable_gqa=enable_gqa)
        kernel = chosen_kernel(call, compute_capability, _allowed())
        mask = _additive(attn_mask, query.dtype)
        return _attended(kernel, query, key, value, mask, call, is_causal, scale, enable_gqa)

    return scaled_dot_product_attention


def _choice(compute_capability: str) -> Callable[..., int]:
    numbers = {name: backend.value for backend, name in BACKENDS.items()}

    def fused_sdp_choice(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        _: bool = False, *, enable_gqa: bool = False, **__: Any,
    ) -> int:  # fmt: skip
        call = _call_of(query, key, value, attn_mask, dropout_p, enable_gqa=enable_gqa)
        return numbers[chosen_kernel(call, compute_capability, _allowed())]

    return fused_sdp_choice


def _call_of(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, *, enable_gqa: bool
) -> AttentionCall:
    grouped = key.shape[1] != query.shape[1]
    return AttentionCall(
        dtype=_NAMES[query.dtype],
        width=query.shape[-1],
        value_width=value.shape[-1],
        masked=mask is not None,
        grouped=enable_gqa and grouped,
        unequal=not enable_gqa and grouped,
        dropout=dropout,
        tokens=key.shape[2],
        trained=torch.is_grad_enabled() and any(part.requires_grad for part in (query, key, value)),
    )


def _allowed() -> tuple[str, ...]:
    """Return the kernels that ``sdpa_kernel`` allows here, the one that comes first first; nothing where it allows all."""
    cuda: Any = torch.backends.cuda
    allowed = {
        SDPBackend.CUDNN_ATTENTION: cuda.cudnn_sdp_enabled(),
        SDPBackend.FLASH_ATTENTION: cuda.flash_sdp_enabled(),
        SDPBackend.EFFICIENT_ATTENTION: cuda.mem_efficient_sdp_enabled(),
        SDPBackend.MATH: cuda.math_sdp_enabled(),
    }
    order = [SDPBackend(number) for number in torch._C._get_sdp_priority_order()]
    return () if all(allowed.values()) else tuple(BACKENDS[one] for one in order if allowed.get(one))


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a boolean mask as one that is added (``convert_boolean_attn_mask`` in attention.cpp)."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), float("-inf"))


def _flash(query: Tensor, key: Tensor, value: Tensor, call: AttentionCall, causal: bool, scale: float | None) -> Tensor:
    width = query.shape[-1]
    padded = round_up(width, 8)
    parts = [part if width == padded else F.pad(part, (0, padded - width)) for part in (query, key, value)]
    scale = scale or 1 / math.sqrt(width)
    out: Tensor = aten._scaled_dot_product_flash_attention(*parts, call.dropout, causal, False, scale=scale)[0]
    return out if width == padded else out[..., :width]


def _attended(
    kernel: ChosenKernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    call: AttentionCall,
    causal: bool,
    scale: float | None,
    grouped: bool,
) -> Tensor:
    """Return attention by a kernel."""
    out: Tensor
    if kernel == "flash":
        return _flash(query, key, value, call, causal, scale)
    if kernel == "math":
        out = aten._scaled_dot_product_attention_math(
            query, key, value, mask, call.dropout, causal, scale=scale, enable_gqa=grouped
        )[0]
    elif kernel == "cudnn":
        out = aten._scaled_dot_product_cudnn_attention(
            query, key, value, mask, call.trained, call.dropout, causal, False, scale=scale
        )[0]
    else:
        if mask is not None:
            columns = mask.shape[-1]
            if columns % MASK_COLUMNS:
                mask = F.pad(mask, (0, round_up(columns, MASK_COLUMNS) - columns))[..., :columns]
            mask = mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        out = aten._scaled_dot_product_efficient_attention(
            query, key, value, mask, call.trained, call.dropout, causal, scale=scale
        )[0]
    return out


def _rms_norm(x: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """Return the fused norm, which takes one dtype alone (``rms_norm_symint`` in aten/src/ATen/native/layer_norm.cpp)."""
    if weight is not None and weight.dtype != x.dtype:
        out: Tensor = aten.rms_norm.default._op_dk(_COMPOSITE, x, normalized_shape, weight, eps)
        return out
    if TracingContext.try_get() is not None:  # a compiler takes it apart, and would take an empty result for the norm
        return aten._fused_rms_norm(x, normalized_shape, weight, eps)[0]  # type: ignore[no-any-return]
    if hasattr(x, "placements"):
        return _divided_norm(x, weight, eps or 1e-6)
    fused: Tensor = FusedRMSNorm.apply(x, weight, eps or 1e-6)  # type: ignore[no-untyped-call]
    return fused


def _divided_norm(x: Any, weight: Any, eps: float) -> Tensor:
    """Return the fused norm of a rank's part of a distributed tensor (``aten._fused_rms_norm`` in torch/distributed/tensor/_ops/_math_ops.py)."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    placements = [Partial() if place.is_shard() else Replicate() for place in x.placements]
    own = weight.to_local(grad_placements=placements)
    out = FusedRMSNorm.apply(x.to_local(), own, eps)  # type: ignore[no-untyped-call]
    return DTensor.from_local(out, x.device_mesh, x.placements, run_check=False)


def _one_hot(numbers: Tensor, num_classes: int = -1) -> Tensor:
    """Return ones among zeros as CUDA writes them, which compares nothing (``one_hot`` in aten/src/ATen/native/Onehot.cpp, v2.13.0)."""
    zeros = numbers.new_zeros((*numbers.shape, num_classes))
    return zeros.scatter_(-1, numbers.unsqueeze(-1), 1)


def _softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return the softmax; of fp16 in fp32 it is one kernel, of bf16 a cast and a softmax."""
    # Source: aten/src/ATen/native/SoftMax.cpp, ``softmax(Tensor, int64_t, optional<ScalarType>)`` (v2.13.0).
    if x.dtype == torch.float16 and dtype == torch.float32:
        return torch._softmax(x, dim, True)
    out: Tensor = aten.softmax.int._op_dk(_COMPOSITE, x, dim, dtype)
    return out
