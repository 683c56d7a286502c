"""Run CUDA's kernels on ``meta`` tensors in modules of users and other libraries.

A CPU build of torch decides for itself how a composite operator runs. The overrides here are
registered with the dispatcher at ``AutogradMeta``, so they also hold where a checkpointed part
is computed again, which a ``TorchFunctionMode`` would miss.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from memplan.catalog.kernel_profiles import AttentionKernel, KernelProfile
from memplan.step.kernels.attention_choice import FLASH_LARGEST_WIDTH
from memplan.trace.reference.operations import aten, attention, repeated, rms_norm
from memplan.units import round_up

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


@contextmanager
def overridden(
    overrides: Mapping[str, Callable[..., Tensor]], below: Mapping[str, Callable[..., Any]] = MappingProxyType({})
) -> Iterator[None]:
    """Run operators on ``meta`` tensors by other functions, and those that have no form there by ones of ours.

    The latter, and what is told of ``below``, are replaced below autograd, which keeps their own derivatives.
    """
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        for name, function in {**_AS_ON_A_GPU, **overrides}.items():
            library.impl(name, function, "AutogradMeta")  # type: ignore[no-untyped-call]
        for name, function in {**_FORMS, **below}.items():
            library.impl(name, function, "Meta")  # type: ignore[no-untyped-call]
        yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call]


@contextmanager
def cuda_operators() -> Iterator[None]:
    """Run dropout and grouped products on ``meta`` tensors as CUDA does, also inside composite operators.

    CUDA's mask of dropout is one byte, and its grouped products take fp16 and fp32 besides bf16.
    """
    with overridden({"dropout": dropout}):
        yield


@contextmanager
def cuda_kernels(
    profile: KernelProfile, autocast: torch.dtype | None = None, wide: AttentionKernel | None = None
) -> Iterator[None]:
    """Run attention, norms, dropout and grouped products on ``meta`` tensors as CUDA would under ``profile``.

    Args:
        autocast: Dtype that CUDA's autocast casts products to, or None for no autocast.
    """
    overrides: dict[str, Callable[..., Tensor]] = {
        "scaled_dot_product_attention": _attention(profile, autocast, wide),
        "rms_norm": _rms_norm(autocast),
        "dropout": dropout,
    }
    if autocast is not None:
        overrides |= _autocast(autocast)
    with overridden(overrides):
        yield


def _attention(
    profile: KernelProfile, autocast: torch.dtype | None, wide: AttentionKernel | None
) -> Callable[..., Tensor]:
    def scaled_dot_product_attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        del enable_gqa
        if autocast is not None:
            query, key, value = query.to(autocast), key.to(autocast), value.to(autocast)
        if is_causal and attn_mask is None:
            kernel = wide if wide and query.shape[-1] > FLASH_LARGEST_WIDTH else profile.attention
            return attention(query, key, value, kernel=kernel, target="cuda", dropout=dropout_p, scale=scale)
        return _masked_attention(query, key, value, attn_mask, dropout_p, scale)

    return scaled_dot_product_attention


def _masked_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, scale: float | None
) -> Tensor:
    """Return attention under a mask, which only the efficient kernel takes; a boolean mask becomes an additive one."""
    # Source: ``convert_boolean_attn_mask`` in aten/src/ATen/native/transformers/attention.cpp.
    key, value = repeated(key, query.shape[1]), repeated(value, query.shape[1])
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    if mask is not None:
        mask = mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    keeps = torch.is_grad_enabled()
    out: Tensor = aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, keeps, dropout, False, scale=scale
    )[0]
    return out


def _rms_norm(autocast: torch.dtype | None) -> Callable[..., Tensor]:
    def fused(x: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
        del normalized_shape
        if autocast is not None:
            x, weight = x.float(), None if weight is None else weight.float()
        return rms_norm(x, weight, eps or 1e-6, "cuda")

    return fused


def dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """Return what is left of a tensor, with a mask of one byte an element where some of it is dropped."""
    return torch.native_dropout(x, p, train)[0] if train and p else x


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return a product whose bias is added in place where rows do not lie together; torch forms a sum while a dispatch mode is on."""
    # Source: ``linear`` in aten/src/ATen/native/Linear.cpp (v2.13.0).
    out: Tensor
    if bias is None or x.dim() <= 2 or x.is_contiguous() or type(bias) not in _PLAIN or _is_wrapped(bias):
        out = aten.linear.default._op_dk(_COMPOSITE, x, weight, bias)
        return out
    out = torch.matmul(x, weight.t())
    return out.add_(bias)


_PLAIN = (Tensor, torch.nn.Parameter, FakeTensor)
_is_wrapped: Any = torch._C._functorch.is_functorch_wrapped_tensor


