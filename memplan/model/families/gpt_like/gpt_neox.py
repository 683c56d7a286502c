"""GPT-NeoX and Pythia: attention and feed-forward in parallel, each behind a norm of its own.

Source: ``transformers/models/gpt_neox/modeling_gpt_neox.py``; https://arxiv.org/abs/2204.06745.
"""

from __future__ import annotations

from memplan.model.families.common_parts import attention, layer_norm, model, rotary_dim, whole_heads
from memplan.model.families.config_values import ConfigValues
from memplan.model.spec import Layer, Mlp, ModelSpec, TensorNames

NAMES = TensorNames(
    embedding="gpt_neox.embed_in",
    layer="gpt_neox.layers.{}",
    final_norm="gpt_neox.final_layer_norm",
    attention="attention",
    qkv="query_key_value",
    output="dense",
    up="dense_h_to_4h",
    down="dense_4h_to_h",
)


def model_spec(config: ConfigValues) -> ModelSpec:
    """Return the shapes of a GPT-NeoX config."""
    common = whole_heads(config)
    config.expect("num_key_value_heads", common.num_attention_heads)
    bias = config.flag("attention_bias", default=True)
    rotated = rotary_dim(config, common.head_dim, default=0.25)
    heads = attention(config, common, rotated, qkv_bias=bias, output_bias=bias, fused_qkv=True)
    activation = config.activation("hidden_act", default="gelu")
    mlp = Mlp(config.integer("intermediate_size"), activation, gated=False, bias=True)
    parallel = config.flag("use_parallel_residual", default=True)
    layer = Layer(heads, mlp, layer_norm(config), placement="parallel" if parallel else "pre", parallel_norms=2)
    return model(config, common, layer, dropout=("attention_dropout", "hidden_dropout"), names=NAMES)
