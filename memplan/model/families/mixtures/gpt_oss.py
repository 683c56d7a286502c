"""gpt-oss: attention sinks, biases, and experts stored (experts, in, out).

Source: ``transformers/models/gpt_oss/modeling_gpt_oss.py``; https://arxiv.org/abs/2508.10925.
"""

from __future__ import annotations

from memplan.model.families.common_parts import attention, experts, model, rms_norm, shape, sliding_window
from memplan.model.families.config_values import ConfigValues
from memplan.model.spec import Layer, MixtureOfExperts, ModelSpec, TensorNames


def model_spec(config: ConfigValues) -> ModelSpec:
    """Return the shapes of a gpt-oss config."""
    common = shape(config, key_value_heads=8, head_dim=64)
    bias = config.flag("attention_bias", default=True)
    window = sliding_window(config, common.num_hidden_layers)
    heads = attention(config, common, qkv_bias=bias, output_bias=bias, sinks=True)
    config.activation("hidden_act")
    config.only("swiglu_limit", 7.0)
    config.only("swiglu_alpha", 1.702)
    mixture = MixtureOfExperts(
        num_experts=config.integer("num_local_experts", "num_experts", default=128),
        experts_per_token=config.integer("num_experts_per_tok", "experts_per_token", default=4),
        intermediate_size=config.integer("intermediate_size"),
        activation="clamped-swiglu",
        transposed=True,
        router_bias=True,
        expert_bias=True,
        softmax_of_chosen=True,
    )
    layer = Layer(heads, experts(config, mixture), rms_norm(config, 1e-5))
    return model(config, common, layer, names=TensorNames(router="router"), **window)
