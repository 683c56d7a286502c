"""OLMo 2: a norm after each part instead of before it, and all queries and keys normalised together.

Source: ``transformers/models/olmo2/modeling_olmo2.py``; https://arxiv.org/abs/2501.00656.
"""

from __future__ import annotations

from memplan.model.families.common_parts import attention, gated_mlp, model, rms_norm, shape
from memplan.model.families.config_values import ConfigValues
from memplan.model.spec import Layer, ModelSpec


def model_spec(config: ConfigValues) -> ModelSpec:
    """Return the shapes of an OLMo 2 config."""
    common = shape(config)
    bias = config.flag("attention_bias")
    heads = attention(
        config,
        common,
        qkv_bias=bias,
        output_bias=bias,
        query_key_norm=rms_norm(config, 1e-5),
        query_key_norm_scope="full",
    )
    return model(config, common, Layer(heads, gated_mlp(config), rms_norm(config, 1e-5), placement="post"))
