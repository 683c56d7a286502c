"""What layers of a Megatron-LM job keep from forward to backward, at least, on each stage's ranks.

Only what every kernel keeps is counted, so that the sum is a lower bound: inputs of norms and of products, queries, keys and
values, and what an activation is formed of. Masks of dropout, statistics of norms, experts' rows, what an unfused softmax
keeps, gradients and workspaces come on top.

Source:
    megatron-core 0.16.1 (core/): tensor_parallel/layers.py, lines 468 to 480 (a product saves its input, along a sequence a
    rank's part of it); fusions/fused_bias_swiglu.py and fused_bias_gelu.py (an activation saves what it is formed of);
    tensor_parallel/random.py, lines 506 to 530, and transformer/transformer_block.py, lines 500 to 540 (a checkpoint saves a
    layer's input, or the core attention's); tensor_parallel/cross_entropy.py, lines 21 to 36 (fp32 logits beside the head's);
    pipeline_parallel/schedules.py, lines 738 to 795 (micro-batches in flight). Traced on its own modules.
    Transformer Engine 2.20.2 (read, not run): ``_LayerNormLinear.forward`` in pytorch/module/layernorm_linear.py saves
    ``inputmat`` and ``ln_out``; pytorch/module/linear.py, line 767, ``saved_inputmat``; ``_fused_attn_forward_impl`` in
    pytorch/attention/dot_product_attention/backends.py, line 1844, queries, keys, values and the result.
"""

from __future__ import annotations

from collections.abc import Sequence

from memplan.model.spec import Attention, LatentAttention, Layer, MixtureOfExperts, Mlp
from memplan.step.grids.grid import Grid
from memplan.step.grids.megatron_layers import RankSizes
from memplan.step.grids.megatron_tensors import layers_of_chunk
from memplan.step.grids.pipeline_stages import Chunk


def least_activations(rank: RankSizes, stages: Sequence[Sequence[Chunk]]) -> tuple[int, ...]:
    """Return what is there at once on the ranks of each stage, at least, when most micro-batches are in flight there.

    Args:
        rank: Sizes, of which those that kernels decide are not read.
        stages: The chunks of every stage, the first stage first.
    """
    return tuple(_stage(rank, index, chunks) for index, chunks in enumerate(stages))


def pairs_in_flight(grid: Grid, stage: int, micro_batches: int) -> int:
    """Return how many micro-batches, counted for each of its chunks, a stage's ranks have run forward and not yet backward.

    Formula:
        ``P - r`` without chunks (1F1B), ``2 (P - r - 1) + (V - 1) P + 1`` with V of them, and never more than a step has

    Source:
        ``get_pp_rank_microbatches`` in megatron/core/pipeline_parallel/schedules.py (0.16.1)
    """
    behind = grid.pipeline - stage - 1
    ahead = behind if grid.virtual == 1 else 2 * behind + (grid.virtual - 1) * grid.pipeline
    return min(ahead + 1, micro_batches * grid.virtual)


def _stage(rank: RankSizes, index: int, chunks: Sequence[Chunk]) -> int:
    """Return what one stage's ranks keep: every pair in flight has a chunk's layers, the least of which count."""
    layers = [[_layer(rank, layer) for layer in layers_of_chunk(rank.spec, chunk)] for chunk in chunks]
    again, batch = 0, rank.batch
    if batch.whole_layers:  # the layer that backward begins with is computed again beside all inputs
        again = min((sizes[-1] - rank.stream for sizes in layers if sizes), default=0)
        layers = [[rank.stream] * len(sizes) for sizes in layers]
    retained = pairs_in_flight(rank.grid, index, batch.micro_batches) * min(map(sum, layers))
    if not chunks[-1].ends:
        return retained + again
    return retained + max(again, rank.tokens * rank.words * (batch.element_bytes + 4 * batch.wide_logits))


def _layer(rank: RankSizes, layer: Layer) -> int:
    """Return what a layer keeps: inputs of both norms and their results, attention's operands and result, and what feed-forward
    products read; less what is computed again.
    """
    stream, part, again = rank.stream, layer.feed_forward, rank.batch.modules
    retained = 2 * stream
    widths = _attention_widths(layer.attention, again)
    if "layernorm" not in again:
        retained += stream * (1 + (isinstance(part, Mlp) and "mlp" not in again))
    if isinstance(part, Mlp) and "mlp" not in again:
        widths += part.intermediate_size * (3 if part.gated else 2)
    elif isinstance(part, MixtureOfExperts) and not again & {"moe", "shared_experts"}:
        widths += part.shared_intermediate_size * (3 if part.gated else 2)
    return retained + rank.wide(widths)


def _attention_widths(part: object, again: frozenset[str]) -> int:
    """Return elements of a token that attention keeps on all tensor ranks together."""
    if isinstance(part, Attention):
        return 2 * part.query_size + 2 * part.key_value_size
    assert isinstance(part, LatentAttention)
    result = part.num_heads * part.v_head_dim
    return result if "mla_up_proj" in again else result * 2 + 2 * part.num_heads * part.qk_head_dim
