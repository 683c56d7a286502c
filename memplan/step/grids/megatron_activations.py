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

from memplan.model.spec import Attention, LatentAttention, Layer, MixtureOfExperts, Mlp, ModelSpec
from memplan.step.grids.grid import Grid
from memplan.step.grids.megatron_tensors import MegatronBuild, layers_of_chunk
from memplan.step.grids.pipeline_stages import Chunk
from memplan.units import round_up
from memplan.values import dataclass


@dataclass(frozen=True, slots=True)
class MegatronBatch:
    """What a step is given, and how it keeps it.

    Attributes:
        micro_batch_size: Sequences of a micro-batch.
        sequence_length: Tokens of each.
        micro_batches: Of a step.
        whole_layers: Only layers' inputs are kept, and layers computed again (``--recompute-granularity full``).
        modules: What of a layer is computed again otherwise (``--recompute-modules``).
        element_bytes: Bytes of an element that products read.
        wide_logits: The loss copies logits to fp32.
    """

    micro_batch_size: int
    sequence_length: int
    micro_batches: int = 1
    whole_layers: bool = False
    modules: frozenset[str] = frozenset()
    element_bytes: int = 2
    wide_logits: bool = True


def least_activations(
    spec: ModelSpec, grid: Grid, stages: Sequence[Sequence[Chunk]], build: MegatronBuild, batch: MegatronBatch
) -> tuple[int, ...]:
    """Return what is there at once on the ranks of each stage, at least, when most micro-batches are in flight there.

    Args:
        grid: Degrees of parallelism.
        stages: The chunks of every stage, the first stage first.
    """
    return tuple(_stage(spec, grid, index, chunks, build, batch) for index, chunks in enumerate(stages))


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


def _stage(
    spec: ModelSpec, grid: Grid, index: int, chunks: Sequence[Chunk], build: MegatronBuild, batch: MegatronBatch
) -> int:
    """Return what one stage's ranks keep: every pair in flight has a chunk's layers, the least of which count."""
    layers = [list(layers_of_chunk(spec, chunk)) for chunk in chunks]
    each = min(sum(_kept(spec, layer, grid, batch) for layer in chunk) for chunk in layers)
    kept = pairs_in_flight(grid, index, batch.micro_batches) * each
    again = 0
    if batch.whole_layers:  # the layer that backward begins with is computed again beside all inputs
        ends = [_layer(spec, chunk[-1], grid, batch) - _stream(spec, grid, batch) for chunk in layers if chunk]
        again = min(ends, default=0)
    if not chunks[-1].ends:
        return kept + again
    rows = round_up(spec.vocab_size, build.vocabulary_multiple * grid.tensor) // grid.tensor
    logits = _tokens(grid, batch) * rows * (batch.element_bytes + 4 * batch.wide_logits)
    return kept + max(again, logits)


def _kept(spec: ModelSpec, layer: Layer, grid: Grid, batch: MegatronBatch) -> int:
    """Return what a layer keeps of one micro-batch."""
    return _stream(spec, grid, batch) if batch.whole_layers else _layer(spec, layer, grid, batch)


def _tokens(grid: Grid, batch: MegatronBatch) -> int:
    return batch.micro_batch_size * (batch.sequence_length // grid.context)


def _stream(spec: ModelSpec, grid: Grid, batch: MegatronBatch) -> int:
    """Return the residual stream of one micro-batch, or a rank's part of it."""
    shared = grid.tensor if grid.sequence else 1
    return _tokens(grid, batch) // shared * spec.hidden_size * batch.element_bytes


def _layer(spec: ModelSpec, layer: Layer, grid: Grid, batch: MegatronBatch) -> int:
    """Return what a layer keeps: inputs of both norms and their results, attention's operands and result, and what feed-forward
    products read; less what is computed again.
    """
    tokens, stream, part, again = _tokens(grid, batch), _stream(spec, grid, batch), layer.feed_forward, batch.modules
    kept = 2 * stream
    widths = _attention_widths(layer.attention, again)
    if "layernorm" not in again:
        kept += stream * (1 + (isinstance(part, Mlp) and "mlp" not in again))
    if isinstance(part, Mlp) and "mlp" not in again:
        widths += part.intermediate_size * (3 if part.gated else 2)
    elif isinstance(part, MixtureOfExperts) and not again & {"moe", "shared_experts"}:
        widths += part.shared_intermediate_size * (3 if part.gated else 2)
    return kept + tokens * (widths // grid.tensor) * batch.element_bytes


def _attention_widths(part: object, again: frozenset[str]) -> int:
    """Return elements of a token that attention keeps on all tensor ranks together."""
    if isinstance(part, Attention):
        return 2 * part.query_size + 2 * part.key_value_size
    assert isinstance(part, LatentAttention)
    result = part.num_heads * part.v_head_dim
    return result if "mla_up_proj" in again else result * 2 + 2 * part.num_heads * part.qk_head_dim
