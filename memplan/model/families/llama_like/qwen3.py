"""Qwen3: each head's queries and keys are normalised, and heads have a width of their own.

Source: ``transformers/models/qwen3/modeling_qwen3.py``; https://arxiv.org/abs/2505.09388.
"""

from __future__ import annotations

from memplan.model.families.common_parts import attention, gated_mlp, model, rms_norm, shape, sliding_window
from memplan.model.families.config_values import ConfigValues
from memplan.model.spec import Layer, ModelSpec


def model_spec(config: ConfigValues) -> ModelSpec:
    """Return the shapes of a Qwen3 config."""
    common = shape(config, head_dim=128)
    bias = config.flag("attention_bias")
    window = sliding_window(config, common.num_hidden_layers)
    heads = attention(config, common, qkv_bias=bias, output_bias=bias, query_key_norm=rms_norm(config))
    return model(config, common, Layer(heads, gated_mlp(config), rms_norm(config)), **window)
