"""Operations with more than one implementation, each with the memory behaviour of the chosen one.

On ``meta`` tensors a CPU build of torch would take other kernels than CUDA does, so the kernels
are named here and not left to the dispatcher.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memplan.catalog.kernel_profiles import AttentionKernel, ElementwiseKernel
from memplan.errors import CannotAnswerError
from memplan.model.spec import Activation
from memplan.trace.reference.run_options import Runtime, Target

aten = torch.ops.aten


class FusedRMSNorm(torch.autograd.Function):
    """``aten::_fused_rms_norm`` as CUDA has it: saves the input and one fp32 statistic per row.

    It works on contiguous tensors, copying what is not, and its results are contiguous.

    Source:
        derivatives.yaml, ``_fused_rms_norm``; layer_norm_kernel.cu. The CPU build decomposes it. Order and
        copies as in the memory history of an H200 (torch 2.11).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:  # noqa: ARG004
        """Return a tensor like ``x``."""
        read = x.contiguous()
        out = torch.empty_like(read)
        ctx.save_for_backward(x, weight, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None]:
        """Return gradients of input and weight; ``gradients`` is that of the output."""
        x, weight, _ = ctx.saved_tensors
        read = [tensor.contiguous() for tensor in (*gradients, x)]
        needed = weight is not None and ctx.needs_input_grad[1]
        return torch.empty_like(read[-1]), torch.empty_like(weight) if needed else None, None


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, target: Target) -> Tensor:
    """Return the fused root-mean-square norm of the last dimension of ``x``."""
    if x.is_meta and target == "cuda":
        return FusedRMSNorm.apply(x, weight, eps)  # type: ignore[no-any-return, no-untyped-call]
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return ``x`` (batch, heads, tokens, width) rotated, the halves formed as tensors."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin


class FusedRotary(torch.autograd.Function):
    """Rotation in one kernel, which keeps nothing but the tables."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return ``x`` rotated, as a new tensor."""
        ctx.save_for_backward(cos, sin)
        return torch.empty_like(x) if x.is_meta else rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient rotated back."""
        cos, sin = ctx.saved_tensors
        (gradient,) = gradients
        return torch.empty_like(gradient) if gradient.is_meta else rotated(gradient, cos, -sin), None, None


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    kernel: AttentionKernel,
    target: Target,
    dropout: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Return causal attention, (batch, heads, tokens, width).

    Flash and cuDNN kernels take fewer key heads than query heads as they are; the efficient
    kernel needs them repeated, and the math kernel repeats them itself.

    Source:
        aten/src/ATen/native/transformers/attention.cpp and cuda/sdp_utils.cpp.
    """
    scale = scale or 1 / math.sqrt(query.shape[-1])
    if kernel == "math" or (target == "cpu" and (dropout or query.shape[-1] != value.shape[-1])):
        grouped = key.shape[1] != query.shape[1]
        results = aten._scaled_dot_product_attention_math(
            query, key, value, None, dropout, True, scale=scale, enable_gqa=grouped
        )
    elif target == "cpu":
        results = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout, True, scale=scale)
    elif kernel == "flash":
        return _flash(query, key, value, dropout, scale)
    elif kernel == "cudnn":
        keeps = torch.is_grad_enabled()
        results = aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, keeps, dropout, True, False, scale=scale
        )
    elif kernel == "efficient":
        keeps = torch.is_grad_enabled()
        key, value = repeated(key, query.shape[1]), repeated(value, query.shape[1])
        results = aten._scaled_dot_product_efficient_attention(
            query, key, value, None, keeps, dropout, True, scale=scale
        )
    else:
        raise CannotAnswerError(f"attention kernel {kernel} is not traced")
    out: Tensor = results[0]
    return out


