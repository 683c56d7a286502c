"""Qwen3-MoE: Qwen3's attention with routed experts and no shared one.

Source: ``transformers/models/qwen3_moe/modeling_qwen3_moe.py``; https://arxiv.org/abs/2505.09388.
"""

from __future__ import annotations

from memplan.model.families.common_parts import (
    attention,
    experts,
    gated_mlp,
    model,
    rms_norm,
    shape,
    sliding_window,
    sparse_layers,
)
from memplan.model.families.config_values import ConfigValues
from memplan.model.spec import Layer, MixtureOfExperts, ModelSpec


def model_spec(config: ConfigValues) -> ModelSpec:
    """Return the shapes of a Qwen3-MoE config."""
    common = shape(config, key_value_heads=4)
    bias = config.flag("attention_bias")
    window = sliding_window(config, common.num_hidden_layers)
    heads = attention(config, common, qkv_bias=bias, output_bias=bias, query_key_norm=rms_norm(config))
    mixture = MixtureOfExperts(
        num_experts=config.integer("num_experts", "num_local_experts", default=128),
        experts_per_token=config.integer("num_experts_per_tok", default=8),
        intermediate_size=config.integer("moe_intermediate_size", default=768),
        activation=config.activation("hidden_act"),
        normalised=config.flag("norm_topk_prob"),
    )
    dense = Layer(heads, gated_mlp(config), rms_norm(config))
    sparse = Layer(heads, experts(config, mixture), rms_norm(config))
    layers = [sparse if has_experts else dense for has_experts in sparse_layers(config, common.num_hidden_layers)]
    return model(config, common, layers, **window)
