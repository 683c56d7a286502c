"""The parameters that one rank of a Megatron-LM job has, in the order in which its modules register them.

Matrices are divided by columns (their outputs) or by rows (their inputs) among tensor ranks, vocabulary tables by rows;
norms, routers, biases of outputs, learned positions and the projections that latent attention compresses with are whole
on each of them. A rank has its share of the routed experts, each of them divided among expert tensor ranks.

Source:
    megatron-core 0.16.1: core/models/gpt/gpt_model.py and gpt_layer_specs.py, core/transformer/attention.py,
    multi_latent_attention.py, mlp.py, moe/router.py, moe/experts.py, moe/shared_experts.py, core/tensor_parallel/layers.py
    (what is run: its own modules on a CPU, all ranks of drawn grids); Transformer Engine holds a norm in the projection
    behind it (transformer_engine/pytorch/module/layernorm_linear.py), and whole down projections of latent attention.
"""

from collections.abc import Iterator
from itertools import product
from math import prod

from memplan.catalog.config_keys.parallel_keys import TransformerImplementation
from memplan.documents.frozen_values import dataclass
from memplan.errors import CannotAnswerError, InvalidFileError
from memplan.model.gated_delta_net import GatedDeltaNet
from memplan.model.short_convolution import ShortConvolution
from memplan.model.spec import Attention, LatentAttention, Layer, MixtureOfExperts, Mlp, ModelSpec, Norm
from memplan.model.state_space import StateSpace
from memplan.step.grids.grid import Grid
from memplan.step.grids.pipeline_stages import Chunk
from memplan.units import nearest_divisor, round_up

VOCABULARY_MULTIPLE = 128
"""``--make-vocab-size-divisible-by`` (megatron/training/arguments.py): the vocabulary is padded to this times the tensor degree."""


