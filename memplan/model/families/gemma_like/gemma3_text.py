"""Gemma 3, text: Gemma 2's layers with normalised queries and keys in place of soft caps.

Windowed and full layers rotate by different bases, so two pairs of tables are built. The
defaults are transformers', which released multimodal configs rely on.

Source: ``transformers/models/gemma3/modeling_gemma3.py``; https://arxiv.org/abs/2503.19786.
"""

from __future__ import annotations

from memplan.model.families.common_parts import attention, model, rms_norm, shape, sliding_window
from memplan.model.families.config_values import ConfigValues
from memplan.model.families.gemma_like.gemma import gemma_mlp, query_scale
from memplan.model.spec import Layer, ModelSpec


def model_spec(config: ConfigValues) -> ModelSpec:
    """Return the shapes of a Gemma 3 text config."""
    common = shape(config, heads=8, key_value_heads=4, head_dim=256, vocab_size=262_208)
    bias, norm = config.flag("attention_bias"), rms_norm(config, unit_offset=True)
    window = sliding_window(config, common.num_hidden_layers)
    capped = config.cap("attn_logit_softcapping", default=0.0)
    config.only("use_bidirectional_attention", False)
    heads = attention(
        config,
        common,
        qkv_bias=bias,
        output_bias=bias,
        query_key_norm=norm,
        logit_softcap=capped,
        scale=query_scale(config),
    )
    return model(
        config,
        common,
        Layer(heads, gemma_mlp(config), norm, placement="sandwich"),
        tied=True,
        embedding_scale=common.hidden_size**0.5,
        final_logit_softcap=config.cap("final_logit_softcapping", default=0.0),
        rotary_tables=2,
        **window,
    )
