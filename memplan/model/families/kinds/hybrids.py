"""Families with state space layers or short convolutions, in the place of attention or beside it."""

from collections.abc import Sequence
from typing import Any

from memplan.model.families.common_parts import Shape, attention, experts, factor, gated_mlp, model, rms_norm, shape
from memplan.model.families.config_values import ConfigValues
from memplan.model.families.family_fields import runs_as
from memplan.model.short_convolution import ShortConvolution
from memplan.model.spec import Layer, MixtureOfExperts, Mlp, ModelSpec, Norm, TensorNames
from memplan.model.state_space import StateSpace

HYBRID = "hybrid"
"""What Falcon-H1's config calls each of its layers."""
LINEAR = "linear_attention"
SCANNED = ("mamba", LINEAR)
"""What Granite 4's config, as released and as transformers saves it, calls a layer without attention."""


@runs_as(scales_embedded=True, scales_parts=True)
def falcon_h1(config: ConfigValues) -> ModelSpec:
    """Falcon-H1: attention and a state space part read the same input; numbers multiply what most parts are given and return.

    The catalog leaves those numbers out: transformers multiplies by 1 as well, so that no byte depends on one.

    Source: ``transformers/models/falcon_h1/modeling_falcon_h1.py`` and its configuration (v5.23.0); https://arxiv.org/abs/2507.22448.
    """
    common, norm = shape(config, heads=32, key_value_heads=8), rms_norm(config, 1e-5)
    config.ignore(
        "attention_in_multiplier",
        "attention_out_multiplier",
        "key_multiplier",
        "mlp_multipliers",
        "ssm_in_multiplier",
        "ssm_multipliers",
        "ssm_out_multiplier",
        "num_logits_to_keep",
        "mamba_use_mlp",  # released, and read by nothing in transformers; so is the next
        "mlp_expansion_factor",
    )
    normalised = config.flag("mamba_rms_norm")
    if normalised:
        config.only("mamba_norm_before_gate", False)
    config.ignore("mamba_norm_before_gate")
    inner = config.integer("mamba_d_ssm", default=0 if config.has("mamba_d_ssm") else 1024) or _expanded(
        config, common.hidden_size
    )
    beside = _state_space(
        config,
        inner,
        bias=config.flag("mamba_proj_bias"),
        output_bias=config.flag("projectors_bias"),
        normalised=normalised,
        multiplied=True,
        epsilon=norm.epsilon,
    )
    bias = config.flag("attention_bias")
    heads = attention(config, common, qkv_bias=bias, output_bias=bias)
    layer = Layer(heads, gated_mlp(config, bias=config.flag("mlp_bias")), norm, beside=beside)
    return model(
        config,
        common,
        layer,
        embedding_scale=factor(config, "embedding_multiplier"),
        logit_scale=factor(config, "lm_head_multiplier"),
        layer_kinds=(HYBRID,),
        names=TensorNames(
            final_norm="model.final_layernorm", post_attention_norm="pre_ff_layernorm", mlp="feed_forward"
        ),
    )


