"""Seed-OSS: Llama's layers with biases of queries, keys and values, and dropout behind both parts of a layer.

Source: ``transformers/models/seed_oss/modeling_seed_oss.py``.
"""

from __future__ import annotations

from memplan.model.families.common_parts import attention, gated_mlp, model, rms_norm, shape
from memplan.model.families.config_values import ConfigValues
from memplan.model.spec import Layer, ModelSpec


def model_spec(config: ConfigValues) -> ModelSpec:
    """Return the shapes of a Seed-OSS config."""
    common = shape(config, key_value_heads=8, head_dim=128)
    heads = attention(
        config,
        common,
        qkv_bias=config.flag("attention_bias", default=True),
        output_bias=config.flag("attention_out_bias"),
    )
    layer = Layer(heads, gated_mlp(config, bias=config.flag("mlp_bias")), rms_norm(config))
    return model(config, common, layer, dropout=("attention_dropout", "residual_dropout"), default_dropout=0.1)
