"""Mixtral: Mistral with routed experts in every layer.

Source: ``transformers/models/mixtral/modeling_mixtral.py``; https://arxiv.org/abs/2401.04088.
"""

from __future__ import annotations

from memplan.model.families.common_parts import attention, experts, model, rms_norm, shape, sliding_window
from memplan.model.families.config_values import ConfigValues
from memplan.model.spec import Layer, MixtureOfExperts, ModelSpec


def model_spec(config: ConfigValues) -> ModelSpec:
    """Return the shapes of a Mixtral config."""
    common = shape(config, key_value_heads=8)
    window = sliding_window(config, common.num_hidden_layers)
    config.only("router_jitter_noise", 0.0)
    config.only("norm_topk_prob", True)
    mixture = MixtureOfExperts(
        num_experts=config.integer("num_local_experts", "num_experts", default=8),
        experts_per_token=config.integer("num_experts_per_tok", default=2),
        intermediate_size=config.integer("intermediate_size"),
        activation=config.activation("hidden_act"),
        fp32_scores=True,
    )
    layer = Layer(attention(config, common), experts(config, mixture), rms_norm(config, 1e-5))
    return model(config, common, layer, **window)
