"""Gemma's text models: norms with an offset, scaled embeddings, soft caps."""

from __future__ import annotations

from memplan.model.families.common_parts import attention, factor, model, rms_norm, shape, sliding_window
from memplan.model.families.config_values import ConfigValues
from memplan.model.spec import Activation, Layer, Mlp, ModelSpec


def gemma(config: ConfigValues) -> ModelSpec:
    """Gemma 1: GeGLU, scales of ``1 + weight``, embeddings scaled and tied to the head.

    Source: ``transformers/models/gemma/modeling_gemma.py``; https://arxiv.org/abs/2403.08295.
    """
    common = shape(config, head_dim=256)
    bias = config.flag("attention_bias")
    heads = attention(config, common, qkv_bias=bias, output_bias=bias)
    layer = Layer(heads, _gemma_mlp(config), rms_norm(config, unit_offset=True))
    return model(config, common, layer, tied=True, embedding_scale=common.hidden_size**0.5)


def _gemma_mlp(config: ConfigValues) -> Mlp:
    """Return Gemma's GeGLU; plain ``gelu`` in its early configs means the tanh approximation."""
    named = config.activation("hidden_activation", "hidden_act", default="gelu_pytorch_tanh")
    activation: Activation = "gelu-tanh" if named == "gelu" else named
    return Mlp(config.integer("intermediate_size"), activation)


def _query_scale(config: ConfigValues) -> float:
    """Return the factor of attention scores in Gemma 2 and 3, which do not take the width of a head for it.

    Formula:
        ``query_pre_attn_scalar ** -0.5``; a missing key means 256, as in transformers.
    """
    return float(factor(config, "query_pre_attn_scalar", 256.0) ** -0.5)


def gemma2(config: ConfigValues) -> ModelSpec:
    """Gemma 2: norms before and after each part, soft caps on scores and logits.

    Source: ``transformers/models/gemma2/modeling_gemma2.py``; https://arxiv.org/abs/2408.00118.
    """
    common = shape(config, key_value_heads=4, head_dim=256)
    bias, norm = config.flag("attention_bias"), rms_norm(config, unit_offset=True)
    window = sliding_window(config, common.num_hidden_layers)
    capped = config.cap("attn_logit_softcapping", default=50.0)
    scale = _query_scale(config)
    heads = attention(config, common, qkv_bias=bias, output_bias=bias, logit_softcap=capped, scale=scale)
    return model(
        config,
        common,
        Layer(heads, _gemma_mlp(config), norm, placement="sandwich"),
        tied=True,
        embedding_scale=common.hidden_size**0.5,
        final_logit_softcap=config.cap("final_logit_softcapping", default=30.0),
        **window,
    )


def gemma3_text(config: ConfigValues) -> ModelSpec:
    """Gemma 3, text: Gemma 2's layers with normalised queries and keys in place of soft caps.

    Windowed and full layers rotate by different bases, so two pairs of tables are built. The
    defaults are transformers', which released multimodal configs rely on.

    Source: ``transformers/models/gemma3/modeling_gemma3.py``; https://arxiv.org/abs/2503.19786.
    """
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
        scale=_query_scale(config),
    )
    return model(
        config,
        common,
        Layer(heads, _gemma_mlp(config), norm, placement="sandwich"),
        tied=True,
        embedding_scale=common.hidden_size**0.5,
        final_logit_softcap=config.cap("final_logit_softcapping", default=0.0),
        rotary_tables=2,
        **window,
    )
