"""A model's parameter tensors, from its embedding over its layers to its head."""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from memplan.model.encoder import Encoder
from memplan.model.gated_delta_net import PREFIX, GatedDeltaNet
from memplan.model.inventory import Inventory, ParameterTensor, Role, inside
from memplan.model.short_convolution import ShortConvolution
from memplan.model.spec import (
    Attention,
    LatentAttention,
    Layer,
    LayerRun,
    MixtureOfExperts,
    Mlp,
    ModelSpec,
    Norm,
    TensorNames,
)
from memplan.model.state_space import StateSpace
from memplan.model.tower import TowerTensor

MIXTRAL_ORDER = ("w1", "w2", "w3")
"""Gate, down and up of Mixtral's experts, as their module has them (``MixtralBlockSparseTop2MLP``, transformers 4.57.6)."""


@lru_cache(maxsize=512)
def inventory_of(spec: ModelSpec) -> Inventory:
    """Return the parameter tensors of ``spec``, in the order of the model."""
    names = spec.names
    tensors = [] if spec.tower is None else [_of_tower(tensor) for tensor in spec.tower.tensors]
    rows = spec.vocab_size + spec.unsaid_words
    tensors.append(ParameterTensor(f"{names.embedding}.weight", (rows, spec.hidden_size), "embedding"))
    if spec.embedding_norm is not None and spec.encoder is None:
        tensors += _norm(names.embedding_norm, spec.embedding_norm, spec.hidden_size)
    if spec.learned_positions:
        rows = spec.learned_positions + spec.reserved_positions
        tensors.append(ParameterTensor(f"{names.positions}.weight", (rows, spec.hidden_size), "embedding"))
    if spec.encoder is not None:
        tensors += _encoder_embeddings(spec, spec.encoder)
    for run in spec.runs:
        tensors += _run_tensors(spec, run)
    tensors += _norm(names.final_norm, spec.final_norm, spec.hidden_size)
    tensors += _layer_inputs(spec)
    if spec.encoder is not None:
        tensors += _projected_rows(spec, spec.encoder)
    if not spec.tie_word_embeddings:
        tensors.append(ParameterTensor(f"{names.head}.weight", (spec.vocab_size, spec.hidden_size), "head"))
    if spec.head_bias:
        tensors.append(ParameterTensor(f"{names.head}.bias", (spec.vocab_size,), "bias"))
    tensors += [ParameterTensor(tensor.name, tensor.shape, tensor.role, tensor.count) for tensor in spec.beside]
    return tuple(tensors)


def _layer_inputs(spec: ModelSpec) -> Iterator[ParameterTensor]:
    """Yield embeddings of every layer, and the projection of embedded tokens that is added to them."""
    if width := spec.layer_input:
        rows = spec.num_hidden_layers * width
        yield ParameterTensor(f"{spec.names.layer_embedding}.weight", (spec.layer_vocab, rows), "embedding")
        yield from _linear(spec, spec.names.layer_projection, rows, spec.hidden_size, False)
        yield from _norm(spec.names.layer_projection_norm, spec.final_norm, width)


def _encoder_embeddings(spec: ModelSpec, encoder: Encoder) -> Iterator[ParameterTensor]:
    """Yield the types of tokens, and the norm of what is added to embedded ones."""
    if encoder.token_types:
        shape = (encoder.token_types, spec.hidden_size)
        yield ParameterTensor(f"{spec.names.token_types}.weight", shape, "embedding")
    if spec.embedding_norm is not None:
        yield from _norm(spec.names.embedding_norm, spec.embedding_norm, spec.hidden_size)
    if encoder.distance_buckets and isinstance(part := spec.runs[0].layer.attention, Attention):
        yield ParameterTensor(f"{DISTANCES}.weight", (encoder.distance_buckets, part.num_heads), "embedding")


DISTANCES = "encoder.relative_attention_bias"
"""A table of biases of scores by distance."""


def _projected_rows(spec: ModelSpec, encoder: Encoder) -> Iterator[ParameterTensor]:
    """Yield the projection of a row's token, which the model has, or its head of scores."""
    scorer, width = encoder.scorer, spec.hidden_size
    if encoder.pools or encoder.reads_pooled:
        bias = scorer.bias or not encoder.reads_pooled
        for tensor in _linear(spec, spec.names.pooler, width, width, bias):
            yield replace(tensor, used=encoder.reads_pooled)
    if scorer.norm and encoder.reads_pooled:
        yield from _norm(scorer.norm, spec.final_norm, width)


def _of_tower(tensor: TowerTensor) -> ParameterTensor:
    return ParameterTensor(tensor.name, tensor.shape, tensor.role, tensor.count, used=False)


