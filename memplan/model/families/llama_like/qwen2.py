"""Qwen1.5, Qwen2 and Qwen2.5: Llama's layers with biases on query, key and value.

Source: ``transformers/models/qwen2/modeling_qwen2.py``; https://arxiv.org/abs/2407.10671.
"""

from __future__ import annotations

from memplan.model.families.common_parts import attention, gated_mlp, model, rms_norm, shape, sliding_window
from memplan.model.families.config_values import ConfigValues
from memplan.model.spec import Layer, ModelSpec


def model_spec(config: ConfigValues) -> ModelSpec:
    """Return the shapes of a Qwen2 config."""
    common = shape(config)
    window = sliding_window(config, common.num_hidden_layers)
    heads = attention(config, common, qkv_bias=True)
    return model(config, common, Layer(heads, gated_mlp(config), rms_norm(config)), **window)
