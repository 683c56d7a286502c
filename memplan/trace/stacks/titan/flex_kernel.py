"""Flex attention on tensors without memory: what its kernels on CUDA save, and what they allocate inside themselves.

They are Triton kernels that torch generates, so that there is none to run on a CPU.

Source:
    torch/_inductor/kernel/flex/flex_attention.py (v2.13.0): ``flex_attention`` allocates the result in the query's
    layout, ``logsumexp`` and ``max_scores``; ``flex_attention_backward`` ``delta`` and three gradients.
    torch/_higher_order_ops/flex_attention.py, ``FlexAttentionAutogradOp``: saves query, key, value, result and
    ``logsumexp``.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from memplan.units import ceil_div

BLOCK = 128
"""Tokens of a block of the mask (``_DEFAULT_SPARSE_BLOCK_SIZE``)."""


@torch.library.custom_op("memplan::flex_attention", mutates_args=())
def flex_forward(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Refuse to run: only the shapes of its results are known."""
    raise NotImplementedError("flex attention is traced on tensors without memory")


@flex_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    del key, value
    return torch.empty_like(query), query.new_empty(query.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("memplan::flex_attention_backward", mutates_args=())
def flex_backward(
    query: Tensor, key: Tensor, value: Tensor, result: Tensor, statistics: Tensor, gradient: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Refuse to run: only the shapes of its results are known."""
    raise NotImplementedError("flex attention is traced on tensors without memory")


@flex_backward.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, result: Tensor, statistics: Tensor, gradient: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    del result, statistics, gradient
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _saved(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs, *output)


def _formed(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
    query, key, value, result, statistics = ctx.saved_tensors
    formed: tuple[Tensor, ...] = flex_backward(query, key, value, result, statistics, gradients[0])
    return formed


flex_forward.register_autograd(_formed, setup_context=_saved)


class _Beside(NamedTuple):
    """What is returned beside attention, where nothing is asked for."""

    lse: None = None


def flex_attention(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> tuple[Tensor, Any]:
    """Return attention, and what it returns beside it."""
    return flex_forward(query, key, value)[0], _Beside()


def block_mask(batch: int, length: int, ranks: int = 1) -> BlockMask:
    """Return the mask of rows of packed documents, or of a rank's queries: full and partial blocks, by query and by key."""
    blocks, own = ceil_div(length, BLOCK), ceil_div(length, BLOCK * ranks)

    def tensor(*shape: int) -> Tensor:
        return torch.zeros(batch, 1, *shape, dtype=torch.int32, device="meta")

    by_query, by_key = ((own,), (own, blocks)), ((blocks,), (blocks, own))
    parts = [tensor(*shape) for way in (by_query, by_query, by_key, by_key) for shape in way]
    made: Any = BlockMask
    mask: BlockMask = made((length // ranks, length), *parts, (BLOCK, BLOCK), lambda *_: True)
    return mask
