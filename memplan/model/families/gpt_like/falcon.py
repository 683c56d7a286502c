"""Falcon: one key-value head (7B) or groups of them (40B), attention and feed-forward in parallel.

ALiBi, which the oldest Falcons have instead of rotary positions, needs a bias on every score
and so other attention kernels: it is refused.

Source: ``transformers/models/falcon/modeling_falcon.py``; https://arxiv.org/abs/2311.16867.
"""

from __future__ import annotations

from dataclasses import replace

from memplan.model.families.common_parts import Shape, attention, layer_norm, model, whole_heads
from memplan.model.families.config_values import ConfigValues
from memplan.model.spec import Layer, Mlp, ModelSpec, TensorNames

NAMES = TensorNames(
    embedding="transformer.word_embeddings",
    layer="transformer.h.{}",
    final_norm="transformer.ln_f",
    attention="self_attention",
    qkv="query_key_value",
    output="dense",
    up="dense_h_to_4h",
    down="dense_4h_to_h",
)


def model_spec(config: ConfigValues) -> ModelSpec:
    """Return the shapes of a Falcon config."""
    grouped = config.flag("new_decoder_architecture")
    common = _with_groups(config, whole_heads(config), grouped)
    bias = config.flag("bias")
    heads = attention(config, common, qkv_bias=bias, output_bias=bias, fused_qkv=True)
    inner = config.integer("ffn_hidden_size", default=4 * common.hidden_size)
    mlp = Mlp(inner, config.activation("activation", default="gelu"), gated=False, bias=bias)
    parallel = config.flag("parallel_attn", default=True)
    norms = config.integer("num_ln_in_parallel_attn", default=2 if grouped else 1, maximum=2)
    names = NAMES._replace(input_norm="ln_attn", post_attention_norm="ln_mlp") if parallel and norms == 2 else NAMES
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
