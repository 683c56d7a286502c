"""Gemma 1: GeGLU, scales of ``1 + weight``, embeddings scaled and tied to the head.

Source: ``transformers/models/gemma/modeling_gemma.py``; https://arxiv.org/abs/2403.08295.
"""

from __future__ import annotations

from memplan.model.families.common_parts import attention, factor, model, rms_norm, shape
from memplan.model.families.config_values import ConfigValues
from memplan.model.spec import Activation, Layer, Mlp, ModelSpec


def model_spec(config: ConfigValues) -> ModelSpec:
    """Return the shapes of a Gemma config."""
    common = shape(config, head_dim=256)
    bias = config.flag("attention_bias")
    heads = attention(config, common, qkv_bias=bias, output_bias=bias)
    layer = Layer(heads, gemma_mlp(config), rms_norm(config, unit_offset=True))
    return model(config, common, layer, tied=True, embedding_scale=common.hidden_size**0.5)


def gemma_mlp(config: ConfigValues) -> Mlp:
    """Return Gemma's GeGLU; plain ``gelu`` in its early configs means the tanh approximation."""
    named = config.activation("hidden_activation", "hidden_act", default="gelu_pytorch_tanh")
    activation: Activation = "gelu-tanh" if named == "gelu" else named
    return Mlp(config.integer("intermediate_size"), activation)


def query_scale(config: ConfigValues) -> float:
    """Return the factor of attention scores in Gemma 2 and 3, which do not take the width of a head for it.

    Formula:
        ``query_pre_attn_scalar ** -0.5``; a missing key means 256, as in transformers.
    """
    return float(factor(config, "query_pre_attn_scalar", 256.0) ** -0.5)
