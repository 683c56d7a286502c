"""Families whose rotary positions turn neighbouring dimensions of a head, or whose attention runs beside the feed-forward part.

Cohere's, ERNIE's, GLM's and Llama 4's are of the first kind, Cohere's, GPT-NeoX', Phi's and Falcon's of the second.
"""

from dataclasses import replace

from memplan.model.families.common_parts import (
    Shape,
    attention,
    experts,
    factor,
    gated_mlp,
    layer_norm,
    model,
    plain_mlp,
    rms_norm,
    rotary_dim,
    shape,
    sliding_window,
    whole_heads,
)
from memplan.model.families.config_values import MAXIMUM_LAYERS, ConfigValues
from memplan.model.families.family_fields import runs_as
from memplan.model.families.layer_windows import layer_windows, rotating_layers
from memplan.model.spec import Layer, MixtureOfExperts, Mlp, ModelSpec, Norm, Placement, TensorNames


@runs_as(scored=False, interleaved="wide", centred_norms=True, sums="residual-first")
def cohere(config: ConfigValues) -> ModelSpec:
    """Command R and Aya: attention and feed-forward in parallel behind one LayerNorm without a shift, and scaled logits.

    Source: ``transformers/models/cohere/modeling_cohere.py``.
    """
    common, norm = shape(config), _cohere_norm(config)
    bias, normed = config.flag("attention_bias"), config.flag("use_qk_norm")
    heads = attention(
        config,
        common,
        bias=bias,
        query_key_norm=norm if normed else None,
        query_key_norm_scope="each" if normed else "head",
    )
    layer = Layer(heads, gated_mlp(config), norm, placement="parallel")
    return model(config, common, layer, tied=True, logit_scale=factor(config, "logit_scale", 0.0625))


def _cohere_norm(config: ConfigValues) -> Norm:
    """Return a LayerNorm that has a scale alone."""
    return Norm("layer", epsilon=config.number("layer_norm_eps", default=1e-5))


@runs_as(scored=False, interleaved="wide", centred_norms=True, sums="residual-first", masks=2, masks_from=4)
def cohere2(config: ConfigValues) -> ModelSpec:
    """Command R7B and Command A: Command R's layers, of which those within a window rotate and the others do not.

    Source: ``transformers/models/cohere2/modeling_cohere2.py``.
    """
    common = shape(config)
    window, bias = sliding_window(config, common.num_hidden_layers), config.flag("attention_bias")
    config.only("use_qk_norm", False)
    config.only("use_parallel_block", True)
    config.only("use_gated_activation", True)
    heads = attention(config, common, bias=bias)
    turning = Layer(heads, gated_mlp(config), _cohere_norm(config), placement="parallel")
    still = replace(turning, attention=replace(heads, rotary_dim=0))
    windows = layer_windows(config.keys, common.num_hidden_layers)
    layers = [turning if width else still for width in windows]
    return model(config, common, layers, tied=True, logit_scale=factor(config, "logit_scale", 0.0625), **window)


@runs_as(scored=False, interleaved="spread-wide", wide_rotary=True)
def ernie4_5(config: ConfigValues) -> ModelSpec:
    """ERNIE 4.5 without experts: Llama's layers, rotated in fp32.

    Source: ``transformers/models/ernie4_5/modeling_ernie4_5.py``.
    """
    common, bias = shape(config, key_value_heads=2, head_dim=128), config.flag("use_bias")
    heads = attention(config, common, bias=bias)
    layer = Layer(heads, gated_mlp(config, bias=bias), rms_norm(config, 1e-5))
    return model(config, common, layer, tied=True)


@runs_as(scored=True, joins_none=True, interleaved="spread")
def glm(config: ConfigValues) -> ModelSpec:
    """GLM-4 of 2024: Llama's layers with one matrix for both projections up, and half of a head rotated.

    Source: ``transformers/models/glm/modeling_glm.py``; https://arxiv.org/abs/2406.12793.
    """
    return _glm(config, "pre", TensorNames())


def _glm(config: ConfigValues, placement: Placement, names: TensorNames) -> ModelSpec:
    """Return the shapes of a config of GLM's first or second kind, which differ in their norms."""
    common = shape(config, key_value_heads=2, head_dim=128)
    rotated = rotary_dim(config, common.head_dim, default=0.5)
    heads = attention(config, common, rotated, qkv_bias=config.flag("attention_bias", default=True))
    mlp = Mlp(config.integer("intermediate_size"), config.activation("hidden_act"), fused_gate_up=True)
    return model(config, common, Layer(heads, mlp, rms_norm(config, 1.5625e-7), placement=placement), names=names)


