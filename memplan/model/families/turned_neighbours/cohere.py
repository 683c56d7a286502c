"""Command R and Aya: attention and feed-forward in parallel behind one LayerNorm without a shift, and scaled logits.

Source: ``transformers/models/cohere/modeling_cohere.py``.
"""

from __future__ import annotations

from memplan.model.families.common_parts import attention, factor, gated_mlp, model, shape
from memplan.model.families.config_values import ConfigValues
from memplan.model.spec import Layer, ModelSpec, Norm


def model_spec(config: ConfigValues) -> ModelSpec:
    """Return the shapes of a Command R config."""
    common, norm = shape(config), cohere_norm(config)
    bias, normed = config.flag("attention_bias"), config.flag("use_qk_norm")
    heads = attention(
        config,
        common,
        qkv_bias=bias,
        output_bias=bias,
        query_key_norm=norm if normed else None,
        query_key_norm_scope="each" if normed else "head",
    )
    layer = Layer(heads, gated_mlp(config), norm, placement="parallel")
    return model(config, common, layer, tied=True, logit_scale=factor(config, "logit_scale", 0.0625))


def cohere_norm(config: ConfigValues) -> Norm:
    """Return a LayerNorm that has a scale alone."""
    return Norm("layer", epsilon=config.number("layer_norm_eps", default=1e-5))
