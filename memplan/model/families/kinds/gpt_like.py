"""Families with LayerNorm, biases and a feed-forward part of two matrices; positions learned, rotated in part or in pairs, or none."""

from dataclasses import replace

from memplan.model.families.common_parts import (
    GPT_NAMES,
    Shape,
    attention,
    even_rotary,
    layer_norm,
    model,
    rotary_dim,
    shape,
    whole_heads,
)
from memplan.model.families.config_values import ConfigValues
from memplan.model.spec import Layer, Mlp, ModelSpec, Norm, TensorNames


def _mlp(
    config: ConfigValues, inner: int, activation: str, key: str = "activation_function", *, bias: bool = True
) -> Mlp:
    """Return a feed-forward part of two matrices; ``activation`` is what a missing ``key`` means."""
    return Mlp(inner, config.activation(key, default=activation), gated=False, bias=bias)


GPT2_NAMES = GPT_NAMES._replace(
    positions="transformer.wpe",
    final_norm="transformer.ln_f",
    qkv="c_attn",
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
    mlp = _mlp(config, config.integer("n_inner", "intermediate_size", default=4 * common.hidden_size), "gelu_new")
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
    mlp = _mlp(config, config.integer("intermediate_size"), "gelu", "hidden_act")
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
    mlp = _mlp(config, config.integer("intermediate_size"), "gelu_new", "hidden_act")
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
    mlp = _mlp(
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


OPT_NAMES = TensorNames(
    embedding="model.decoder.embed_tokens",
    positions="model.decoder.embed_positions",
    layer="model.decoder.layers.{}",
    final_norm="model.decoder.final_layer_norm",
    output="out_proj",
    mlp="",
    up="fc1",
    down="fc2",
    input_norm="self_attn_layer_norm",
    post_attention_norm="final_layer_norm",
)


def opt(config: ConfigValues) -> ModelSpec:
    """OPT: learned positions behind two rows that none has, and a ReLU in each layer's own code.

    OPT-350m's layers, which normalise what they have added up, behind a narrower embedding, are refused.

    Source: ``transformers/models/opt/modeling_opt.py``; https://arxiv.org/abs/2205.01068.
    """
    common = whole_heads(config)
    bias, affine = config.flag("enable_bias", default=True), config.flag("layer_norm_elementwise_affine", default=True)
    config.expect("word_embed_proj_dim", common.hidden_size)
    config.only("do_layer_norm_before", True)
    config.only("_remove_final_layer_norm", False)
    config.only("layerdrop", 0.0)
    config.ignore("init_std")
    heads = attention(config, common, 0, qkv_bias=bias, output_bias=bias)
    mlp = _mlp(config, config.integer("ffn_dim"), "relu", bias=bias)
    spec = model(
        config,
        common,
        Layer(heads, mlp, Norm("layer", weight=affine, bias=affine)),
        tied=True,
        dropout=("attention_dropout", "dropout"),
        learned_positions=config.integer("max_position_embeddings", default=2048),
        reserved_positions=2,
        rotary_tables=0,
        names=OPT_NAMES,
    )
    return replace(spec, dropout=config.number("dropout", default=0.1))


GPT_NEO_NAMES = GPT2_NAMES._replace(attention="attn.attention", output="out_proj")


def gpt_neo(config: ConfigValues) -> ModelSpec:
    """GPT-Neo: GPT-2's layers, whose scores are in fp32 and not scaled; each keeps a mask of all positions, every other within a window.

    Source: ``transformers/models/gpt_neo/modeling_gpt_neo.py``; https://github.com/EleutherAI/gpt-neo.
    """
    common = whole_heads(config)
    config.ignore("attention_types", "attention_layers", "window_size")
    heads = attention(config, common, 0, output_bias=True, scale=1.0)
    config.only("embed_dropout", config.number("resid_dropout", "embed_dropout", default=0.0))
    positions = config.integer("max_position_embeddings", default=2048)
    return model(
        config,
        common,
        Layer(
            heads,
            _mlp(config, config.integer("intermediate_size", default=4 * common.hidden_size), "gelu_new"),
            layer_norm(config),
        ),
        tied=True,
        dropout=("attention_dropout", "resid_dropout", "embed_dropout"),
        learned_positions=positions,
        buffer_bytes=common.num_hidden_layers * positions**2,
        rotary_tables=0,
        names=GPT_NEO_NAMES,
    )


GPTJ_NAMES = GPT2_NAMES._replace(output="out_proj", up="fc_in", down="fc_out")


def gptj(config: ConfigValues) -> ModelSpec:
    """GPT-J: attention and feed-forward in parallel behind one norm, neighbours rotated, scores in fp32, a head with a bias.

    Source: ``transformers/models/gptj/modeling_gptj.py``; https://github.com/kingoflolz/mesh-transformer-jax.
    """
    common = whole_heads(config)
    rotated = even_rotary(config, config.integer("rotary_dim", default=64, maximum=common.head_dim))
    rows = config.integer("n_positions", "max_position_embeddings", default=2048)
    heads = attention(config, common, rotated, position_rows=rows)
    return model(
        config,
        common,
        Layer(
            heads,
            _mlp(config, config.integer("n_inner", "intermediate_size", default=4 * common.hidden_size), "gelu_new"),
            layer_norm(config),
            placement="parallel",
        ),
        dropout=("resid_pdrop", "embd_pdrop", "attn_pdrop"),
        head_bias=True,
        buffer_bytes=4 * common.num_hidden_layers * rows * rotated,
        names=GPTJ_NAMES,
    )


def bloom(config: ConfigValues) -> ModelSpec:
    """BLOOM, BLOOMZ: ALiBi in place of positions, a norm behind the embedding, a GELU that backward forms again.

    Source: ``transformers/models/bloom/modeling_bloom.py``; https://arxiv.org/abs/2211.05100.
    """
    common = whole_heads(config)
    config.only("apply_residual_connection_post_layernorm", False)
    config.only("slow_but_exact", False)
    config.ignore(
        "offset_alibi", "attention_softmax_in_fp32", "masked_softmax_fusion", "skip_bias_add", "skip_bias_add_qkv"
    )
    heads = attention(config, common, 0, qkv_bias=True, output_bias=True, fused_qkv=True, alibi=True)
    mlp = Mlp(4 * common.hidden_size, "gelu-again", gated=False, bias=True)
    norm = layer_norm(config)
    return model(
        config,
        common,
        Layer(heads, mlp, norm),
        tied=True,
        dropout=("attention_dropout", "hidden_dropout"),
        embedding_norm=norm,
        rotary_tables=0,
        names=FALCON_NAMES,
    )


def gpt_bigcode(config: ConfigValues) -> ModelSpec:
    """StarCoder, SantaCoder: GPT-2's layers with one head of keys and values for all; the model keeps a causal mask of all positions.

    Source: ``transformers/models/gpt_bigcode/modeling_gpt_bigcode.py``; https://arxiv.org/abs/2305.06161.
    """
    common = whole_heads(config)
    if config.flag("multi_query", default=True):
        common = replace(common, num_key_value_heads=1)
    config.expect("num_key_value_heads", common.num_key_value_heads)
    scale = None if config.flag("scale_attn_weights", default=True) else 1.0
    config.ignore("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32")
    heads = attention(config, common, 0, qkv_bias=True, output_bias=True, fused_qkv=True, scale=scale)
    mlp = _mlp(
        config, config.integer("n_inner", "intermediate_size", default=4 * common.hidden_size), "gelu_pytorch_tanh"
    )
    positions = config.integer("n_positions", "max_position_embeddings", default=1024)
    return model(
        config,
        common,
        Layer(heads, mlp, layer_norm(config)),
        tied=True,
        dropout=("resid_pdrop", "embd_pdrop", "attn_pdrop"),
        default_dropout=0.1,
        learned_positions=positions,
        buffer_bytes=positions**2,
        rotary_tables=0,
        names=GPT2_NAMES,
    )