GLM4_NAMES = TensorNames(
    post_attention_norm="post_self_attn_layernorm",
    pre_feed_forward_norm="post_attention_layernorm",
    post_feed_forward_norm="post_mlp_layernorm",
)


@runs_as(scored=True, joins_none=True, interleaved="spread")
def glm4(config: ConfigValues) -> ModelSpec:
    """GLM-4 of 2025, without experts: GLM's layers with norms on both sides of each part.

    Source: ``transformers/models/glm4/modeling_glm4.py``.
    """
    return _glm(config, "sandwich", GLM4_NAMES)


@runs_as(
    scored=False,
    complex_rotary=True,
    wide_softmax=False,
    wide_weights=True,
    names_attention=True,
    unnamed_norms=True,
    masks_by_kind=True,
    wide_factors=True,
    unfused="last_hidden_state",
    takes_flash_attn=False,
    adapted_experts="left",
)
def llama4_text(config: ConfigValues) -> ModelSpec:
    """Llama 4, text: layers that rotate and attend within chunks beside some that do neither, experts beside a shared one in some or all.

    Source: ``transformers/models/llama4/modeling_llama4.py`` and its configuration (v5.23.0).
    """
    common, norm = shape(config, key_value_heads=8, head_dim=128, vocab_size=202_048), rms_norm(config, 1e-5)
    bias, count = config.flag("attention_bias"), common.num_hidden_layers
    normed, tuned = config.flag("use_qk_norm", default=True), bool(config.keys.get("attn_temperature_tuning", True))
    config.integers("no_rope_layers", count if config.keys.get("no_rope_layers") else None)
    config.ignore("no_rope_layer_interval", "attention_chunk_size", "floor_scale", "attn_scale", "for_llm_compressor")
    config.ignore("attn_temperature_tuning")  # released as 4 and as true, which mean the same
    config.only("router_jitter_noise", 0.0)
    still = attention(config, common, 0, bias=bias, scales_query=tuned)
    lengths = Norm(weight=False, epsilon=norm.epsilon) if normed else None
    turning = attention(config, common, bias=bias, query_key_norm=lengths, norms_rotated=lengths is not None)
    dense = Mlp(config.integer("intermediate_size_mlp", default=16_384), config.activation("hidden_act"))
    sparse, routed = experts(config, _llama4_mixture(config)), _llama4_sparse(config, count)
    layers = [
        Layer(turning if turns else still, sparse if has_experts else dense, norm)
        for turns, has_experts in zip(rotating_layers(config.keys, count), routed, strict=False)
    ]
    windows = layer_windows(config.keys, count)
    names = TensorNames(mlp="feed_forward", router="router", shared_experts="shared_expert")
    return model(
        config,
        common,
        layers,
        layer_kinds=("chunked_attention",),
        names=names,
        window=max(windows, default=0),
        full_layers=tuple([index for index, window in enumerate(windows) if not window]) if any(windows) else (),
    )


def _llama4_sparse(config: ConfigValues, count: int) -> list[bool]:
    """Return for each layer whether it has experts: as listed, or every so many."""
    step = config.integer("interleave_moe_layer_step", default=1, maximum=MAXIMUM_LAYERS)
    listed = config.integers("moe_layers")
    chosen = range(step - 1, count, step) if listed is None else listed
    return [index in chosen for index in range(count)]


def _llama4_mixture(config: ConfigValues) -> MixtureOfExperts:
    inner = config.integer("intermediate_size", default=8192)
    return MixtureOfExperts(
        num_experts=config.integer("num_local_experts", "num_experts", default=16),
        experts_per_token=config.integer("num_experts_per_tok", default=1),
        intermediate_size=inner,
        activation=config.activation("hidden_act"),
        shared_intermediate_size=inner,
        transposed=True,
        every_expert=True,
        normalised=False,
    )


NEOX_NAMES = TensorNames(
    embedding="gpt_neox.embed_in",
    layer="gpt_neox.layers.{}",
    final_norm="gpt_neox.final_layer_norm",
    attention="attention",
    qkv="query_key_value",
    output="dense",
    up="dense_h_to_4h",
    down="dense_4h_to_h",
)