@dataclass(frozen=True, slots=True)
class RankTensor:
    """A parameter as one rank has it."""

    name: str  # Its name in the rank's chunk of the model
    shape: tuple[int, ...]  # Dimensions of what the rank has
    expert: bool = False  # It is a routed expert's, whose gradients are reduced over a group of its own
    shared: bool = False  # It is a copy of the embedding on the first or last of several stages

    @property
    def elements(self) -> int:
        """Elements of what the rank has."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class MegatronBuild:
    """How Megatron-LM builds a model."""

    implementation: TransformerImplementation = "transformer_engine"  # ``--transformer-impl``
    vocabulary_multiple: int = VOCABULARY_MULTIPLE  # ``--make-vocab-size-divisible-by``
    predicted: int = 0  # ``--mtp-num-layers``: layers that predict one more token each, behind the last one
    grouped: bool = (
        True  # ``--moe-grouped-gemm``: a rank's experts are one module of grouped products, under Transformer Engine
    )


def chunk_tensors(spec: ModelSpec, grid: Grid, chunk: Chunk, build: MegatronBuild) -> tuple[RankTensor, ...]:
    """Return the parameters of one chunk of layers on one rank.

    Raises:
        CannotAnswerError: Megatron-LM has no such part, or it is not modelled.
        InvalidFileError: A degree does not divide what it has to.
    """
    _refuse(spec)
    rows = round_up(spec.vocab_size, build.vocabulary_multiple * grid.tensor) // grid.tensor
    shared = spec.tie_word_embeddings and grid.pipeline > 1
    table = (rows, spec.hidden_size)
    tensors: list[RankTensor] = []
    if chunk.embeds or chunk.predicts:
        again = shared or (build.predicted > 0 and grid.pipeline > 1)
        tensors.append(RankTensor("embedding.word_embeddings.weight", table, shared=again))
        if spec.learned_positions:
            shape = (spec.learned_positions, spec.hidden_size)
            tensors.append(RankTensor("embedding.position_embeddings.weight", shape))
    for index, layer in enumerate(layers_of_chunk(spec, chunk)):
        for tensor in layer_tensors(spec, layer, grid, build):
            name = f"decoder.layers.{index}.{tensor.name}"
            tensors.append(RankTensor(name, tensor.shape, tensor.expert))
    if _has_final_norm(spec, chunk, build):
        tensors += _norm("decoder.final_layernorm.", spec.final_norm, spec.hidden_size)
    for index in range(build.predicted * chunk.predicts):
        for tensor in _predicting(spec, grid, build):
            tensors.append(RankTensor(f"mtp.layers.{index}.{tensor.name}", tensor.shape, tensor.expert))
    if chunk.ends and not (spec.tie_word_embeddings and chunk.embeds):
        tensors.append(RankTensor("output_layer.weight", table, shared=shared and not chunk.predicts))
    return tuple(tensors)


def _has_final_norm(spec: ModelSpec, chunk: Chunk, build: MegatronBuild) -> bool:
    """Tell whether a chunk has the final norm: that of the head, or of the last layer where more tokens are predicted from it."""
    # Source: ``has_final_layernorm_in_this_stage`` in megatron/core/transformer/transformer_block.py (0.16.1)
    if not build.predicted:
        return chunk.ends
    return chunk.count > 0 and chunk.first + chunk.count == spec.num_hidden_layers


def _predicting(spec: ModelSpec, grid: Grid, build: MegatronBuild) -> Iterator[RankTensor]:
    """Yield what predicts one more token: norms of an embedding and of hidden states, the projection of both, a layer as the last one is."""
    # Source: ``MultiTokenPredictionLayer`` in megatron/core/transformer/multi_token_prediction.py (0.16.1)
    layer, hidden = spec.runs[-1].layer, spec.hidden_size
    yield from _norm("enorm.", layer.norm, hidden)
    yield from _norm("hnorm.", layer.norm, hidden)
    yield from _columns("eh_proj.", hidden, 2 * hidden, grid.tensor, False)
    for tensor in layer_tensors(spec, layer, grid, build):
        yield RankTensor(f"transformer_layer.{tensor.name}", tensor.shape, tensor.expert)
    yield from _norm("final_layernorm.", layer.norm, hidden)


def expert_bias_bytes(spec: ModelSpec, chunk: Chunk, predicted: int = 0) -> int:
    """Return the bytes of what steers the choice of experts, which is no parameter.

    Formula:
        6 an expert: ``expert_bias``, which is put back to fp32, and ``local_tokens_per_expert``, which is cast with the model

    Source:
        ``TopKRouter`` in megatron/core/transformer/moe/router.py (0.16.1)
    """
    parts = [layer.feed_forward for layer in layers_of_chunk(spec, chunk)]
    parts += [spec.runs[-1].layer.feed_forward] * (predicted * chunk.predicts)
    return sum(6 * part.num_experts for part in parts if isinstance(part, MixtureOfExperts) and part.score_correction)


def layers_of_chunk(spec: ModelSpec, chunk: Chunk) -> Iterator[Layer]:
    """Yield the layers of a chunk."""
    for run in spec.runs:
        begin, end = max(run.first, chunk.first), min(run.first + run.count, chunk.first + chunk.count)
        yield from (run.layer for _ in range(begin, end))


def layer_tensors(spec: ModelSpec, layer: Layer, grid: Grid, build: MegatronBuild) -> Iterator[RankTensor]:
    """Yield the parameters of one layer on one rank; arguments and errors as of :func:`chunk_tensors`."""
    hidden, engine = spec.hidden_size, build.implementation == "transformer_engine"
    latent = isinstance(layer.attention, LatentAttention)
    outside, inside = ((), ()) if engine else (("input_layernorm.",), ("pre_mlp_layernorm.",))
    experts = isinstance(layer.feed_forward, MixtureOfExperts)
    if engine and latent:
        outside = ("input_layernorm.",)  # the projections behind it are plain ones
    if engine and experts:
        inside = ("pre_mlp_layernorm.",)
    for name in outside:
        yield from _norm(name, layer.norm, hidden)
    if isinstance(layer.attention, LatentAttention):
        yield from _latent_attention(hidden, layer.attention, grid, engine)
    else:
        assert isinstance(layer.attention, Attention)
        yield from _attention(hidden, layer, layer.attention, grid, engine)
    for name in inside:
        yield from _norm(name, layer.norm, hidden)
    if isinstance(layer.feed_forward, Mlp):
        fused = layer.norm if engine else None
        yield from _mlp("mlp.", hidden, layer.feed_forward, grid.tensor, norm=fused)
    elif layer.feed_forward is not None:
        yield from _mixture(hidden, layer.feed_forward, grid, engine and build.grouped)


def _norm(prefix: str, norm: Norm, size: int) -> Iterator[RankTensor]:
    """Yield a norm's parameters, which are whole on every rank."""
    yield RankTensor(f"{prefix}weight", (size,))
    if norm.kind == "layer":
        yield RankTensor(f"{prefix}bias", (size,))


