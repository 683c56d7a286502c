"""The most that a step of Megatron-LM takes on each stage's ranks, beside weights, gradients' buffers and optimizer states, and
what of it stays on a rank until the next step.

What layers keep for backward lies over each other, pair by pair in flight; the peak is that sum and the fullest instant of one
layer's backward, of the head and its loss, or of the embedding. What stays is what ``mem-allocated-bytes`` in Megatron-LM's log
shows beyond those, but for cuBLAS's own workspaces and what the allocator rounds up.

Source:
    megatron-core 0.16.1 (core/): pipeline_parallel/schedules.py (a stage's input and its gradient stay in the model);
    tensor_parallel/layers.py and cross_entropy.py; utils.py (``GlobalMemoryBuffer``, of which "mpu" is the one that is used),
    models/common/embeddings/rotary_pos_embedding.py (``lru_cache``), transformer/dot_product_attention.py,
    transformer/moe/token_dispatcher.py and router.py (``router_gating_linear``). Transformer Engine 2.20.2 (pytorch/):
    module/base.py (``get_dummy_wgrad``), cpp_extensions/gemm.py. Traced on dense models: tests/grids/traced_peaks.py
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from memplan.documents.frozen_values import dataclass
from memplan.model.spec import Attention, LatentAttention, Layer, MixtureOfExperts, Mlp
from memplan.step.grids.grid import Grid
from memplan.step.grids.megatron_layers import RankSizes, layer_sizes
from memplan.step.grids.megatron_tensors import layer_tensors, layers_of_chunk
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


@dataclass(frozen=True, slots=True)
class StepInterval:
    """What a step takes on the ranks of one stage beside what is kept between steps."""

    least: int  # What is there at once whatever kernels run
    expected: int  # The peak with Megatron-LM's defaults
    most: int  # The peak with what of its flags takes most
    lasting: int = 0  # What of it is still there when the step is done, until the next begins


def step_intervals(
    rank: RankSizes, stages: Sequence[Sequence[Chunk]], copies: Sequence[int] = ()
) -> tuple[StepInterval, ...]:
    """Return the interval of each stage.

    Args:
        rank: Sizes with what runs as far as it is known; fused gradients and rotation may be or not.
        stages: The chunks of every stage, the first stage first.
        copies: For each stage, the fp32 copies of gradients that its optimizer leaves until the next step begins; none are left
            where it is not given.
    """
    batch, kernels = rank.batch, rank.kernels
    workspace = workspace_bytes(rank)
    widest = replace(batch, wide_logits=batch.element_bytes < 4)  # as a natively fused loss copies them
    # what else is computed again may not be less at the peak
    named = replace(widest, modules=batch.modules & {"core_attn"})
    taken = replace(kernels, attention_dropout=True, most=True)  # its default, whatever hidden states have
    apart = [
        replace(rank, batch=modules, kernels=replace(taken, fused_gradients=fused, fused_rotary=rotary))
        for modules, fused, rotary in product((widest, named), (True, False), (True, False))
    ]
    most = [max(each) for each in zip(*(step_peaks(one, stages) for one in apart), strict=True)]
    lasting = [
        lasting_bytes(rank, chunks) + workspace + copy
        for chunks, copy in zip(stages, copies or [0] * len(stages), strict=True)
    ]
    return tuple(
        StepInterval(low, max(low, mean + workspace, last), max(low, mean + workspace, high + workspace, last), last)
        for low, mean, high, last in zip(
            least_activations(rank, stages), step_peaks(rank, stages), most, lasting, strict=True
        )
    )


def step_peaks(rank: RankSizes, stages: Sequence[Sequence[Chunk]]) -> tuple[int, ...]:
    """Return the peak of a step on the ranks of each stage beyond weights, gradients' buffers and optimizer states."""
    return tuple(_stage(rank, index, chunks) for index, chunks in enumerate(stages))


def _stage(rank: RankSizes, index: int, chunks: Sequence[Chunk]) -> int:
    """Return one stage's peak: what pairs in flight keep, of chunks that keep most first, and the fullest instant on top."""
    layers = [list(layers_of_chunk(rank.spec, chunk)) for chunk in chunks]
    retained = [sum(layer_sizes(rank, layer)[0] for layer in chunk) for chunk in layers]
    flying = pairs_in_flight(rank.grid, index, rank.batch.micro_batches)
    per_chunk = _pairs_of_chunks(rank.grid, flying, len(chunks))
    below = sum(count * size for count, size in zip(per_chunk, retained, strict=True))
    ends = chunks[-1].ends
    instants = [max((layer_sizes(rank, layer)[1] for layer in chunk), default=0) for chunk in layers]
    top = max(instants)
    size, hidden = rank.batch.element_bytes, rank.spec.hidden_size
    table = rank.words * hidden * size
    square = rank.square if rank.batch.whole_layers or "core_attn" in rank.batch.modules else 0
    if ends:
        tied = rank.spec.tie_word_embeddings and chunks[0].embeds and not rank.kernels.fused_gradients
        top = max(top + table * tied, _head(rank))
    if chunks[0].embeds:
        below += per_chunk[0] * (rank.mask + 8 * rank.tokens)
        tables = table * (1 + (ends and rank.spec.tie_word_embeddings))
        top = max(top, tables + rank.whole + rank.stream - retained[0] - rank.mask - square)
    below += flying * square
    if rank.kernels.most:  # what is sent and received, and what an operation forms beside its result
        parts = [part for run in rank.spec.runs if (part := run.layer.feed_forward)]
        widest = max(rank.spec.hidden_size, *(part.intermediate_size * (1 + part.gated) for part in parts))
        top += 4 * rank.stream + 2 * (rank.whole + rank.wide(widest) + rank.square) + 64 * rank.tokens
    return below + top + _always(rank, chunks)


