"""Families with routed experts."""

from dataclasses import replace

from memplan.model.families.common_parts import (
    attention,
    experts,
    factor,
    gated_mlp,
    model,
    rms_norm,
    rotary_dim,
    shape,
    sliding_window,
    sparse_layers,
)
from memplan.model.families.config_values import MAXIMUM_LAYERS, ConfigValues
from memplan.model.families.family_fields import runs_as
from memplan.model.families.latent_mixtures import grouped, latent_mixture
from memplan.model.spec import Layer, MixtureOfExperts, ModelSpec, TensorNames


@runs_as(scored=True, balances=True, adapted_experts="all-linear")
def mixtral(config: ConfigValues) -> ModelSpec:
    """Mixtral: Mistral with routed experts in every layer.

    Source: ``transformers/models/mixtral/modeling_mixtral.py``; https://arxiv.org/abs/2401.04088.
    """
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


@runs_as(scored=False, joins_none=True, balances=True, adapted_experts="all-linear", norms_at_once=True)
def minimax_m2(config: ConfigValues) -> ModelSpec:
    """MiniMax-M2: Mixtral's layers, half of a head rotated, all queries and keys normalised together, experts chosen by sigmoids.

    Source: ``transformers/models/minimax_m2/modeling_minimax_m2.py`` (v5.23.0).
    """
    common, norm = shape(config, key_value_heads=8, head_dim=128), rms_norm(config)
    config.only("router_jitter_noise", 0.0)
    config.only("scoring_func", "sigmoid")
    for key in ("use_qk_norm", "use_routing_bias"):
        config.only(key, True)
    config.only("qk_norm_type", "per_layer")
    rotated = config.integer("rotary_dim", default=rotary_dim(config, common.head_dim))
    heads = attention(config, common, rotated, query_key_norm=norm, query_key_norm_scope="full")
    mixture = MixtureOfExperts(
        num_experts=config.integer("num_local_experts", "num_experts", default=256),
        experts_per_token=config.integer("num_experts_per_tok", default=8),
        intermediate_size=config.integer("intermediate_size"),
        activation=config.activation("hidden_act"),
        score_correction=True,
        fp32_scores=True,
    )
    return model(config, common, Layer(heads, experts(config, mixture), norm))


@runs_as(
    scored=True, balances=True, shared_first=True, flattens_rows=True, masks=2, idle_mask=True, adapted_experts="left"
)
def qwen2_moe(config: ConfigValues) -> ModelSpec:
    """Qwen1.5-MoE and Qwen2-MoE: routed experts beside shared ones, which a learned gate scales.

    Source: ``transformers/models/qwen2_moe/modeling_qwen2_moe.py``; https://arxiv.org/abs/2407.10671.
    """
    common = shape(config)
    window = sliding_window(config, common.num_hidden_layers)
    heads = attention(config, common, qkv_bias=config.flag("qkv_bias", default=True))
    dense = Layer(heads, gated_mlp(config), rms_norm(config))
    sparse = Layer(heads, experts(config, _qwen2_mixture(config)), rms_norm(config))
    layers = [sparse if has_experts else dense for has_experts in sparse_layers(config, common.num_hidden_layers)]
    return model(config, common, layers, names=TensorNames(shared_experts="shared_expert"), **window)


def _qwen2_mixture(config: ConfigValues) -> MixtureOfExperts:
    return MixtureOfExperts(
        num_experts=config.integer("num_experts", "num_local_experts", default=60),
        experts_per_token=config.integer("num_experts_per_tok", default=4),
        intermediate_size=config.integer("moe_intermediate_size", default=1408),
        activation=config.activation("hidden_act"),
        normalised=config.flag("norm_topk_prob"),
        shared_intermediate_size=config.integer("shared_expert_intermediate_size", default=5632),
        shared_gate=True,
    )


@runs_as(scored=True, balances=True, adapted_experts="named", norms_at_once=True)
def qwen3_moe(config: ConfigValues) -> ModelSpec:
    """Qwen3-MoE: Qwen3's attention with routed experts and no shared one.

    Source: ``transformers/models/qwen3_moe/modeling_qwen3_moe.py``; https://arxiv.org/abs/2505.09388.
    """
    common = shape(config, key_value_heads=4)
    bias = config.flag("attention_bias")
    window = sliding_window(config, common.num_hidden_layers)
    heads = attention(config, common, bias=bias, query_key_norm=rms_norm(config))
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


@runs_as(scored=False, balances=True, adapted_experts="named", norms_at_once=True)
def olmoe(config: ConfigValues) -> ModelSpec:
    """OLMoE: all queries and keys normalised together, before they may be clipped, and routed experts in every layer.

    Source: ``transformers/models/olmoe/modeling_olmoe.py``; https://arxiv.org/abs/2409.02060.
    """
    common, norm = shape(config), rms_norm(config, 1e-5)
    bias, clip = config.flag("attention_bias"), config.cap("clip_qkv", 0.0)
    heads = attention(config, common, bias=bias, query_key_norm=norm, query_key_norm_scope="full", clip=clip)
    mixture = MixtureOfExperts(
        num_experts=config.integer("num_experts", "num_local_experts", default=64),
        experts_per_token=config.integer("num_experts_per_tok", default=8),
        intermediate_size=config.integer("intermediate_size"),
        activation=config.activation("hidden_act"),
        normalised=config.flag("norm_topk_prob"),
    )
    return model(config, common, Layer(heads, experts(config, mixture), norm))


