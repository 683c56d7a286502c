"""torchtitan's flex attention, and sequences that GPUs share: each has a part of the tokens, and gathers all keys and values to attend.

How the load is balanced, tensors are divided and keys gathered is torchtitan's and torch's own code. The block mask of flex
attention, which torch compiles, has the shapes that ``_create_cp_block_mask`` gives it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torchtitan.distributed.context_parallel import api
from torchtitan.models.common.attention import FlexAttention

from memplan.trace.pretended_cuda.fake_devices import replaced
from memplan.trace.stacks.titan.flex_kernel import block_mask, flex_attention

if TYPE_CHECKING:
    from torchtitan.distributed import ParallelDims

META = torch.device("meta")


@contextlib.contextmanager
def runs_flex() -> Iterator[None]:
    """Let flex attention run as its kernel does on CUDA."""
    original = FlexAttention.__dict__["compiled_flex_attn"]
    FlexAttention.compiled_flex_attn = staticmethod(flex_attention)
    try:
        yield
    finally:
        FlexAttention.compiled_flex_attn = original


@contextlib.contextmanager
def attending_along(model: Any, dims: ParallelDims) -> Iterator[None]:
    """Let a model's attention gather keys and values over the ranks that share a sequence, as ``parallelize_llama`` does."""
    made = api._HeadTailLoadBalancer

    def balancer(length: int, ranks: int, _: str) -> Any:
        return made(length, ranks, META)

    with replaced(api, {"_HeadTailLoadBalancer": balancer}):
        api.apply_cp_to_forward(
            [block.attention.inner_attention for block in model.layers.values()], dims.get_mesh("cp")
        )
        yield


def own_part(rows: dict[str, Any], labels: Tensor, dims: ParallelDims) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Return a rank's token ids and labels, and what else its model is called with, as the trainer prepares them."""
    mesh, more = dims.get_mesh("cp"), {key: value for key, value in rows.items() if key != "input"}
    length = labels.shape[1]
    inputs, labels, more = api.prepare_context_parallel_input(rows["input"], labels, more, mesh, META)
    more["attention_masks"] = block_mask(labels.shape[0], length, mesh.size())
    return inputs, labels, more
