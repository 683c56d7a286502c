"""What of a step of Megatron-LM stays on a rank until the next one, beside weights, gradients' buffers and optimizer states.

It is what ``mem-allocated-bytes`` in Megatron-LM's log shows beyond those, but for cuBLAS's own workspaces and what the allocator rounds up.

Source:
    megatron-core 0.16.1 (core/): utils.py (``GlobalMemoryBuffer``, of which "mpu" is the one that is used), pipeline_parallel/schedules.py
    (a stage's input and its gradient stay in the model), models/common/embeddings/rotary_pos_embedding.py (``lru_cache``),
    transformer/dot_product_attention.py, transformer/moe/token_dispatcher.py and router.py (``router_gating_linear``). Transformer Engine 2.20.2
    (pytorch/): module/base.py (``get_dummy_wgrad``), cpp_extensions/gemm.py. Traced on dense models: tests/grids/traced_peaks.py
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from memplan.model.spec import Attention, LatentAttention, Layer, MixtureOfExperts
from memplan.step.grids.megatron_layers import RankSizes
from memplan.step.grids.megatron_tensors import layer_tensors
from memplan.step.grids.pipeline_stages import Chunk

YARN_POSITIONS = 4096
"""``--original-max-position-embeddings``, which no file was seen to set (transformer_config.py, ``MLATransformerConfig``)."""

GROUPED_WORKSPACES = 4
"""How many more workspaces Transformer Engine has for grouped products (cpp_extensions/gemm.py, 2.20.2)."""


def lasting_bytes(rank: RankSizes, chunks: Sequence[Chunk]) -> int:
    """Return what stays on a stage's ranks, but for Transformer Engine's workspaces.

    Args:
        rank: Sizes of one micro-batch.
        chunks: The stage's chunks of layers.
    """
    kinds = [layer for chunk in chunks for layer in _kinds(rank, chunk)]
    received = 2 * rank.stream * sum(not chunk.embeds for chunk in chunks)
    routed = sum(_routed(rank, layer) * count for layer, count in kinds)
    tables = rotation_table(rank) * len(chunks) + sum(_latent_tables(rank, layer) * count for layer, count in kinds)
    return tables + received + routed + _shared_buffer(rank, chunks, kinds) + _dummies(rank, chunks, kinds)


def rotation_table(rank: RankSizes) -> int:
    """Return the fp32 table of angles that each chunk of a model keeps; latent attention has its own in every layer."""
    parts = [run.layer.attention for run in rank.spec.runs]
    return (
        4
        * rank.batch.sequence_length
        * max((part.rotary_dim for part in parts if isinstance(part, Attention)), default=0)
    )


def _latent_tables(rank: RankSizes, layer: Layer) -> int:
    """Return the angles of a layer of latent attention, in fp32, and their cosines and sines (``YarnRotaryEmbedding``), as the weights are."""
    part = layer.attention
    if not isinstance(part, LatentAttention):
        return 0
    return part.qk_rope_head_dim * (4 * rank.batch.sequence_length + 2 * rank.batch.element_bytes * YARN_POSITIONS)


def workspace_bytes(rank: RankSizes) -> int:
    """Return the workspaces of Transformer Engine's products, which a router takes too, whosever modules the others are."""
    routed = any(isinstance(run.layer.feed_forward, MixtureOfExperts) for run in rank.spec.runs)
    grouped = GROUPED_WORKSPACES * (routed and rank.kernels.engine and rank.kernels.grouped_experts)
    return rank.kernels.workspace_bytes * ((rank.kernels.engine or routed) + grouped)


def _kinds(rank: RankSizes, chunk: Chunk) -> Iterator[tuple[Layer, int]]:
    """Yield each kind of layer of a chunk, and how many of it."""
    for run in rank.spec.runs:
        count = min(run.first + run.count, chunk.first + chunk.count) - max(run.first, chunk.first)
        if count > 0:
            yield run.layer, count


def _shared_buffer(rank: RankSizes, chunks: Sequence[Chunk], kinds: Sequence[tuple[Layer, int]]) -> int:
    """Return the one buffer that the head, Megatron-LM's own modules and experts gather tokens in and attention forms products in: as large
    as the largest of them.
    """
    kernels, size = rank.kernels, rank.batch.element_bytes
    needed = [rank.gathered if chunks[-1].ends or not kernels.engine else 0]
    if kernels.gathered_experts and any(isinstance(layer.feed_forward, MixtureOfExperts) for layer, _ in kinds):
        needed.append(rank.stream * rank.grid.expert * rank.grid.expert_tensor * (rank.grid.expert > 1))
    if not kernels.engine:
        parts = [layer.attention for layer, _ in kinds]
        heads = max((part.num_heads for part in parts if isinstance(part, Attention | LatentAttention)), default=0)
        needed.append(rank.tokens * rank.batch.sequence_length * (heads // rank.grid.tensor) * size)
    return max(needed)


def _routed(rank: RankSizes, layer: Layer) -> int:
    """Return what a mixture's dispatcher still knows of the last micro-batch: which tokens go where, how much of each, and where they were.

    Every expert is given as many tokens; they are more or fewer by what is routed.
    """
    part = layer.feed_forward
    if not isinstance(part, MixtureOfExperts):
        return 0
    if not rank.kernels.gathered_experts:
        return rank.rows * (part.num_experts * (1 + 4) + part.experts_per_token * 8)
    rows = rank.rows * rank.grid.expert * rank.grid.expert_tensor
    own = rows * part.experts_per_token // rank.grid.expert
    return rows * (part.num_experts // rank.grid.expert) + own * (4 + 8)


def _dummies(rank: RankSizes, chunks: Sequence[Chunk], kinds: Sequence[tuple[Layer, int]]) -> int:
    """Return the empty gradients that autograd is handed where products add to the buffer: one stands for all matrices of a shape."""
    if not (rank.kernels.fused_gradients and rank.kernels.engine):
        return 0
    hidden = rank.spec.hidden_size
    shapes = {
        tensor.shape
        for layer in dict(kinds)
        for tensor in layer_tensors(rank.spec, layer, rank.grid, rank.build)
        if ".linear_" in tensor.name and len(tensor.shape) == 2
    }
    shapes |= {(rank.words, hidden) for chunk in chunks if chunk.ends}
    return sum(rows * columns * rank.batch.element_bytes for rows, columns in shapes)
