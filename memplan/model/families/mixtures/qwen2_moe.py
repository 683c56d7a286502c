"""Qwen1.5-MoE and Qwen2-MoE: routed experts beside shared ones, which a learned gate scales.

Source: ``transformers/models/qwen2_moe/modeling_qwen2_moe.py``; https://arxiv.org/abs/2407.10671.
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
from memplan.model.spec import Layer, MixtureOfExperts, ModelSpec, TensorNames


def model_spec(config: ConfigValues) -> ModelSpec:
    """Return the shapes of a Qwen2-MoE config."""
    common = shape(config)
    window = sliding_window(config, common.num_hidden_layers)
    heads = attention(config, common, qkv_bias=config.flag("qkv_bias", default=True))
    dense = Layer(heads, gated_mlp(config), rms_norm(config))
    sparse = Layer(heads, experts(config, _mixture(config)), rms_norm(config))
    layers = [sparse if has_experts else dense for has_experts in sparse_layers(config, common.num_hidden_layers)]
    return model(config, common, layers, names=TensorNames(shared_experts="shared_expert"), **window)


def _mixture(config: ConfigValues) -> MixtureOfExperts:
    return MixtureOfExperts(
        num_experts=config.integer("num_experts", "num_local_experts", default=60),
        experts_per_token=config.integer("num_experts_per_tok", default=4),
        intermediate_size=config.integer("moe_intermediate_size", default=1408),
        activation=config.activation("hidden_act"),
        normalised=config.flag("norm_topk_prob"),
        shared_intermediate_size=config.integer("shared_expert_intermediate_size", default=5632),
        shared_gate=True,
    )
