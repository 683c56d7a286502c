"""DeepSeek-V2: latent attention, a few dense layers, then routed experts beside shared ones.

Source: ``transformers/models/deepseek_v2/modeling_deepseek_v2.py``; https://arxiv.org/abs/2405.04434.
"""

from __future__ import annotations

from dataclasses import replace
from math import log

from memplan.model.families.common_parts import Shape, even_rotary, experts, gated_mlp, model, rms_norm
from memplan.model.families.config_values import MAXIMUM_LAYERS, ConfigValues
from memplan.model.spec import LatentAttention, Layer, MixtureOfExperts, ModelSpec, Norm


def model_spec(config: ConfigValues) -> ModelSpec:
    """Return the shapes of a DeepSeek-V2 config."""
    inner = config.integer("moe_intermediate_size", default=1407)
    mixture = MixtureOfExperts(
        num_experts=config.integer("n_routed_experts", "num_experts", default=64),
        experts_per_token=config.integer("num_experts_per_tok"),
        intermediate_size=inner,
        activation=config.activation("hidden_act"),
        shared_intermediate_size=inner * config.integer("n_shared_experts", default=2),
        normalised=False,
        fp32_router=True,
        fp32_scores=True,
    )
    config.only("scoring_func", "softmax")
    config.only("topk_method", "greedy", "group_limited_greedy")
    limited = grouped(config, mixture)  # read in any case: without the method the groups mean nothing
    if config.text("topk_method", default="greedy") == "group_limited_greedy":
        mixture = limited
    return deepseek(config, mixture, dense=0, scale=1.0)


def deepseek(config: ConfigValues, mixture: MixtureOfExperts, dense: int, scale: float) -> ModelSpec:
    """Return the shapes of a DeepSeek config whose layers past the dense ones hold ``mixture``.

    Args:
        mixture: Feed-forward part of the later layers.
        dense: What a missing ``first_k_dense_replace`` means.
        scale: What a missing ``routed_scaling_factor`` means.
    """
    layers = config.integer("num_hidden_layers", maximum=MAXIMUM_LAYERS)
    first = config.integer("first_k_dense_replace", default=dense, minimum=0, maximum=MAXIMUM_LAYERS)
    heads = _attention(config)
    common = Shape(
        config.integer("hidden_size"),
        layers,
        heads.num_heads,
        heads.num_heads,
        heads.qk_head_dim,
        config.integer("vocab_size"),
    )
    norm = rms_norm(config)
    mixture = replace(mixture, score_scale=config.number("routed_scaling_factor", default=scale, maximum=1e6))
    front, rest = Layer(heads, gated_mlp(config), norm), Layer(heads, experts(config, mixture), norm)
    return model(config, common, [front if index < first else rest for index in range(layers)])


def grouped(config: ConfigValues, mixture: MixtureOfExperts, groups: int = 1, used: int = 1) -> MixtureOfExperts:
    """Return ``mixture`` with its groups of experts; ``groups`` and ``used`` are what missing keys mean.

    Where experts do not divide into as many groups, transformers' default cannot run: there are none then.
    """
    count = config.integer("n_group", default=1 if mixture.num_experts % groups else groups)
    config.divides("n_group", count, "n_routed_experts", mixture.num_experts)
    return replace(
        mixture, groups=count, groups_per_token=config.integer("topk_group", default=min(used, count), maximum=count)
    )


def _score_scale(config: ConfigValues, width: int) -> float:
    """Return the factor of attention scores, which YaRN enlarges.

    Formula:
        ``width ** -0.5 * (0.1 * mscale_all_dim * ln(factor) + 1) ** 2``

    Source:
        ``yarn_apply_mscale`` in transformers 5, ``models/deepseek_v3/modeling_deepseek_v3.py``.
    """
    rotary = config.mapping("rope_parameters", "rope_scaling")
    kind, factor, all_dim = (
        rotary.get("rope_type", rotary.get("type")),
        rotary.get("factor"),
        rotary.get("mscale_all_dim"),
    )
    if kind in (None, "default") or not isinstance(factor, int | float) or not isinstance(all_dim, int | float):
        return float(width**-0.5)
    stretched = 0.1 * all_dim * log(factor) + 1 if all_dim and factor > 1 else 1.0
    return float(width**-0.5 * stretched**2)


def _attention(config: ConfigValues) -> LatentAttention:
    heads = config.integer("num_attention_heads")
    config.expect("num_key_value_heads", heads)
    config.integer("head_dim", default=0)  # restates qk_rope_head_dim or qk_head_dim; transformers overwrites it
    unrotated = config.integer("qk_nope_head_dim", default=128)
    rotated = even_rotary(config, config.integer("qk_rope_head_dim", default=64))
    return LatentAttention(
        num_heads=heads,
        q_lora_rank=config.integer("q_lora_rank", default=0 if config.has("q_lora_rank") else 1536),
        kv_lora_rank=config.integer("kv_lora_rank", default=512),
        qk_nope_head_dim=unrotated,
        qk_rope_head_dim=rotated,
        v_head_dim=config.integer("v_head_dim", default=128),
        norm=Norm(epsilon=1e-6),
        bias=config.flag("attention_bias"),
        scale=_score_scale(config, unrotated + rotated),
    )
