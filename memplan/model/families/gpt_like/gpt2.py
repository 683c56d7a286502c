"""GPT-2: learned positions, one fused projection, weights stored (in, out), dropout of 0.1.

Source: ``transformers/models/gpt2/modeling_gpt2.py`` and its ``Conv1D``.
"""

from __future__ import annotations

from memplan.model.families.common_parts import attention, layer_norm, model, whole_heads
from memplan.model.families.config_values import ConfigValues
from memplan.model.spec import Layer, Mlp, ModelSpec, TensorNames

NAMES = TensorNames(
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


def model_spec(config: ConfigValues) -> ModelSpec:
    """Return the shapes of a GPT-2 config."""
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
        names=NAMES,
    )