def _run_tensors(spec: ModelSpec, run: LayerRun) -> Iterator[ParameterTensor]:
    for tensor in _layer_tensors(spec, run.layer):
        name = f"{spec.names.layer}.{tensor.name}"
        yield replace(tensor, name=name, count=run.count, first=run.first)


def _layer_tensors(spec: ModelSpec, layer: Layer) -> Iterator[ParameterTensor]:
    names, hidden = spec.names, spec.hidden_size
    for part in norm_names(names, layer)[layer.bare : 1]:
        yield from _norm(part, layer.norm, hidden)
    if layer.beside is not None:
        yield from _state_space(spec, layer.beside)
    if isinstance(layer.attention, Attention):
        yield from _attention(spec, layer.attention)
    elif isinstance(layer.attention, StateSpace):
        yield from _state_space(spec, layer.attention)
    elif isinstance(layer.attention, GatedDeltaNet):
        yield from _gated_delta_net(spec, layer.attention)
    elif isinstance(layer.attention, ShortConvolution):
        yield from _short_convolution(spec, layer.attention)
    elif layer.attention is not None:
        yield from _latent_attention(spec, layer.attention)
    for part in norm_names(names, layer)[1:]:
        yield from _norm(part, layer.norm, hidden)
    prefix = names.mlp
    if isinstance(layer.feed_forward, Mlp):
        yield from _mlp(spec, layer.feed_forward, prefix)
    elif layer.feed_forward is not None:
        yield from _mixture(spec, layer.feed_forward, prefix)
    if spec.layer_input:
        yield from _linear(spec, LAYER_INPUT[0], spec.layer_input, hidden, False)
        yield from _linear(spec, LAYER_INPUT[1], hidden, spec.layer_input, False)
        yield from _norm(LAYER_INPUT[2], layer.norm, hidden)
    if layer.experts is not None:
        yield from _experts_beside(spec, layer.experts, layer.norm)


def norm_names(names: TensorNames, layer: Layer) -> tuple[str, ...]:
    """Return the names of a layer's norms, those around attention first."""
    if layer.placement == "pre":
        return (names.input_norm, names.post_attention_norm)
    if layer.placement in ("post", "summed"):
        return (names.post_attention_norm, names.post_feed_forward_norm)
    if layer.placement == "sandwich":
        return (names.input_norm, names.post_attention_norm, names.pre_feed_forward_norm, names.post_feed_forward_norm)
    return (names.input_norm, names.post_attention_norm)[: layer.parallel_norms]


def norm_of(layer: Layer, index: int) -> Norm:
    """Return a layer's norm of a number; none where it is the one before attention, and nothing stands there."""
    return Norm("none", weight=False) if layer.bare and not index else layer.norm


def _norm(name: str, norm: Norm, *shape: int) -> Iterator[ParameterTensor]:
    if norm.weight:
        yield ParameterTensor(f"{name}.weight", shape, "norm")
    if norm.bias:
        yield ParameterTensor(f"{name}.bias", shape, "bias")


def _linear(
    spec: ModelSpec, name: str, rows: int, columns: int, bias: bool, role: Role = "hidden_matrix"
) -> Iterator[ParameterTensor]:
    """Yield a projection from ``columns`` to ``rows`` features."""
    shape = (columns, rows) if spec.transposed_linear else (rows, columns)
    yield ParameterTensor(f"{name}.weight", shape, role, transposed=spec.transposed_linear)
    if bias:
        yield ParameterTensor(f"{name}.bias", (rows,), "bias")


def _attention(spec: ModelSpec, part: Attention) -> Iterator[ParameterTensor]:
    names, hidden = spec.names, spec.hidden_size
    prefix = names.attention
    if part.sinks:
        yield ParameterTensor(f"{prefix}.{names.sinks}", (part.num_heads,), "bias")
    if part.fused_qkv:
        rows = part.query_size + 2 * part.key_value_size
        yield from _linear(spec, f"{prefix}.{names.qkv}", rows, hidden, part.qkv_bias)
    else:
        queries = part.query_size * (2 if part.output_gate else 1)
        yield from _linear(spec, f"{prefix}.{names.query}", queries, hidden, part.qkv_bias)
        if not part.reuses:
            yield from _linear(spec, f"{prefix}.{names.key}", part.key_value_size, hidden, part.qkv_bias)
        if not part.keys_as_values and not part.reuses:
            yield from _linear(spec, f"{prefix}.{names.value}", part.key_value_size, hidden, part.qkv_bias)
    yield from _linear(spec, f"{prefix}.{names.output}", hidden, part.query_size, part.output_bias)
    if part.query_key_norm is not None:
        for name, heads in ((names.query_norm, part.num_heads), (names.key_norm, part.num_key_value_heads))[
            : 1 if part.reuses else 2
        ]:
            yield from _norm(f"{prefix}.{name}", part.query_key_norm, *part.norm_shape(heads))