@runs_as(balances=True, scales_embedded=True, unfused="num_experts", names_routed=True, passes_positions=False)
def granitemoehybrid(config: ConfigValues) -> ModelSpec:
    """Granite 4: state space layers, attention without positions in some of their places, and routed experts beside a dense part or not.

    Source: ``transformers/models/granitemoehybrid/modeling_granitemoehybrid.py`` and its configuration (v5.23.0).
    """
    common, norm = shape(config, heads=32), rms_norm(config)
    bias = config.flag("mamba_proj_bias")
    scan = _state_space(
        config, _expanded(config, common.hidden_size), bias=bias, output_bias=bias, epsilon=norm.epsilon
    )
    turned = config.text("position_embedding_type", default="") == "rope"
    bias = config.flag("attention_bias")
    heads = attention(
        config,
        common,
        None if turned else 0,
        qkv_bias=bias,
        output_bias=bias,
        scale=factor(config, "attention_multiplier"),
    )
    sparse = config.integer("num_local_experts", default=8, minimum=0) > 0
    part = _granite_mixture(config) if sparse else _granite_mlp(config)
    added = factor(config, "residual_multiplier")
    kinds = config.keys.get("layer_types")  # checked where the model is put together
    listed = (
        kinds
        if isinstance(kinds, list) and len(kinds) == common.num_hidden_layers
        else [LINEAR] * common.num_hidden_layers
    )
    layers = [Layer(scan if kind in SCANNED else heads, part, norm, residual_scale=added) for kind in listed]
    module = "block_sparse_moe." if sparse else ""
    return model(
        config,
        common,
        layers,
        embedding_scale=factor(config, "embedding_multiplier"),
        logit_scale=1 / factor(config, "logits_scaling"),
        layer_kinds=(*SCANNED, "attention"),
        names=TensorNames(
            mlp="" if sparse else "shared_mlp",
            gate_up="input_linear",
            down="output_linear",
            router=f"{module}router",
            experts=f"{module}experts",
            shared_experts="shared_mlp",
        ),
    )


def _granite_mlp(config: ConfigValues) -> Mlp:
    """Return Granite 4's dense part; sizes of experts are released, and mean nothing without any."""
    config.ignore("intermediate_size", "num_experts_per_tok")
    inner = config.integer("shared_intermediate_size", default=1024)
    return Mlp(inner, config.activation("hidden_act"), fused_gate_up=True)


def _granite_mixture(config: ConfigValues) -> MixtureOfExperts:
    mixture = MixtureOfExperts(
        num_experts=config.integer("num_local_experts", default=8),
        experts_per_token=config.integer("num_experts_per_tok", default=2),
        intermediate_size=config.integer("intermediate_size", default=11008),
        activation=config.activation("hidden_act"),
        shared_intermediate_size=config.integer("shared_intermediate_size", default=1024),
        shared_fused=True,
        softmax_of_chosen=True,
        fp32_choice=True,
    )
    return experts(config, mixture)


def _expanded(config: ConfigValues, hidden: int) -> int:
    """Return the width of heads that a config says as a multiple of the model's."""
    return config.integer("mamba_expand", default=2) * hidden