def _grouped_mm(
    first: Tensor,
    second: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the result of a grouped product, which is all that CUDA allocates in fp16 and fp32.

    Only bf16 has a kernel of its own; other floats are multiplied group by group, each straight into
    its part of the result. torch's own ``meta`` form knows bf16 alone. Rows of the result begin at
    multiples of 16 bytes.
    """
    # Source: aten/src/ATen/native/GroupedMMUtils.h, ``create_grouped_gemm_output_tensor`` and ``_grouped_mm_fallback``
    # (v2.13.0); https://github.com/pytorch/pytorch/pull/162059.
    assert bias is None, "grouped products with a bias do not exist yet"
    groups: tuple[int, ...] = ()
    if first.dim() == second.dim():
        groups = (len(offs),) if offs is not None else (first.shape[0],)
    rows, columns = first.shape[-2], second.shape[-1]
    dtype = out_dtype or first.dtype
    padded = round_up(columns, 16 // dtype.itemsize)
    strides = (rows * padded, padded, 1)[-2 - len(groups) :]
    return first.new_empty_strided((*groups, rows, columns), strides, dtype=dtype)


def _autocast(dtype: torch.dtype) -> dict[str, Callable[..., Tensor]]:
    """Return overrides that cast as CUDA's autocast does: products down, softmax and losses up.

    Weights are cast at every call: with checkpointing off each weight is used once, so that the
    cache of the real autocast holds the same copies.
    """
    # Source: aten/src/ATen/autocast_mode.h, ``AT_FORALL_LOWER_PRECISION_FP`` and ``AT_FORALL_FP32``.

    def lowered(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))

    def matmul(x: Tensor, other: Tensor) -> Tensor:
        out: Tensor = aten.matmul.default._op_dk(_COMPOSITE, x.to(dtype), other.to(dtype))
        return out

    def softmax(x: Tensor, dim: int, given: torch.dtype | None = None) -> Tensor:
        out: Tensor = aten.softmax.int._op_dk(_COMPOSITE, x, dim, given or torch.float32)
        return out

    def layer_norm(
        x: Tensor, shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, *rest: Any
    ) -> Tensor:
        wide = [None if tensor is None else tensor.float() for tensor in (weight, bias)]
        out: Tensor = aten.layer_norm.default._op_dk(_COMPOSITE, x.float(), shape, *wide, *rest)
        return out

    return {"linear": lowered, "matmul": matmul, "softmax.int": softmax, "layer_norm": layer_norm}


def _like_what_it_is_of(_: Tensor, given: Tensor, *__: Any) -> Tensor:
    """Return a gradient, which is all that its kernel allocates."""
    return torch.empty_like(given, memory_format=torch.contiguous_format)


def _like_what_it_is_drawn_for(given: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(given)


def _in_place(*_: Any, **__: Any) -> None:
    """Write into what is given, as fused optimizers do (aten/src/ATen/native/cuda/FusedSgdKernel.cu)."""


def _listed_ctc_loss(logs: Tensor, targets: Tensor, lengths: Tensor, target_lengths: Tensor, *rest: Any) -> Tensor:
    """Return the loss by lengths in host memory, which is where torch takes them (aten/src/ATen/native/LossCTC.cpp)."""
    lists = lengths.tolist(), target_lengths.tolist()
    out: Tensor = aten.ctc_loss.IntList._op_dk(_COMPOSITE, logs, targets, *lists, *rest)
    return out


def _batch_norm_stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return mean and inverse deviation of each channel (``batch_norm_stats_cuda`` in aten/src/ATen/native/cuda/Normalization.cu)."""
    del eps
    return _wide(x, x.shape[1]), _wide(x, x.shape[1])


def _gathered_norm_stats(x: Tensor, mean: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    del x
    return _wide(mean, mean.shape[1]), _wide(mean, mean.shape[1])


def _wide(like: Tensor, length: int) -> Tensor:
    return like.new_empty(length, dtype=torch.float64 if like.dtype == torch.float64 else torch.float32)


def _normed(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


def _normed_gradient(gradient: Tensor, x: Tensor, *_: Any) -> Tensor:
    del gradient
    return torch.empty_like(x)


def _reduced_norm_gradient(
    gradient: Tensor, x: Tensor, mean: Tensor, deviation: Tensor, weight: Tensor | None, *needed: bool
) -> tuple[Tensor | None, ...]:
    """Return two sums of each channel, and the gradients of weight and bias, where they are needed."""
    del gradient, deviation
    likes = (mean, mean, x if weight is None else weight, x if weight is None else weight)
    needs = (needed[0], needed[0], needed[1], needed[2])
    return tuple(like.new_empty(x.shape[1]) if need else None for like, need in zip(likes, needs, strict=True))


_FORMS: Mapping[str, Callable[..., Any]] = {
    "batch_norm_stats": _batch_norm_stats,
    "batch_norm_gather_stats_with_counts": _gathered_norm_stats,
    "batch_norm_elemt": _normed,
    "batch_norm_backward_reduce": _reduced_norm_gradient,
    "batch_norm_backward_elemt": _normed_gradient,
    "_grouped_mm": _grouped_mm,
    "multi_margin_loss_backward": _like_what_it_is_of,
    "multilabel_margin_loss_backward": _like_what_it_is_of,
    "_standard_gamma_grad": _like_what_it_is_of,
    "_dirichlet_grad": _like_what_it_is_of,
    "_sample_dirichlet": _like_what_it_is_drawn_for,
    "binomial": _like_what_it_is_drawn_for,
    "_fused_sgd_": _in_place,
    "_fused_sgd_.tensor_lr": _in_place,
    "_fused_adagrad_": _in_place,
    "_fused_adagrad_.tensor_lr": _in_place,
    "_fused_adam_.tensor_lr": _in_place,
    "_fused_adamw_.tensor_lr": _in_place,
}
"""Operators without a form on ``meta``."""
_AS_ON_A_GPU: Mapping[str, Callable[..., Tensor]] = {
    "linear": linear,
    "mish_backward": _like_what_it_is_of,
    "ctc_loss.Tensor": _listed_ctc_loss,
}
"""Operators that are composed of others on ``meta`` alone, or of other ones there (native_functions.yaml of v2.13.0)."""
