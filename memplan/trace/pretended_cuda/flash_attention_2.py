"""The kernels of flash-attn 2 without memory, as transformers calls them for ``attn_implementation: flash_attention_2``.

Rows are full: no token is padding, and each row is one document, so that kernels for lengths that vary are not called.

Source:
    flash_attn/flash_attn_interface.py (``FlashAttnFunc``) and csrc/flash_attn/flash_api.cpp (``mha_fwd``, ``mha_bwd``) of
    Dao-AILab/flash-attention (2.8); ``_flash_attention_forward`` in transformers/modeling_flash_attention_utils.py (5.23.0).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from memplan.units import round_up

BLOCK, WIDTH_MULTIPLE = 128, 8


class _FlashAttention(torch.autograd.Function):
    """What ``flash_attn_func`` saves, and what its backward allocates."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        """Return attention of query, key and value, each ``(batch, tokens, heads, width)``."""
        width = tensors[0].shape[-1]
        beyond = -width % WIDTH_MULTIPLE
        query, key, value = (torch.nn.functional.pad(x, [0, beyond]) if beyond else x for x in tensors)
        out = torch.empty_like(query)
        rows = query.new_empty((query.shape[0], query.shape[2], query.shape[1]), dtype=torch.float32)
        random = torch.empty(2, dtype=torch.int64, device=query.device)
        ctx.save_for_backward(query, key, value, out, rows, random)
        ctx.width = width
        return out[..., :width]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of query, key and value."""
        query, key, value, out, _, _ = ctx.saved_tensors
        arriving, beyond = gradients[0], query.shape[-1] - ctx.width
        formed = [torch.empty_like(x) for x in (query, key, value)]
        padded = torch.nn.functional.pad(arriving, [0, beyond]) if beyond else arriving
        (batch, tokens, heads, width), rows = out.shape, round_up(out.shape[1], BLOCK)
        widest = round_up(width, 32) if width <= 192 else 256
        sums = [
            out.new_empty((batch, heads, rows), dtype=torch.float32),
            out.new_empty((batch, rows, heads, widest), dtype=torch.float32),
        ]
        expanded = [out.new_empty((batch, tokens, heads, width)) for _ in range(2)] if heads != key.shape[2] else []
        del padded, sums, expanded
        return tuple(x[..., : ctx.width] for x in formed)


def _attention(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
               causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
               deterministic: bool = False) -> Tensor:  # fmt: skip
    del dropout_p, softmax_scale, causal, window_size, softcap, deterministic
    result: Tensor = _FlashAttention.apply(q, k, v)  # type: ignore[no-untyped-call]
    return result


def _of_lengths(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
                max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
                window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, deterministic: bool = False) -> Tensor:  # fmt: skip
    raise NotImplementedError(
        "rows are full and of one document each, which no kernel for lengths that vary is called for"
    )


@contextmanager
def flash_attention_2() -> Iterator[None]:
    """Let transformers find flash-attn 2, with the allocations of its kernels on a card; rows are full."""
    from transformers import PreTrainedModel, masking_utils, modeling_flash_attention_utils
    from transformers.models.falcon import modeling_falcon

    own: Any = modeling_flash_attention_utils
    functions = _attention, _of_lengths, None, own._pad_input, own._unpad_input
    register: Any = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    with (
        mock.patch.multiple(own, _lazy_imports=lambda *_, **__: functions, _loaded_implementation=None,
                            _is_packed_sequence=lambda *_: False),
        mock.patch.object(modeling_falcon, "_flash_attention_forward", own._flash_attention_forward, create=True),
        mock.patch.object(PreTrainedModel, "_flash_attn_import_error", return_value=None),
        mock.patch.dict(register._global_mapping, {"flash_attention_2": lambda *_, **__: None}),
    ):  # fmt: skip
        yield
