"""Phi-1, Phi-1.5 and Phi-2: attention and feed-forward in parallel behind one norm, biases everywhere.

Source: ``transformers/models/phi/modeling_phi.py``; https://arxiv.org/abs/2309.05463.
"""

from __future__ import annotations

from memplan.model.families.common_parts import attention, layer_norm, model, rotary_dim, shape
from memplan.model.families.config_values import ConfigValues
from memplan.model.spec import Layer, Mlp, ModelSpec, TensorNames

NAMES = TensorNames(
    final_norm="model.final_layernorm",
    output="dense",
    query_norm="q_layernorm",
    key_norm="k_layernorm",
    up="fc1",
    down="fc2",
)


def model_spec(config: ConfigValues) -> ModelSpec:
    """Return the shapes of a Phi config."""
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
        names=NAMES,
    )