def _gated_delta_net(spec: ModelSpec, part: GatedDeltaNet) -> Iterator[ParameterTensor]:
    for name in ("dt_bias", "A_log"):
        yield ParameterTensor(f"{PREFIX}.{name}", (part.num_value_heads,), "bias")
    yield ParameterTensor(f"{PREFIX}.conv1d.weight", (part.convolved_size, 1, part.kernel_size), "bias")
    yield ParameterTensor(f"{PREFIX}.norm.weight", (part.value_head_dim,), "norm")
    yield from _linear(spec, f"{PREFIX}.out_proj", spec.hidden_size, part.value_size, False)
    for name, rows in part.projections:
        yield from _linear(spec, f"{PREFIX}.{name}", rows, spec.hidden_size, False)


def _short_convolution(spec: ModelSpec, part: ShortConvolution) -> Iterator[ParameterTensor]:
    hidden, prefix = spec.hidden_size, part.prefix
    yield ParameterTensor(f"{prefix}.conv.weight", (hidden, 1, part.kernel_size), "bias")
    yield from _linear(spec, f"{prefix}.in_proj", 3 * hidden, hidden, False)
    yield from _linear(spec, f"{prefix}.out_proj", hidden, hidden, False)


def _state_space(spec: ModelSpec, part: StateSpace) -> Iterator[ParameterTensor]:
    prefix = part.prefix
    for name in ("dt_bias", "A_log", "D"):
        yield ParameterTensor(f"{prefix}.{name}", (part.num_heads,), "bias")
    yield ParameterTensor(f"{prefix}.conv1d.weight", (part.convolved_size, 1, part.kernel_size), "bias")
    if part.convolution_bias:
        yield ParameterTensor(f"{prefix}.conv1d.bias", (part.convolved_size,), "bias")
    yield from _linear(spec, f"{prefix}.in_proj", part.projected_size, spec.hidden_size, part.bias)
    if part.normalised:
        yield ParameterTensor(f"{prefix}.norm.weight", (part.inner_size,), "norm")
    yield from _linear(spec, f"{prefix}.out_proj", spec.hidden_size, part.inner_size, part.output_bias)


def _latent_attention(spec: ModelSpec, part: LatentAttention) -> Iterator[ParameterTensor]:
    names, hidden = spec.names, spec.hidden_size
    prefix = names.attention
    query = part.num_heads * part.qk_head_dim
    if part.q_lora_rank:
        yield from _linear(spec, f"{prefix}.{names.query_down}", part.q_lora_rank, hidden, part.bias)
        if part.norm is not None:
            yield from _norm(f"{prefix}.{names.query_down_norm}", part.norm, part.q_lora_rank)
        yield from _linear(spec, f"{prefix}.{names.query_up}", query, part.q_lora_rank, False)
    else:
        yield from _linear(spec, f"{prefix}.{names.query}", query, hidden, False)
    down = part.kv_lora_rank + part.qk_rope_head_dim
    yield from _linear(spec, f"{prefix}.{names.key_value_down}", down, hidden, part.bias)
    if part.norm is not None:
        yield from _norm(f"{prefix}.{names.key_value_down_norm}", part.norm, part.kv_lora_rank)
    up = part.num_heads * (part.qk_nope_head_dim + part.v_head_dim)
    yield from _linear(spec, f"{prefix}.{names.key_value_up}", up, part.kv_lora_rank, False)
    yield from _linear(
        spec, f"{prefix}.{names.output}", hidden, part.num_heads * part.v_head_dim, part.bias or part.output_bias
    )


def _mlp(spec: ModelSpec, part: Mlp, prefix: str) -> Iterator[ParameterTensor]:
    names, hidden, inner = spec.names, spec.hidden_size, part.intermediate_size
    if part.gated and part.fused_gate_up:
        yield from _linear(spec, inside(prefix, names.gate_up), 2 * inner, hidden, part.bias)
    elif part.gated:
        yield from _linear(spec, inside(prefix, names.gate), inner, hidden, part.bias)
        yield from _linear(spec, inside(prefix, names.up), inner, hidden, part.bias)
    else:
        yield from _linear(spec, inside(prefix, names.up), inner, hidden, part.bias)
    yield from _linear(spec, inside(prefix, names.down), hidden, inner, part.bias)
    if part.activation == "xielu":
        yield from (ParameterTensor(inside(prefix, name), (1,), "bias") for name in XIELU)


XIELU = ("act_fn.alpha_p", "act_fn.alpha_n")
"""The numbers that xIELU learns."""


