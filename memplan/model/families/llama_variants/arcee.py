"""Arcee's AFM: Llama's attention, and a feed-forward part of two matrices around a squared ReLU.

Source: ``transformers/models/arcee/modeling_arcee.py``.
"""

from __future__ import annotations

from memplan.model.families.common_parts import attention, model, rms_norm, shape
from memplan.model.families.config_values import ConfigValues
from memplan.model.spec import Layer, Mlp, ModelSpec


def model_spec(config: ConfigValues) -> ModelSpec:
    """Return the shapes of an AFM config."""
    common = shape(config)
    bias = config.flag("attention_bias")
    heads = attention(config, common, qkv_bias=bias, output_bias=bias)
    config.only("hidden_act", "relu2")
    mlp = Mlp(config.integer("intermediate_size"), "relu-squared", gated=False, bias=config.flag("mlp_bias"))
    return model(config, common, Layer(heads, mlp, rms_norm(config, 1e-5)))
