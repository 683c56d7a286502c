"""Granite 3 and 4 without experts: Llama's layers with factors of the embedding, the scores, what layers add, and the logits.

The catalog leaves the factors out: transformers multiplies by 1 as well, so that no byte depends on one.

Source: ``transformers/models/granite/modeling_granite.py``; https://huggingface.co/ibm-granite.
"""

from __future__ import annotations

from memplan.model.families.common_parts import attention, factor, gated_mlp, model, rms_norm, shape
from memplan.model.families.config_values import ConfigValues
from memplan.model.spec import Layer, ModelSpec


def model_spec(config: ConfigValues) -> ModelSpec:
    """Return the shapes of a Granite config."""
    common = shape(config)
    bias, scale = config.flag("attention_bias"), factor(config, "attention_multiplier")
    heads = attention(config, common, qkv_bias=bias, output_bias=bias, scale=scale)
    mlp = gated_mlp(config, bias=config.flag("mlp_bias"))
    layer = Layer(heads, mlp, rms_norm(config), residual_scale=factor(config, "residual_multiplier"))
    return model(
        config,
        common,
        layer,
        embedding_scale=factor(config, "embedding_multiplier"),
        logit_scale=1 / factor(config, "logits_scaling"),
    )