@runs_as(
    names_fused=True,
    scored=True,
    joins_none=True,
    sums="late",
    drops_residual=True,
    dropouts=("embed_in", "attention.dense", "mlp.dense_4h_to_h"),
)
def gpt_neox(config: ConfigValues) -> ModelSpec:
    """GPT-NeoX and Pythia: attention and feed-forward in parallel, each behind a norm of its own.

    Source: ``transformers/models/gpt_neox/modeling_gpt_neox.py``; https://arxiv.org/abs/2204.06745.
    """
    common = whole_heads(config)
    config.expect("num_key_value_heads", common.num_attention_heads)
    bias = config.flag("attention_bias", default=True)
    rotated = rotary_dim(config, common.head_dim, default=0.25)
    heads = attention(config, common, rotated, bias=bias, fused_qkv=True)
    mlp = plain_mlp(config, config.integer("intermediate_size"), "gelu", "hidden_act")
    parallel = config.flag("use_parallel_residual", default=True)
    layer = Layer(heads, mlp, layer_norm(config), placement="parallel" if parallel else "pre", parallel_norms=2)
    return model(config, common, layer, dropout=("attention_dropout", "hidden_dropout"), names=NEOX_NAMES)


PHI_NAMES = TensorNames(
    final_norm="model.final_layernorm",
    output="dense",
    query_norm="q_layernorm",
    key_norm="k_layernorm",
    up="fc1",
    down="fc2",
)


@runs_as(
    scored=True,
    joins_none=True,
    names_passed=True,
    sums="parts-first",
    drops_embedding="given",
    drops_residual=True,
    dropouts=("embed_tokens", "self_attn.dense", "mlp.fc2"),
)
def phi(config: ConfigValues) -> ModelSpec:
    """Phi-1, Phi-1.5 and Phi-2: attention and feed-forward in parallel behind one norm, biases everywhere.

    Source: ``transformers/models/phi/modeling_phi.py``; https://arxiv.org/abs/2309.05463.
    """
    common = shape(config)
    heads = attention(
        config,
        common,
        rotary_dim(config, common.head_dim, default=0.5),
        bias=True,
        query_key_norm=layer_norm(config) if config.flag("qk_layernorm") else None,
    )
    mlp = plain_mlp(config, config.integer("intermediate_size"), "gelu_new", "hidden_act")
    return model(
        config,
        common,
        Layer(heads, mlp, layer_norm(config), placement="parallel"),
        dropout=("resid_pdrop", "embd_pdrop", "attention_dropout"),
        head_bias=True,
        names=PHI_NAMES,
    )


FALCON_NAMES = TensorNames(
    embedding="transformer.word_embeddings",
    layer="transformer.h.{}",
    final_norm="transformer.ln_f",
    attention="self_attention",
    qkv="query_key_value",
    output="dense",
    up="dense_h_to_4h",
    down="dense_4h_to_h",
)


@runs_as(
    names_fused=True,
    scored=True,
    own_scores=True,
    wide_softmax=False,
    copies_heads=True,
    asks_for_groups=False,
    sums="in-place",
    masks_always=True,
    own_linear=True,
    own_products=True,
    names_norm=True,
    names_attention=True,
    drops_embedding="never",
    drops_residual=True,
    dropout_modules="attention",
)
def falcon(config: ConfigValues) -> ModelSpec:
    """Falcon: one key-value head (7B) or groups of them (40B), attention and feed-forward in parallel.

    ALiBi, which the oldest Falcons have instead of rotary positions, needs a bias on every score
    and so other attention kernels: it is refused.

    Source: ``transformers/models/falcon/modeling_falcon.py``; https://arxiv.org/abs/2311.16867.
    """
    grouped = config.flag("new_decoder_architecture")
    common = _with_groups(config, whole_heads(config), grouped)
    bias = config.flag("bias")
    heads = attention(config, common, bias=bias, fused_qkv=True)
    mlp = plain_mlp(
        config, config.integer("ffn_hidden_size", default=4 * common.hidden_size), "gelu", "activation", bias=bias
    )
    parallel = config.flag("parallel_attn", default=True)
    norms = config.integer("num_ln_in_parallel_attn", default=2 if grouped else 1, maximum=2)
    names = (
        FALCON_NAMES._replace(input_norm="ln_attn", post_attention_norm="ln_mlp")
        if parallel and norms == 2
        else FALCON_NAMES
    )
    return model(
        config,
        common,
        Layer(heads, mlp, layer_norm(config), placement="parallel" if parallel else "pre", parallel_norms=norms),
        tied=True,
        dropout=("attention_dropout", "hidden_dropout"),
        names=names,
    )


def _with_groups(config: ConfigValues, common: Shape, grouped: bool) -> Shape:
    """Return ``common`` with the key-value heads that the variant has."""
    heads = common.num_attention_heads
    groups = config.integer("num_kv_heads", "n_head_kv", default=heads)
    if config.flag("multi_query", default=True) and not grouped:
        groups = 1
    config.divides("num_kv_heads", groups, "num_attention_heads", heads)
    return replace(common, num_key_value_heads=groups)