def eager_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    run: Runtime,
    *,
    scale: float | None,
    softcap: float,
    sinks: Tensor | None,
    dropout: float,
) -> Tensor:
    """Return attention step by step, with soft-capped scores or learned sinks.

    Source:
        ``eager_attention_forward`` in transformers 5, models gemma2 and gpt_oss.
    """
    key, value = repeated(key, query.shape[1]), repeated(value, query.shape[1])
    scores = torch.matmul(query, key.transpose(2, 3)) * (scale or 1 / math.sqrt(query.shape[-1]))
    if softcap:
        scores = scores / softcap  # a statement each, so that the name is of one tensor at a time
        scores = torch.tanh(scores)
        scores = scores * softcap
    scores = scores.masked_fill(mask, float("-inf"))
    if sinks is not None:
        column = run.lowered(sinks).view(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], -1)
        scores = torch.cat((scores, column.to(scores.dtype)), -1)
        scores = scores - scores.max(-1, keepdim=True).values
        weights = torch.softmax(scores, -1, dtype=scores.dtype)[..., :-1]
    else:
        weights = torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype)
    weights = dropped(weights, dropout, run.options.target)
    return torch.matmul(weights, value)


def _flash(query: Tensor, key: Tensor, value: Tensor, dropout: float, scale: float) -> Tensor:
    """Return flash attention; its kernel wants heads of one width, a multiple of 8."""
    width = value.shape[-1]
    padded = -(-max(query.shape[-1], width) // 8) * 8
    parts = [_padded(part, padded) for part in (query, key, value)]
    out: Tensor = aten._scaled_dot_product_flash_attention(*parts, dropout, True, False, scale=scale)[0]
    return out if padded == width else out[..., :width]


def _padded(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def repeated(tensor: Tensor, heads: int) -> Tensor:
    """Return ``tensor`` (batch, key heads, tokens, width) with each head repeated to make ``heads``."""
    times = heads // tensor.shape[1]
    return tensor if times == 1 else tensor.repeat_interleave(times, 1)


def dropped(x: Tensor, probability: float, target: Target) -> Tensor:
    """Return ``x`` after dropout; CUDA's kernel keeps a mask of one byte per element."""
    if not probability:
        return x
    if target == "cuda":
        return torch.native_dropout(x, probability, True)[0]
    return F.dropout(x, probability, True)


# ------------------------------------------------------------------ activation functions
CLAMP_LIMIT = 7.0
CLAMP_ALPHA = 1.702
"""Constants of gpt-oss's clamped SwiGLU: https://github.com/openai/gpt-oss, ``swiglu``."""


def squared_relu(run: Runtime, x: Tensor) -> Tensor:
    """Return ``relu(x) ** 2``; autocast forms powers in fp32."""
    return torch.square(run.full(F.relu(x)))


def activated(x: Tensor, kind: Activation) -> Tensor:
    """Return the activation of ``x``."""
    if kind not in _ACTIVATIONS:
        raise CannotAnswerError(f"activation {kind} is not traced; known: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[kind](x)


_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu-tanh": partial(F.gelu, approximate="tanh"),
    "gelu-new": partial(F.gelu, approximate="tanh"),
    "gelu-fast": partial(F.gelu, approximate="tanh"),
}


def gated(gate: Tensor, up: Tensor, kind: Activation, kernel: ElementwiseKernel) -> Tensor:
    """Return ``activation(gate) * up``, step by step or in one kernel that keeps its inputs only."""
    if kernel == "fused":
        return FusedGate.apply(gate, up, kind)  # type: ignore[no-any-return, no-untyped-call]
    return _gated(gate, up, kind)


def _gated(gate: Tensor, up: Tensor, kind: Activation) -> Tensor:
    if kind != "clamped-swiglu":
        return activated(gate, kind) * up
    gate = gate.clamp(max=CLAMP_LIMIT)
    up = up.clamp(min=-CLAMP_LIMIT, max=CLAMP_LIMIT)
    return (up + 1) * (gate * torch.sigmoid(gate * CLAMP_ALPHA))


class FusedGate(torch.autograd.Function):
    """A gated activation in one kernel, forward and backward (Transformer Engine, Liger)."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kind: Activation) -> Tensor:
        """Return the product, keeping gate and up."""
        ctx.save_for_backward(gate, up)
        ctx.kind = kind
        return torch.empty_like(up, memory_format=torch.contiguous_format) if gate.is_meta else _gated(gate, up, kind)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradients of gate and up."""
        gate, up = ctx.saved_tensors
        if gate.is_meta:
            form = torch.contiguous_format
            return torch.empty_like(gate, memory_format=form), torch.empty_like(up, memory_format=form), None
        with torch.enable_grad():
            leaves = gate.detach().requires_grad_(), up.detach().requires_grad_()
            first, second = torch.autograd.grad(_gated(*leaves, ctx.kind), leaves, gradients[0])
        return first, second, None