def _state_space(config: ConfigValues, inner: int, **options: Any) -> StateSpace:
    """Return a state space part whose heads are ``inner`` wide together, by the keys that Bamba's config has."""
    heads = config.integer("mamba_n_heads", default=128)
    config.divides("mamba_n_heads", heads, "the width of state space heads", inner)
    config.ignore("mamba_expand", "time_step_limit")
    if config.keys.get("mamba_d_head") != "auto":
        config.expect("mamba_d_head", max(inner // heads, 1))
    config.ignore("mamba_d_head")
    groups = config.integer("mamba_n_groups", default=1)
    config.divides("mamba_n_groups", groups, "mamba_n_heads", heads)
    return StateSpace(
        num_heads=heads,
        head_dim=max(inner // heads, 1),
        num_groups=groups,
        state_size=config.integer("mamba_d_state", default=256),
        kernel_size=config.integer("mamba_d_conv", default=4),
        chunk_tokens=config.integer("mamba_chunk_size", default=256),
        convolution_bias=config.flag("mamba_conv_bias", default=True),
        **options,
    )


CONVOLUTION, FULL = "conv", "full_attention"
LFM2_NAMES = TensorNames(
    final_norm="model.embedding_norm",
    output="out_proj",
    query_norm="q_layernorm",
    key_norm="k_layernorm",
    mlp="feed_forward",
    gate="w1",
    up="w3",
    down="w2",
    input_norm="operator_norm",
    post_attention_norm="ffn_norm",
)


@runs_as(norms_at_once=True)
def lfm2(config: ConfigValues) -> ModelSpec:
    """LFM2 and LFM2.5: short convolutions between gates, attention with normalised queries and keys in some layers.

    Source: ``transformers/models/lfm2/modeling_lfm2.py`` and its configuration (v5.23.0).
    """
    common = shape(config, key_value_heads=8, vocab_size=65_536)
    return _lfm2(config, common, [Mlp(_lfm2_width(config))] * common.num_hidden_layers)


def _lfm2_width(config: ConfigValues) -> int:
    """Return the width of a feed-forward part.

    Formula:
        ``int(m int(2 w / 3))`` rounded up to a multiple, unless a config says that its width ``w`` is not adjusted.

    Source:
        ``Lfm2MLP.__init__``; ``block_ff_dim`` is the older name of the width (``Lfm2Config.__post_init__``).
    """
    width = config.integer("intermediate_size", "block_ff_dim", default=12_288)
    factor = config.number("block_ffn_dim_multiplier", default=1.0, maximum=64.0)
    multiple = config.integer("block_multiple_of", default=256)
    if not config.flag("block_auto_adjust_ff_dim", default=True):
        return width
    return -(-int(factor * int(2 * width / 3)) // multiple) * multiple


@runs_as(norms_at_once=True)
def lfm2_moe(config: ConfigValues) -> ModelSpec:
    """LFM2 and LFM2.5 with experts: LFM2's layers, of which all but the first few have routed experts, chosen by sigmoids and an offset.

    Source: ``transformers/models/lfm2_moe/modeling_lfm2_moe.py`` and its configuration (v5.23.0).
    """
    common = shape(config, heads=32, key_value_heads=8, vocab_size=65_536)
    dense, first = (
        Mlp(config.integer("intermediate_size", default=7168)),
        config.integer("num_dense_layers", default=2, minimum=0),
    )
    config.only("use_expert_bias", True)
    mixture = MixtureOfExperts(
        num_experts=config.integer("num_experts", default=32),
        experts_per_token=config.integer("num_experts_per_tok", default=4),
        intermediate_size=config.integer("moe_intermediate_size", default=1792),
        score_correction=True,
        scores_as_routed=True,
        normalised=config.flag("norm_topk_prob", default=True),
        score_scale=config.number("routed_scaling_factor", default=1.0, maximum=1e6),
    )
    sparse = experts(config, mixture)
    return _lfm2(config, common, [dense if index < first else sparse for index in range(common.num_hidden_layers)])


def _lfm2(config: ConfigValues, common: Shape, parts: Sequence[Mlp | MixtureOfExperts]) -> ModelSpec:
    """Return a model with these feed-forward parts, whose layers are convolutions where they are not attention."""
    norm = Norm(epsilon=config.number("norm_eps", default=1e-5))
    config.only("conv_bias", False)
    config.ignore("conv_dim", "conv_dim_out", "conv_use_xavier_init", "block_dim", "block_norm_eps", "block_use_swiglu")
    config.ignore(
        "block_use_xavier_init", "num_heads", "use_pos_enc", "theta", "block_mlp_init_scale", "block_out_init_scale"
    )
    kinds = _lfm2_kinds(config, common.num_hidden_layers)
    if FULL not in kinds:
        config.refuse(
            "layer_types", "a model without attention is not modelled: transformers' code of its cache has none either"
        )
    convolution = ShortConvolution(config.integer("conv_L_cache", default=3, maximum=64))
    heads = attention(config, common, query_key_norm=norm)
    mixers = [heads if kind != CONVOLUTION else convolution for kind in kinds]
    layers = [Layer(mixer, part, norm) for mixer, part in zip(mixers, parts, strict=True)]
    tied = config.flag("tie_embedding", default=True)
    return model(config, common, layers, tied=tied, layer_kinds=(CONVOLUTION,), names=LFM2_NAMES)


def _lfm2_kinds(config: ConfigValues, count: int) -> list[str]:
    """Return the kind of each layer, as listed, or attention where ``full_attn_idxs`` has it."""
    attended = config.integers("full_attn_idxs")
    listed = config.keys.get("layer_types")  # checked where the model is put together
    if isinstance(listed, list) and len(listed) == count:
        return [str(kind) for kind in listed]
    chosen = range(count) if attended is None else attended
    return [FULL if index in chosen else CONVOLUTION for index in range(count)]
