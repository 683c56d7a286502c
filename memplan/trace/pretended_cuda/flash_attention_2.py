"""The kernels of flash-attn 2 without memory, and transformers' way to them for ``attn_implementation: flash_attention_2``.

In a trace rows are full: no token is padding, and each row is one document, so that transformers calls the kernel for lengths
that vary for the patches of images alone.

Source:
    flash_attn/flash_attn_interface.py (``FlashAttnFunc`` and its like for packed tensors and lengths that vary) and
    csrc/flash_attn/flash_api.cpp (``mha_fwd``, ``mha_bwd``, ``mha_varlen_bwd``) of Dao-AILab/flash-attention (2.8);
    ``_flash_attention_forward`` in transformers/modeling_flash_attention_utils.py (5.23.0).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from memplan.errors import CannotAnswerError
from memplan.units import round_up

BLOCK, WIDTH_MULTIPLE = 128, 8
WIDEST = 256


@dataclass(frozen=True, slots=True)
class AttentionLengths:
    """How sequences lie in the tensors of a call."""

    # First tokens of queries' and of keys' sequences, where they lie one behind another; else nothing, and the first
    # dimension is the batch.
    bounds: tuple[Tensor, ...] = ()
    # Tokens of the longest sequence of queries, and of keys; of use with ``dropped`` alone.
    longest: tuple[int, int] = (0, 0)
    dropped: bool = False  # Whether probabilities are returned of which some are dropped
    probabilities: bool = False  # Whether the statistics are returned besides

    @property
    def dimensions(self) -> int:
        """Dimensions of a tensor of queries."""
        return 3 if self.bounds else 4

    def rows(self, query: Tensor) -> tuple[int, ...]:
        """Return the shape of the statistics: a number for each head and token."""
        return (query.shape[1], query.shape[0]) if self.bounds else (query.shape[0], query.shape[2], query.shape[1])

    def padded_rows(self, query: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of a number for each head and token as backward sums them, and of the rows of its gradient."""
        heads = query.shape[-2]
        if self.bounds:
            tokens = query.shape[0] + BLOCK * (self.bounds[0].numel() - 1)
            return (heads, tokens), (tokens, heads)
        batch, tokens = query.shape[0], round_up(query.shape[1], BLOCK)
        return (batch, heads, tokens), (batch, tokens, heads)

    def scores(self, query: Tensor) -> tuple[int, ...]:
        """Return the shape of the probabilities that are returned."""
        if not self.dropped:
            return (0,)
        batch = self.bounds[0].numel() - 1 if self.bounds else query.shape[0]
        return (batch, query.shape[-2], *(round_up(tokens, BLOCK) for tokens in self.longest))


class FlashAttention(torch.autograd.Function):
    """What the package's functions save, and what their backward allocates; several of query, key and value may be one tensor."""

    @staticmethod
    def forward(ctx: Any, lengths: AttentionLengths, *given: Tensor) -> Any:
        """Return attention, of the shape of the queries: ``(batch, tokens, heads, width)``, or without the batch."""
        width = given[0].shape[-1]
        beyond = -width % WIDTH_MULTIPLE
        ctx.packed = [1 if x.dim() == lengths.dimensions else x.shape[-3] for x in given]
        apart = [part for x, count in zip(given, ctx.packed, strict=True) for part in _parts(x, count)]
        query, key, value = (torch.nn.functional.pad(x, [0, beyond]) if beyond else x for x in apart)
        copies = [_dense(x) for x in (query, key, value)]
        out = torch.empty_like(copies[0])
        rows = query.new_empty(lengths.rows(query), dtype=torch.float32)
        random = torch.empty(2, dtype=torch.int64, device=query.device)
        scores = query.new_empty(lengths.scores(query)) if lengths.probabilities else None
        del copies
        ctx.save_for_backward(query, key, value, out, rows, random, *lengths.bounds)
        ctx.width, ctx.lengths = width, lengths
        if scores is None:
            return out[..., :width]
        ctx.mark_non_differentiable(rows, scores)
        return out[..., :width], rows, scores

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of what was given."""
        query, key, value, out = ctx.saved_tensors[:4]
        formed = _formed(ctx.packed, (query, key, value))
        arriving, beyond = _dense(gradients[0]), query.shape[-1] - ctx.width
        padded = torch.nn.functional.pad(arriving, [0, beyond]) if beyond else arriving
        width, heads = out.shape[-1], out.shape[-2]
        widest = round_up(width, 32) if width <= 192 else WIDEST
        numbers, tokens = ctx.lengths.padded_rows(out)
        sums = [out.new_empty(shape, dtype=torch.float32) for shape in (numbers, (*tokens, widest))]
        expanded = [out.new_empty((*key.shape[:-2], heads, width)) for _ in range(2)] if heads != key.shape[-2] else []
        del arriving, padded, sums, expanded
        return None, *(x[..., : ctx.width] for x in formed)


def _dense(tensor: Tensor) -> Tensor:
    """Return a tensor whose last dimension lies in order (``maybe_contiguous``)."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _parts(tensor: Tensor, count: int) -> list[Tensor]:
    return [tensor] if count == 1 else [tensor.select(-3, number).detach() for number in range(count)]


