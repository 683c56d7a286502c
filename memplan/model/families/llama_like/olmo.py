"""OLMo 1: Llama's layers behind a LayerNorm that has neither scale nor shift; 1.7 clips queries, keys and values.

Source: ``transformers/models/olmo/modeling_olmo.py``; https://arxiv.org/abs/2402.00838.
"""

from __future__ import annotations

from memplan.model.families.common_parts import attention, gated_mlp, model, shape
from memplan.model.families.config_values import ConfigValues
from memplan.model.spec import Layer, ModelSpec, Norm


def model_spec(config: ConfigValues) -> ModelSpec:
    """Return the shapes of an OLMo config."""
    common = shape(config)
    bias = config.flag("attention_bias")
    heads = attention(config, common, qkv_bias=bias, output_bias=bias, clip=config.cap("clip_qkv", 0.0))
    return model(config, common, Layer(heads, gated_mlp(config), Norm("layer", weight=False)))