def _mixture(spec: ModelSpec, part: MixtureOfExperts, prefix: str) -> Iterator[ParameterTensor]:
    names, hidden = spec.names, spec.hidden_size
    router = inside(prefix, names.router)
    role: Role = "hidden_matrix" if part.modules else "router"
    yield ParameterTensor(f"{router}.weight", (part.num_experts, hidden), role)
    if part.router_bias:
        yield ParameterTensor(f"{router}.bias", (part.num_experts,), "bias")
    stacked = _expert_modules if part.modules else _experts
    yield from stacked(spec, part, inside(prefix, names.experts))
    if part.shared_intermediate_size:
        shared = Mlp(part.shared_intermediate_size, part.activation, part.gated, part.shared_fused)
        yield from _mlp(spec, shared, inside(prefix, names.shared_experts))
    if part.latent_size:
        yield from _linear(spec, inside(prefix, LATENT[0]), part.latent_size, hidden, False)
        yield from _linear(spec, inside(prefix, LATENT[1]), hidden, part.latent_size, False)
    if part.shared_gate:
        yield ParameterTensor(f"{inside(prefix, names.shared_gate)}.weight", (1, hidden), "router")


LATENT = ("fc1_latent_proj", "fc2_latent_proj")
"""What projects tokens to the width of routed experts, and their result back (Nemotron 3 Super)."""

LAYER_INPUT = ("per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm")
"""What a layer with an embedding of its own scales that by, projects it with, and normalises."""

EXPERT_NORMS = ("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2")
"""Norms of layers with experts beside a dense part: behind that part, before the experts, and behind them."""


def _experts_beside(spec: ModelSpec, part: MixtureOfExperts, norm: Norm) -> Iterator[ParameterTensor]:
    """Yield experts of Gemma 4's layers, whose router is a linear layer behind a scale, and scales each expert's score."""
    for name in EXPERT_NORMS:
        yield from _norm(name, norm, spec.hidden_size)
    yield from _linear(spec, "router.proj", part.num_experts, spec.hidden_size, False)
    yield ParameterTensor("router.scale", (spec.hidden_size,), "bias")
    yield ParameterTensor("router.per_expert_scale", (part.num_experts,), "bias")
    yield from _experts(spec, part, "experts")


def _experts(spec: ModelSpec, part: MixtureOfExperts, prefix: str) -> Iterator[ParameterTensor]:
    """Yield the stacked routed experts: (experts, 2 * inner, hidden), without a gate (experts, inner, hidden), and (experts, hidden, inner)."""
    hidden, inner = part.latent_size or spec.hidden_size, part.intermediate_size
    experts, used = part.own_experts, part.experts_per_token
    rows, name = (2 * inner, "gate_up_proj") if part.gated else (inner, "up_proj")
    up, down = (rows, hidden), (hidden, inner)
    if part.transposed:
        up, down = (hidden, rows), (inner, hidden)
    if part.every_expert:
        for one, shape in ((name, up), ("down_proj", down)):
            tensor = ParameterTensor(f"{prefix}.{one}", (experts, *shape), "expert_matrix", experts_per_token=used)
            yield replace(tensor, batched=True)
        return
    if part.gated and not part.fused_gate_up:
        for one in ("gate_proj", "up_proj"):
            yield ParameterTensor(f"{prefix}.{one}", (experts, inner, hidden), "expert_matrix", experts_per_token=used)
    else:
        yield ParameterTensor(f"{prefix}.{name}", (experts, *up), "expert_matrix", experts_per_token=used)
    if part.expert_bias:
        yield ParameterTensor(f"{prefix}.{name}_bias", (experts, rows), "bias", experts_per_token=used)
    yield ParameterTensor(f"{prefix}.down_proj", (experts, *down), "expert_matrix", experts_per_token=used)
    if part.expert_bias:
        yield ParameterTensor(f"{prefix}.down_proj_bias", (experts, hidden), "bias", experts_per_token=used)


def _expert_modules(spec: ModelSpec, part: MixtureOfExperts, prefix: str) -> Iterator[ParameterTensor]:
    """Yield the linear layers of each routed expert: (inner, hidden) for gate and up, (hidden, inner) for down."""
    hidden, inner, names = spec.hidden_size, part.intermediate_size, spec.names
    shapes = {names.gate: (inner, hidden), names.up: (inner, hidden), names.down: (hidden, inner)}
    order = MIXTRAL_ORDER if names.gate in MIXTRAL_ORDER else tuple(shapes)
    for expert in range(part.num_experts):
        for name in order:
            yield ParameterTensor(
                f"{prefix}.{expert}.{name}.weight",
                shapes[name],
                "hidden_matrix",
                experts_per_token=part.experts_per_token,
                alternatives=part.num_experts,
            )