def _columns(
    prefix: str, rows: int, columns: int, degree: int, bias: bool, norm: Norm | None = None
) -> Iterator[RankTensor]:
    """Yield a projection whose outputs, and their biases, are divided; a norm in front of it may be part of it."""
    rows = divided(rows, degree, prefix)
    if norm is not None:
        yield from _norm(f"{prefix}layer_norm_", norm, columns)
    yield RankTensor(f"{prefix}weight", (rows, columns))
    if bias:
        yield RankTensor(f"{prefix}bias", (rows,))


def _rows(prefix: str, rows: int, columns: int, degree: int, bias: bool) -> Iterator[RankTensor]:
    """Yield a projection whose inputs are divided; its biases are whole."""
    yield RankTensor(f"{prefix}weight", (rows, divided(columns, degree, prefix)))
    if bias:
        yield RankTensor(f"{prefix}bias", (rows,))


def divided(size: int, degree: int, what: str) -> int:
    """Return a rank's share of a dimension.

    Raises:
        InvalidFileError: The degree does not divide it.
    """
    if size % degree:
        text = f"parallel: {size} of {what.rstrip('.')} cannot be divided among {degree} tensor parallel ranks"
        raise InvalidFileError([f"{text}; the nearest that divides them is {nearest_divisor(size, degree)}"])
    return size // degree


