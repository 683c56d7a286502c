"""What families with latent attention have in common: DeepSeek's layers, some dense, then experts, in groups or not."""

from dataclasses import replace
from math import log

from memplan.model.families.common_parts import Shape, even_rotary, experts, gated_mlp, model, rms_norm
from memplan.model.families.config_values import MAXIMUM_LAYERS, ConfigValues
from memplan.model.spec import LatentAttention, Layer, MixtureOfExperts, ModelSpec, Norm


def latent_mixture(
    config: ConfigValues,
    mixture: MixtureOfExperts | None,
    dense: int = 0,
    scale: float = 1.0,
    *,
    epsilon: float = 1e-6,
    scales_query: bool = False,
    tied: bool = False,
    **sizes: int,
) -> ModelSpec:
    """Return the shapes of a DeepSeek config whose layers past the dense ones hold ``mixture``.

    Args:
        mixture: Feed-forward part of the later layers; None where all are dense.
        dense: What a missing ``first_k_dense_replace`` means.
        scale: What a missing ``routed_scaling_factor`` means.
        epsilon: What a missing ``rms_norm_eps`` means.
        scales_query: Whether queries are scaled by their position.
        tied: What a missing ``tie_word_embeddings`` means.
        sizes: What missing sizes of latent attention mean, where not what DeepSeek's do.
    """
    layers = config.integer("num_hidden_layers", maximum=MAXIMUM_LAYERS)
    heads = replace(_latent_attention(config, **sizes), scales_query=scales_query)
    common = Shape(
        config.integer("hidden_size"),
        layers,
        heads.num_heads,
        heads.num_heads,
        heads.qk_head_dim,
        config.integer("vocab_size"),
    )
    norm = rms_norm(config, epsilon)
    front = Layer(heads, gated_mlp(config), norm)
    if mixture is None:
        return model(config, common, front, tied=tied)
    first = config.integer("first_k_dense_replace", default=dense, minimum=0, maximum=MAXIMUM_LAYERS)
    mixture = replace(mixture, score_scale=config.number("routed_scaling_factor", default=scale, maximum=1e6))
    rest = Layer(heads, experts(config, mixture), norm)
    return model(config, common, [front if index < first else rest for index in range(layers)], tied=tied)


def grouped(config: ConfigValues, mixture: MixtureOfExperts, groups: int = 1, used: int = 1) -> MixtureOfExperts:
    """Return ``mixture`` with its groups of experts; ``groups`` and ``used`` are what missing keys mean.

    Where experts do not divide into as many groups, transformers' default cannot run: there are none then.
    """
    count = config.integer("n_group", default=1 if mixture.num_experts % groups else groups)
    config.divides("n_group", count, "n_routed_experts", mixture.num_experts)
    return replace(
        mixture, groups=count, groups_per_token=config.integer("topk_group", default=min(used, count), maximum=count)
    )


MISSING_ROTARY = {"mistral4": {"rope_type": "yarn", "factor": 128.0, "mscale_all_dim": 1.0}}
"""Family -> what a missing ``rope_parameters`` means, where not the ordinary kind (configuration_mistral4.py, 5.23.0)."""


def _score_scale(config: ConfigValues, width: int) -> float:
    """Return the factor of attention scores, which YaRN enlarges.

    Formula:
        ``width ** -0.5 * (0.1 * mscale_all_dim * ln(factor) + 1) ** 2``
    """
    # Source: ``yarn_apply_mscale`` in transformers 5, ``models/deepseek_v3/modeling_deepseek_v3.py``.
    rotary = config.mapping("rope_parameters", "rope_scaling") or MISSING_ROTARY.get(config.family, {})
    kind, factor, all_dim = (
        rotary.get("rope_type", rotary.get("type")),
        rotary.get("factor"),
        rotary.get("mscale_all_dim"),
    )
    if kind in (None, "default") or not isinstance(factor, int | float) or not isinstance(all_dim, int | float):
        return float(width**-0.5)
    stretched = 0.1 * all_dim * log(factor) + 1 if all_dim and factor > 1 else 1.0
    return float(width**-0.5 * stretched**2)


def _latent_attention(
    config: ConfigValues, q_lora_rank: int = 1536, kv_lora_rank: int = 512, qk_nope_head_dim: int = 128
) -> LatentAttention:
    heads = config.integer("num_attention_heads")
    config.expect("num_key_value_heads", heads)
    config.integer("head_dim", default=0)  # restates qk_rope_head_dim or qk_head_dim; transformers overwrites it
    unrotated = config.integer("qk_nope_head_dim", default=qk_nope_head_dim)
    rotated = even_rotary(config, config.integer("qk_rope_head_dim", default=64))
    return LatentAttention(
        num_heads=heads,
        q_lora_rank=config.integer("q_lora_rank", default=0 if config.has("q_lora_rank") else q_lora_rank),
        kv_lora_rank=config.integer("kv_lora_rank", default=kv_lora_rank),
        qk_nope_head_dim=unrotated,
        qk_rope_head_dim=rotated,
        v_head_dim=config.integer("v_head_dim", default=128),
        norm=Norm(epsilon=1e-6),
        bias=config.flag("attention_bias"),
        scale=_score_scale(config, unrotated + rotated),
    )
