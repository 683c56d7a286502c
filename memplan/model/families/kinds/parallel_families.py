"""Families whose attention and feed-forward part, of two matrices, run beside each other: GPT-NeoX, Phi and Falcon."""

from dataclasses import replace

from memplan.model.families.common_parts import (
    Shape,
    attention,
    layer_norm,
    model,
    plain_mlp,
    rotary_dim,
    shape,
    whole_heads,
)
from memplan.model.families.config_values import ConfigValues
from memplan.model.families.family_fields import runs_as
from memplan.model.spec import Layer, ModelSpec, TensorNames

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


@runs_as(scored=True, sums="late", drops_residual=True, dropouts=("embed_in", "attention.dense", "mlp.dense_4h_to_h"))
def gpt_neox(config: ConfigValues) -> ModelSpec:
    """GPT-NeoX and Pythia: attention and feed-forward in parallel, each behind a norm of its own.

    Source: ``transformers/models/gpt_neox/modeling_gpt_neox.py``; https://arxiv.org/abs/2204.06745.
    """
    common = whole_heads(config)
    config.expect("num_key_value_heads", common.num_attention_heads)
    bias = config.flag("attention_bias", default=True)
    rotated = rotary_dim(config, common.head_dim, default=0.25)
    heads = attention(config, common, rotated, qkv_bias=bias, output_bias=bias, fused_qkv=True)
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
    names_passed=True,
    sums="parts-first",
    drops_embedding=False,
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
        qkv_bias=True,
        output_bias=True,
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
    heads = attention(config, common, qkv_bias=bias, output_bias=bias, fused_qkv=True)
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