@runs_as(scored=False, balances=True, scales_embedded=True, unfused="num_experts", adapted_experts="left")
def granitemoe(config: ConfigValues) -> ModelSpec:
    """Granite 3 with experts, PowerMoE: Granite's layers and factors, with routed experts.

    Source: ``transformers/models/granitemoe/modeling_granitemoe.py``; https://arxiv.org/abs/2408.13359.
    """
    common, bias = shape(config), config.flag("attention_bias")
    scale = factor(config, "attention_multiplier")
    heads = attention(config, common, bias=bias, scale=scale)
    mixture = MixtureOfExperts(
        num_experts=config.integer("num_local_experts", "num_experts", default=8),
        experts_per_token=config.integer("num_experts_per_tok", default=2),
        intermediate_size=config.integer("intermediate_size"),
        activation=config.activation("hidden_act"),
        softmax_of_chosen=True,
        fp32_choice=True,
    )
    added = factor(config, "residual_multiplier")
    layer = Layer(heads, experts(config, mixture), rms_norm(config), residual_scale=added)
    return model(
        config,
        common,
        layer,
        embedding_scale=factor(config, "embedding_multiplier"),
        logit_scale=1 / factor(config, "logits_scaling"),
        names=TensorNames(mlp="block_sparse_moe", router="router"),
    )


@runs_as(
    scored=True,
    balances=True,
    wide_scale=True,
    masks=2,
    masks_from=2,
    half_tables=True,
    adapted_experts="left",
    wide_norms=True,
)
def gpt_oss(config: ConfigValues) -> ModelSpec:
    """gpt-oss: attention sinks, biases, and experts stored (experts, in, out).

    Source: ``transformers/models/gpt_oss/modeling_gpt_oss.py``; https://arxiv.org/abs/2508.10925.
    """
    common = shape(config, key_value_heads=8, head_dim=64)
    bias = config.flag("attention_bias", default=True)
    window = sliding_window(config, common.num_hidden_layers)
    heads = attention(config, common, bias=bias, sinks=True)
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


@runs_as(scored=True, adapted_experts="named", complex_rotary=True)
def deepseek_v2(config: ConfigValues) -> ModelSpec:
    """DeepSeek-V2: latent attention, a few dense layers, then routed experts beside shared ones.

    Source: ``transformers/models/deepseek_v2/modeling_deepseek_v2.py``; https://arxiv.org/abs/2405.04434.
    """
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
    return latent_mixture(config, mixture, dense=0, scale=1.0)


@runs_as(scored=True, adapted_experts="named")
def deepseek_v3(config: ConfigValues) -> ModelSpec:
    """DeepSeek-V3 and R1: DeepSeek-V2's layers with a learned offset that steers the choice of experts.

    The offset, ``e_score_correction_bias``, is a buffer: it is not trained by gradients, and
    neither transformers nor the inventory counts it. Multi-token prediction modules are left out.

    Source: ``transformers/models/deepseek_v3/modeling_deepseek_v3.py``; https://arxiv.org/abs/2412.19437.
    """
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
    return latent_mixture(config, grouped(config, mixture, groups=8, used=4), dense=3, scale=2.5)


@runs_as(scored=False)
def youtu(config: ConfigValues) -> ModelSpec:
    """Youtu-LLM: DeepSeek-V3's latent attention, and dense layers alone.

    Source: ``transformers/models/youtu/modeling_youtu.py`` (v5.24.0).
    """
    config.ignore("embedding_initializer_range")
    return latent_mixture(config, None, tied=True)


@runs_as(scored=False, joins_none=True, adapted_experts="named")
def glm4_moe(config: ConfigValues) -> ModelSpec:
    """GLM-4.5 to 4.7 and Air: grouped queries, half of a head rotated, a few dense layers, then DeepSeek-V3's experts.

    Multi-token prediction modules are left out, as transformers leaves them out.

    Source: ``transformers/models/glm4_moe/modeling_glm4_moe.py``; https://arxiv.org/abs/2508.06471.
    """
    common, norm = shape(config, key_value_heads=8), rms_norm(config, 1e-5)
    heads = attention(
        config,
        common,
        rotary_dim(config, common.head_dim, default=0.5),
        qkv_bias=config.flag("attention_bias"),
        query_key_norm=norm if config.flag("use_qk_norm") else None,
    )
    front = Layer(heads, gated_mlp(config), norm)
    rest = replace(front, feed_forward=experts(config, grouped(config, _glm4_mixture(config))))
    first = config.integer("first_k_dense_replace", default=1, minimum=0, maximum=MAXIMUM_LAYERS)
    return model(config, common, [front if index < first else rest for index in range(common.num_hidden_layers)])


@runs_as(scored=False, adapted_experts="named")
def glm4_moe_lite(config: ConfigValues) -> ModelSpec:
    """GLM-4.7 Flash: DeepSeek-V3's latent attention with GLM-4.5's experts.

    Source: ``transformers/models/glm4_moe_lite/modeling_glm4_moe_lite.py`` (v5.23.0).
    """
    listed = config.keys.get("mlp_layer_types")
    kinds = listed if isinstance(listed, list) else ["dense"]
    first = kinds.count("dense")
    config.only("mlp_layer_types", None, ["dense"] * first + ["sparse"] * (len(kinds) - first))
    config.expect("first_k_dense_replace", first)
    return latent_mixture(config, grouped(config, _glm4_mixture(config)), dense=first, scale=1.8, epsilon=1e-5)


def _glm4_mixture(config: ConfigValues) -> MixtureOfExperts:
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
