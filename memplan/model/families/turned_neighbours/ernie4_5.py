"""ERNIE 4.5 without experts: Llama's layers, rotated in fp32.

Source: ``transformers/models/ernie4_5/modeling_ernie4_5.py``.
"""

from __future__ import annotations

from memplan.model.families.common_parts import attention, gated_mlp, model, rms_norm, shape
from memplan.model.families.config_values import ConfigValues
from memplan.model.spec import Layer, ModelSpec


def model_spec(config: ConfigValues) -> ModelSpec:
    """Return the shapes of an ERNIE 4.5 config."""
    common, bias = shape(config, key_value_heads=2, head_dim=128), config.flag("use_bias")
    heads = attention(config, common, qkv_bias=bias, output_bias=bias)
    layer = Layer(heads, gated_mlp(config, bias=bias), rms_norm(config, 1e-5))
    return model(config, common, layer, tied=True)
