"""Families with LayerNorm, biases and a feed-forward part of two matrices."""

from __future__ import annotations

from dataclasses import replace

from memplan.model.families.common_parts import (
    Shape,
    attention,
    layer_norm,
    model,
    rotary_dim,
    shape,
    sliding_window,
    whole_heads,
)
from memplan.model.families.config_values import ConfigValues
from memplan.model.spec import Layer, Mlp, ModelSpec, Norm, TensorNames

GPT2_NAMES = TensorNames(
    embedding="transformer.wte",
    positions="transformer.wpe",
    layer="transformer.h.{}",
    final_norm="transformer.ln_f",
    attention="attn",
    qkv="c_attn",
    output="c_proj",
    up="c_fc",
    down="c_proj",
    input_norm="ln_1",
    post_attention_norm="ln_2",
)


def gpt2(config: ConfigValues) -> ModelSpec:
    """GPT-2: learned positions, one fused projection, weights stored (in, out), dropout of 0.1.

    Source: ``transformers/models/gpt2/modeling_gpt2.py`` and its ``Conv1D``.
    """
    common = whole_heads(config)
    config.only("scale_attn_by_inverse_layer_idx", False)
    config.only("reorder_and_upcast_attn", False)
    scale = None if config.flag("scale_attn_weights", default=True) else 1.0
    heads = attention(config, common, 0, qkv_bias=True, output_bias=True, fused_qkv=True, scale=scale)
    inner = config.integer("n_inner", "intermediate_size", default=4 * common.hidden_size)
    activation = config.activation("activation_function", default="gelu_new")
    mlp = Mlp(inner, activation, gated=False, bias=True)
    return model(
        config,
        common,
        Layer(heads, mlp, layer_norm(config)),
        tied=True,
        dropout=("resid_pdrop", "embd_pdrop", "attn_pdrop"),
        default_dropout=0.1,
        learned_positions=config.integer("n_positions", "max_position_embeddings", default=1024),
        transposed_linear=True,
        rotary_tables=0,
        names=GPT2_NAMES,
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


def gpt_neox(config: ConfigValues) -> ModelSpec:
    """GPT-NeoX and Pythia: attention and feed-forward in parallel, each behind a norm of its own.

    Source: ``transformers/models/gpt_neox/modeling_gpt_neox.py``; https://arxiv.org/abs/2204.06745.
    """
    common = whole_heads(config)
    config.expect("num_key_value_heads", common.num_attention_heads)
    bias = config.flag("attention_bias", default=True)
    rotated = rotary_dim(config, common.head_dim, default=0.25)
    heads = attention(config, common, rotated, qkv_bias=bias, output_bias=bias, fused_qkv=True)
    activation = config.activation("hidden_act", default="gelu")
    mlp = Mlp(config.integer("intermediate_size"), activation, gated=False, bias=True)
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


def phi(config: ConfigValues) -> ModelSpec:
    """Phi-1, Phi-1.5 and Phi-2: attention and feed-forward in parallel behind one norm, biases everywhere.

    Source: ``transformers/models/phi/modeling_phi.py``; https://arxiv.org/abs/2309.05463.
    """
    common = shape(config)
    heads = attention(
        config,
        common,
        rotary_dim(config, common.head_dim, default=0.5),
        qkv_bias=True,
        output_bias=True,
        query_key_norm=layer_norm(config) if config.flag("qk_layernorm") else None,
    )
    activation = config.activation("hidden_act", default="gelu_new")
    mlp = Mlp(config.integer("intermediate_size"), activation, gated=False, bias=True)
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


def falcon(config: ConfigValues) -> ModelSpec:
    """Falcon: one key-value head (7B) or groups of them (40B), attention and feed-forward in parallel.

    ALiBi, which the oldest Falcons have instead of rotary positions, needs a bias on every score
    and so other attention kernels: it is refused.

    Source: ``transformers/models/falcon/modeling_falcon.py``; https://arxiv.org/abs/2311.16867.
    """
    grouped = config.flag("new_decoder_architecture")
    common = _with_groups(config, whole_heads(config), grouped)
    bias = config.flag("bias")
    heads = attention(config, common, qkv_bias=bias, output_bias=bias, fused_qkv=True)
    inner = config.integer("ffn_hidden_size", default=4 * common.hidden_size)
    mlp = Mlp(inner, config.activation("activation", default="gelu"), gated=False, bias=bias)
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


def starcoder2(config: ConfigValues) -> ModelSpec:
    """StarCoder2: LayerNorm, biases everywhere, a feed-forward part of two matrices, and dropout behind both parts of a layer.

    Source: ``transformers/models/starcoder2/modeling_starcoder2.py``; https://arxiv.org/abs/2402.19173.
    """
    common = shape(config, key_value_heads=2)
    window = sliding_window(config, common.num_hidden_layers)
    bias = config.flag("use_bias", default=True)
    heads = attention(config, common, qkv_bias=bias, output_bias=bias)
    activation = config.activation("hidden_act", default="gelu_pytorch_tanh")
    mlp = Mlp(config.integer("intermediate_size"), activation, gated=False, bias=bias)
    for key in ("residual_dropout", "embedding_dropout"):
        config.only(key, config.number("residual_dropout", "embedding_dropout", default=0.0))
    config.only("mlp_type", "default")
    config.only("norm_type", "layer_norm")
    return model(
        config,
        common,
        Layer(heads, mlp, Norm("layer", bias=True, epsilon=config.number("norm_epsilon", default=1e-5))),
        tied=True,
        dropout=("attention_dropout", "residual_dropout", "embedding_dropout"),
        names=TensorNames(up="c_fc", down="c_proj"),
        **window,
    )