def _formed(packed: Sequence[int], parts: Sequence[Tensor]) -> list[Tensor]:
    """Return gradients, of which those of packed tensors are one."""
    formed, first = [], 0
    for count in packed:
        part = parts[first]
        shape = (*part.shape[:-2], count, *part.shape[-2:])
        formed.append(torch.empty_like(part) if count == 1 else part.new_empty(shape))
        first += count
    return formed


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
                    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                    alibi_slopes: Tensor | None = None, deterministic: bool = False,
                    return_attn_probs: bool = False) -> Any:  # fmt: skip
    """Return attention of query, key and value, each ``(batch, tokens, heads, width)``."""
    del softmax_scale, causal, window_size, softcap, alibi_slopes
    lengths = AttentionLengths((), (q.shape[1], k.shape[1]), dropout_p > 0, return_attn_probs)
    return attended(lengths, (q, k, v), deterministic=deterministic)


def attended(lengths: AttentionLengths, given: tuple[Tensor, ...], *, deterministic: bool = False) -> Any:
    """Return attention as :class:`FlashAttention` does.

    Raises:
        CannotAnswerError: Gradients are to be summed in one order, for which backward keeps as many sums as the card's
            multiprocessors make of a batch's heads.
    """
    if deterministic:
        raise CannotAnswerError(
            "flash-attn with deterministic=True keeps sums besides that are not modelled; leave it out"
        )
    return FlashAttention.apply(lengths, *given)  # type: ignore[no-untyped-call]


def _of_lengths(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
                max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
                window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, deterministic: bool = False) -> Any:  # fmt: skip
    """Return attention of images' patches, each window or image of which is a sequence; rows of text are full, and none of these."""
    del softmax_scale, causal, window_size, softcap
    longest = (int(max_seqlen_q), int(max_seqlen_k))
    lengths = AttentionLengths((cu_seqlens_q, cu_seqlens_k), longest, dropout_p > 0)
    return attended(lengths, (q, k, v), deterministic=deterministic)


INSTALLED_CHECKS = ("_flash_attn_import_error", "_flash_attn_2_can_dispatch")
"""What a model asks before it takes flash-attn: of transformers now, and of 5.0."""


@contextmanager
def flash_attention_2() -> Iterator[None]:
    """Let transformers find flash-attn 2, from 5.0 on, with the allocations of its kernels on a card; rows are full."""
    import transformers
    from transformers.models.falcon import modeling_falcon

    own: Any = getattr(transformers, "modeling_flash_attention_utils", None)  # since 4.43
    if not hasattr(own, "_loaded_implementation"):
        yield
        return
    from transformers import masking_utils

    functions = flash_attn_func, _of_lengths, None, own._pad_input, own._unpad_input
    check = next(name for name in INSTALLED_CHECKS if hasattr(transformers.PreTrainedModel, name))
    register: Any = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    with (
        mock.patch.multiple(own, _lazy_imports=lambda *_, **__: functions, _loaded_implementation=None,
                            _is_packed_sequence=lambda *_: False),
        mock.patch.object(modeling_falcon, "_flash_attention_forward", own._flash_attention_forward, create=True),
        mock.patch.object(transformers.PreTrainedModel, check, return_value=None),
        mock.patch.dict(register._global_mapping, {"flash_attention_2": lambda *_, **__: None}),
    ):  # fmt: skip
        yield