def _attention(hidden: int, layer: Layer, part: Attention, grid: Grid, engine: bool) -> Iterator[RankTensor]:
    """Yield attention; below one key head a rank, the projections of the rest are divided evenly all the same."""
    prefix, heads, groups = "self_attention.", part.num_heads, part.num_key_value_heads
    divided(heads, grid.tensor, "attention heads")
    if groups % grid.tensor and grid.tensor % groups:
        raise InvalidFileError(
            [f"parallel.tensor: {groups} key and value heads and {grid.tensor} ranks do not divide each other"]
        )
    if part.sinks:
        yield RankTensor(f"{prefix}core_attention.softmax_offset", (heads // grid.tensor,))
    yield from _rows(f"{prefix}linear_proj.", hidden, part.query_size, grid.tensor, part.output_bias)
    rows = part.query_size + 2 * part.key_value_size
    norm = layer.norm if engine else None
    yield from _columns(f"{prefix}linear_qkv.", rows, hidden, grid.tensor, part.qkv_bias, norm)
    if part.query_key_norm is not None:
        for name in ("q_layernorm.", "k_layernorm."):
            yield from _norm(f"{prefix}{name}", part.query_key_norm, part.head_dim)


def _latent_attention(hidden: int, part: LatentAttention, grid: Grid, engine: bool) -> Iterator[RankTensor]:
    prefix, degree, inside = "self_attention.", grid.tensor, part.norm if engine else None
    down = 1 if engine else degree
    divided(part.num_heads, degree, "attention heads")
    query = part.num_heads * part.qk_head_dim
    yield from _rows(f"{prefix}linear_proj.", hidden, part.num_heads * part.v_head_dim, degree, part.output_bias)
    if part.q_lora_rank:
        yield from _columns(f"{prefix}linear_q_down_proj.", part.q_lora_rank, hidden, down, False)
        yield from _columns(f"{prefix}linear_q_up_proj.", query, part.q_lora_rank, degree, False, inside)
    else:
        yield from _columns(f"{prefix}linear_q_proj.", query, hidden, degree, False)
    compressed = part.kv_lora_rank + part.qk_rope_head_dim
    yield from _columns(f"{prefix}linear_kv_down_proj.", compressed, hidden, down, False)
    up = part.num_heads * (part.qk_nope_head_dim + part.v_head_dim)
    yield from _columns(f"{prefix}linear_kv_up_proj.", up, part.kv_lora_rank, degree, False, inside)
    if not engine:
        if part.norm is not None and part.q_lora_rank:
            yield from _norm(f"{prefix}q_layernorm.", part.norm, part.q_lora_rank)
        if part.norm is not None:
            yield from _norm(f"{prefix}kv_layernorm.", part.norm, part.kv_lora_rank)


def _mlp(prefix: str, hidden: int, part: Mlp, degree: int, norm: Norm | None = None) -> Iterator[RankTensor]:
    divided(part.intermediate_size, degree, f"{prefix}ffn_hidden_size")
    rows = part.intermediate_size * (2 if part.gated else 1)
    yield from _columns(f"{prefix}linear_fc1.", rows, hidden, degree, part.bias, norm)
    yield from _rows(f"{prefix}linear_fc2.", hidden, part.intermediate_size, degree, part.bias)


def _mixture(hidden: int, part: MixtureOfExperts, grid: Grid, grouped: bool) -> Iterator[RankTensor]:
    """Yield the router, a rank's experts one by one, and the shared experts.

    Transformer Engine's grouped products register all first projections before the second ones, each expert's bias behind its
    weight; else experts are modules one after the other.

    Source:
        ``GroupedLinear`` in transformer_engine/pytorch/module/grouped_linear.py (2.20.2), ``grouped_mlp_modules`` in
        megatron/core/extensions/transformer_engine_spec_provider.py (0.16.1)
    """
    yield RankTensor("mlp.router.weight", (part.num_experts, hidden))
    if part.expert_bias:
        yield RankTensor("mlp.router.bias", (part.num_experts,))
    if part.num_experts % grid.expert:
        text = f"parallel.expert: {part.num_experts} experts cannot be divided among {grid.expert} ranks"
        near = nearest_divisor(part.num_experts, grid.expert)
        raise InvalidFileError([f"{text}; the nearest that divides them is {near}"])
    one = Mlp(part.intermediate_size, gated=part.gated, bias=part.expert_bias)
    apart = grid.expert > 1
    own = part.num_experts // grid.expert
    expert = list(_mlp("", hidden, one, grid.expert_tensor))
    if grouped:
        for first in range(0, len(expert), 1 + part.expert_bias):
            for index, tensor in product(range(own), expert[first : first + 1 + part.expert_bias]):
                yield RankTensor(f"mlp.experts.{tensor.name}{index}", tensor.shape, apart)
    else:
        for index in range(own):
            for tensor in expert:
                yield RankTensor(f"mlp.experts.local_experts.{index}.{tensor.name}", tensor.shape, apart)
    if part.shared_intermediate_size:
        if part.shared_gate:
            yield RankTensor("mlp.shared_experts.gate_weight", (1, hidden))
        yield from _mlp(
            "mlp.shared_experts.", hidden, Mlp(part.shared_intermediate_size, gated=part.gated), grid.tensor
        )


def _refuse(spec: ModelSpec) -> None:
    """Raise for a model that megatron-core 0.16.1's GPT model cannot be built as, or that is not modelled."""
    for run in spec.runs:
        for reason in _refusals(run.layer):
            raise CannotAnswerError(f"{spec.name}: {reason} is not modelled under Megatron-LM")
    if spec.head_bias:
        raise CannotAnswerError(f"{spec.name}: a bias on the head is not modelled under Megatron-LM")


def _refusals(layer: Layer) -> Iterator[str]:
    part, feed = layer.attention, layer.feed_forward
    if isinstance(part, StateSpace) or layer.beside is not None:
        yield "a state space layer"
        return
    if isinstance(part, GatedDeltaNet) or getattr(part, "output_gate", False):
        yield "a gated delta network"
        return
    if isinstance(part, ShortConvolution):
        yield "a short convolution"
        return
    if part is None or feed is None:
        yield "a layer of one part"
        return
    if layer.placement != "pre":
        yield f"a layer with {layer.placement} norms"
    if not layer.norm.weight or layer.norm.bias != (layer.norm.kind == "layer"):
        yield "a norm without its learned parameters"
    linear = feed.bias if isinstance(feed, Mlp) else feed.expert_bias
    if isinstance(part, Attention):
        if part.query_key_norm is not None and part.query_key_norm_scope == "full":
            yield "a norm over all heads of queries and keys together"
        if part.query_key_norm is not None and part.query_key_norm.kind != layer.norm.kind:
            yield "a norm of queries and keys of another kind than the others"
        if part.output_bias != linear or (linear and not part.qkv_bias):
            yield "a bias on some of the projections only"
    elif part.bias or part.output_bias != linear:
        yield "a bias on some of the projections only"
    if isinstance(feed, MixtureOfExperts) and feed.router_bias != feed.expert_bias:
        yield "a mixture with biases on its router or its experts alone"
    if isinstance(feed, MixtureOfExperts) and feed.expert_bias and feed.shared_intermediate_size:
        yield "a mixture with biases and shared experts"