def _pairs_of_chunks(grid: Grid, flying: int, chunks: int) -> list[int]:
    """Return how many pairs of each chunk are in flight at most: groups of micro-batches, chunk after chunk."""
    counts = [0] * chunks
    for pair in range(flying):
        counts[pair // (grid.group or grid.pipeline) % chunks if chunks > 1 else 0] += 1
    return counts


def _always(rank: RankSizes, chunks: Sequence[Chunk]) -> int:
    """Return what lies below a step's peak all the time: what stays from step to step, and what is sent and received meanwhile."""
    size = lasting_bytes(rank, chunks)
    if chunks[-1].ends:
        return size - rotation_table(rank) * (len(chunks) - 1)
    # what is sent and received while something else is computed, where there are chunks
    meanwhile = (1 if chunks[0].embeds else 3) if len(chunks) > 1 else -(not chunks[0].embeds)
    return size + rank.stream * meanwhile


def _head(rank: RankSizes) -> int:
    """Return the most that the final norm, the head and its loss take, forward and backward."""
    spec, size = rank.spec, rank.batch.element_bytes
    logits, own = rank.tokens * rank.words * size, rank.product_gradient(spec.hidden_size, rank.words, shared=False)
    wide = rank.tokens * rank.words * 4 if rank.batch.wide_logits else 0
    norm = 2 * rank.stream + 4 * rank.rows * (1 + (spec.final_norm.kind == "layer"))
    forming = (
        logits
        + wide
        + rank.square * (not (rank.batch.whole_layers or "core_attn" in rank.batch.modules))
        + 56 * rank.tokens
    )
    return norm + max(forming, _compiled_loss(rank), logits + rank.whole + rank.scattered + own)


def _compiled_loss(rank: RankSizes) -> int:
    """Return what the backward of a compiled loss takes: probabilities in fp32, a copy of them, which gradients are written to, and these in bf16."""
    # Source: ``calculate_gradients`` in core/fusions/fused_cross_entropy.py: ``grad_2d[arange_1d, masked_target_1d] -= softmax_update`` writes to
    # an input of what torch.compile compiles, and inductor does such an ``index_put`` in place only where its own result is what is written back
    # (``can_inplace`` in torch/_inductor/fx_passes/reinplace.py), which is multiplied first
    return (4 + 4 + 2) * rank.tokens * rank.words if rank.batch.copied_softmax else 0


def least_activations(rank: RankSizes, stages: Sequence[Sequence[Chunk]]) -> tuple[int, ...]:
    """Return what is there at once on the ranks of each stage, at least, when most micro-batches are in flight there.

    Args:
        rank: Sizes, of which those that kernels decide are not read.
        stages: The chunks of every stage, the first stage first.
    """
    return tuple(_least_of_stage(rank, index, chunks) for index, chunks in enumerate(stages))


def pairs_in_flight(grid: Grid, stage: int, micro_batches: int) -> int:
    """Return how many micro-batches, counted for each of its chunks, a stage's ranks have run forward and not yet backward.

    Formula:
        ``P - r`` without chunks (1F1B), ``2 (P - r - 1) + (V - 1) G + 1`` with V of them that G micro-batches pass together, and never more
        than a step has

    Source:
        ``get_pp_rank_microbatches`` in megatron/core/pipeline_parallel/schedules.py (0.16.1)
    """
    behind = grid.pipeline - stage - 1
    ahead = behind if grid.virtual == 1 else 2 * behind + (grid.virtual - 1) * (grid.group or grid.pipeline)
    return min(ahead + 1, micro_batches * grid.virtual)


def _least_of_stage(rank: RankSizes, index: int, chunks: Sequence[Chunk]) -> int:
    """Return what one stage's ranks keep: every pair in flight has a chunk's layers, the least of which count."""
    layers = [[_layer(rank, layer) for layer in layers_of_chunk(rank.spec, chunk)] for chunk in chunks]
    again, batch = 0, rank.batch
    if batch.whole_layers:  # the layer that backward begins with is computed again beside all inputs
        again = min((sizes[-1] - rank.stream for sizes in layers if sizes), default=0)
        layers = [[rank.stream] * len(sizes) for sizes in layers]
    retained = pairs_in_flight(rank.grid, index, batch.micro_batches) * min(map(sum, layers))
    if not chunks[-1].ends:
        return retained + again
    logits = rank.tokens * rank.words * (batch.element_bytes + 4 * batch.wide_logits)
    return retained + max(again, logits, _compiled_loss(rank))


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
