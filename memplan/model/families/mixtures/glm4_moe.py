"""GLM-4.5 to 4.7 and Air: grouped queries, half of a head rotated, a few dense layers, then DeepSeek-V3's experts.

Multi-token prediction modules are left out, as transformers leaves them out.

Source: ``transformers/models/glm4_moe/modeling_glm4_moe.py``; https://arxiv.org/abs/2508.06471.
"""

from __future__ import annotations

from dataclasses import replace

from memplan.model.families.common_parts import attention, experts, gated_mlp, model, rms_norm, rotary_dim, shape
from memplan.model.families.config_values import MAXIMUM_LAYERS, ConfigValues
from memplan.model.families.mixtures.deepseek_v2 import grouped
from memplan.model.spec import Layer, MixtureOfExperts, ModelSpec


def model_spec(config: ConfigValues) -> ModelSpec:
    """Return the shapes of a GLM-4.5 config."""
    common, norm = shape(config, key_value_heads=8), rms_norm(config, 1e-5)
    heads = attention(
        config,
        common,
        rotary_dim(config, common.head_dim, default=0.5),
        qkv_bias=config.flag("attention_bias"),
        query_key_norm=norm if config.flag("use_qk_norm") else None,
    )
    front = Layer(heads, gated_mlp(config), norm)
    rest = replace(front, feed_forward=experts(config, grouped(config, _mixture(config))))
    first = config.integer("first_k_dense_replace", default=1, minimum=0, maximum=MAXIMUM_LAYERS)
    return model(config, common, [front if index < first else rest for index in range(common.num_hidden_layers)])


def _mixture(config: ConfigValues) -> MixtureOfExperts:
    inner = config.integer("moe_intermediate_size", default=1408)
    return MixtureOfExperts(
        num_experts=config.integer("n_routed_experts", "num_local_experts", default=128),
        experts_per_token=config.integer("num_experts_per_tok", default=8),
        intermediate_size=inner,
        activation=config.activation("hidden_act"),
        shared_intermediate_size=inner * config.integer("n_shared_experts", default=1),
        score_correction=True,
        score_scale=config.number("routed_scaling_factor", default=1.0, maximum=1e6),
        normalised=config.flag("norm_topk_prob", default=True),
        fp32_router=True,
        fp32_scores=True,
    )
