"""DeepSeek-V3 and R1: DeepSeek-V2's layers with a learned offset that steers the choice of experts.

The offset, ``e_score_correction_bias``, is a buffer: it is not trained by gradients, and
neither transformers nor the inventory counts it. Multi-token prediction modules are left out.

Source: ``transformers/models/deepseek_v3/modeling_deepseek_v3.py``; https://arxiv.org/abs/2412.19437.
"""

from __future__ import annotations

from memplan.model.families.config_values import ConfigValues
from memplan.model.families.mixtures.deepseek_v2 import deepseek, grouped
from memplan.model.spec import MixtureOfExperts, ModelSpec


def model_spec(config: ConfigValues) -> ModelSpec:
    """Return the shapes of a DeepSeek-V3 config."""
    inner = config.integer("moe_intermediate_size", default=2048)
    mixture = MixtureOfExperts(
        num_experts=config.integer("n_routed_experts", "num_local_experts", "num_experts", default=256),
        experts_per_token=config.integer("num_experts_per_tok", default=8),
        intermediate_size=inner,
        activation=config.activation("hidden_act"),
        shared_intermediate_size=inner * config.integer("n_shared_experts", default=1),
        score_correction=True,
        normalised=config.flag("norm_topk_prob", default=True),
        fp32_router=True,
        fp32_scores=True,
    )
    config.only("scoring_func", "sigmoid")
    config.only("topk_method", "noaux_tc")
    return deepseek(config, grouped(config, mixture, groups=8, used=4), dense=3, scale=2.5)
