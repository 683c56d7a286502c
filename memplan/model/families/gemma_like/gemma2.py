"""Gemma 2: norms before and after each part, soft caps on scores and logits.

Source: ``transformers/models/gemma2/modeling_gemma2.py``; https://arxiv.org/abs/2408.00118.
"""

from __future__ import annotations

from memplan.model.families.common_parts import attention, model, rms_norm, shape, sliding_window
from memplan.model.families.config_values import ConfigValues
from memplan.model.families.gemma_like.gemma import gemma_mlp, query_scale
from memplan.model.spec import Layer, ModelSpec


def model_spec(config: ConfigValues) -> ModelSpec:
    """Return the shapes of a Gemma 2 config."""
    common = shape(config, key_value_heads=4, head_dim=256)
    bias, norm = config.flag("attention_bias"), rms_norm(config, unit_offset=True)
    window = sliding_window(config, common.num_hidden_layers)
    capped = config.cap("attn_logit_softcapping", default=50.0)
    scale = query_scale(config)
    heads = attention(config, common, qkv_bias=bias, output_bias=bias, logit_softcap=capped, scale=scale)
    return model(
        config,
        common,
        Layer(heads, gemma_mlp(config), norm, placement="sandwich"),
        tied=True,
        embedding_scale=common.hidden_size**0.5,
        final_logit_softcap=config.cap("final_logit_softcapping", default=30.0),
        **window,
    )
