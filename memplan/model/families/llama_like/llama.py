"""Llama 1 to 3, and the many models released as one: Yi, SmolLM, TinyLlama, Vicuna, CodeLlama.

Source: ``transformers/models/llama/modeling_llama.py``; https://arxiv.org/abs/2302.13971.
"""

from __future__ import annotations

from memplan.model.families.common_parts import attention, gated_mlp, model, rms_norm, shape
from memplan.model.families.config_values import ConfigValues
from memplan.model.spec import Layer, ModelSpec


def model_spec(config: ConfigValues) -> ModelSpec:
    """Return the shapes of a Llama config."""
    common = shape(config)
    bias = config.flag("attention_bias")
    heads = attention(config, common, qkv_bias=bias, output_bias=bias)
    return model(config, common, Layer(heads, gated_mlp(config, bias=config.flag("mlp_bias")), rms_norm(config)))
