"""Families of which some layers are attention, and the others linear attention, or short convolutions."""

from collections.abc import Mapping, Sequence
from typing import Any

from memplan.model.families.common_parts import (
    Shape,
    attention,
    experts,
    gated_mlp,
    model,
    rms_norm,
    rotary_dim,
    shape,
    sparse_layers,
)
from memplan.model.families.config_values import MAXIMUM_LAYERS, ConfigValues
from memplan.model.families.family_fields import runs_as
from memplan.model.gated_delta_net import GatedDeltaNet
from memplan.model.short_convolution import ShortConvolution
from memplan.model.spec import Attention, Layer, MixtureOfExperts, Mlp, ModelSpec, Norm, TensorNames

LINEAR, FULL = "linear_attention", "full_attention"
ROTATED = 0.25
"""Share of a head's dimensions that is rotated where a config says nothing."""


@runs_as(
    scored=True,
    joins_none=True,
    shared_first=True,
    flattens_rows=True,
    balances=True,
    norms_at_once=True,
    adapted_experts="named",
)
def qwen3_next(config: ConfigValues) -> ModelSpec:
    """Qwen3-Next: three gated delta networks, then attention with an output gate; routed experts beside a shared one.

    Source: ``transformers/models/qwen3_next/modeling_qwen3_next.py`` and its configuration (v5.23.0); https://arxiv.org/abs/2412.06464.
    """
    common = shape(config, heads=16, key_value_heads=2, head_dim=256)
    sparse = experts(config, _mixture(config, 512, 10, normalised=config.flag("norm_topk_prob", default=True)))
    dense = gated_mlp(config)
    parts = [sparse if has_experts else dense for has_experts in sparse_layers(config, common.num_hidden_layers)]
    return _hybrid(config, common, parts, joined=True)


def _mixture(config: ConfigValues, count: int, used: int, *, normalised: bool) -> MixtureOfExperts:
    """Return routed experts beside a shared one that a gate scales; ``count`` and ``used`` are what missing keys mean."""
    return MixtureOfExperts(
        num_experts=config.integer("num_experts", "num_local_experts", default=count),
        experts_per_token=config.integer("num_experts_per_tok", default=used),
        intermediate_size=config.integer("moe_intermediate_size", default=512),
        activation=config.activation("hidden_act"),
        normalised=normalised,
        shared_intermediate_size=config.integer("shared_expert_intermediate_size", default=512),
        shared_gate=True,
    )


def _hybrid(config: ConfigValues, common: Shape, parts: Sequence[Mlp | MixtureOfExperts], *, joined: bool) -> ModelSpec:
    """Return a model whose layers are gated delta networks, and attention every so many.

    Args:
        parts: The feed-forward part of each layer.
        joined: Whether a gated delta network has one projection for query, key, value and gate.
    """
    config.only("attn_output_gate", True)
    config.text("mamba_ssm_dtype", default="float32")  # of states in inference; transformers does not read it
    norm = rms_norm(config, unit_offset=True)
    linear, full = _delta(config, joined=joined), _gated_attention(config, common)
    mixers = [linear if kind == LINEAR else full for kind in _kinds(config, common.num_hidden_layers)]
    layers = [Layer(mixer, part, norm) for mixer, part in zip(mixers, parts, strict=True)]
    return model(config, common, layers, layer_kinds=(LINEAR,), names=TensorNames(shared_experts="shared_expert"))


def _kinds(config: ConfigValues, count: int) -> Sequence[str]:
    """Return the kind of each layer, as listed, or attention every ``full_attention_interval`` layers."""
    interval = config.integer("full_attention_interval", default=4, maximum=MAXIMUM_LAYERS)
    listed = config.keys.get("layer_types")  # checked where the model is put together
    if isinstance(listed, list) and len(listed) == count:
        return listed
    return [FULL if (index + 1) % interval == 0 else LINEAR for index in range(count)]


def _gated_attention(config: ConfigValues, common: Shape) -> Attention:
    bias = config.flag("attention_bias")
    return attention(
        config,
        common,
        rotary_dim(config, common.head_dim, ROTATED),
        bias=bias,
        query_key_norm=rms_norm(config, unit_offset=True),
        output_gate=True,
    )


def _delta(config: ConfigValues, *, joined: bool) -> GatedDeltaNet:
    keys = config.integer("linear_num_key_heads", default=16)
    values = config.integer("linear_num_value_heads", default=32)
    config.divides("linear_num_key_heads", keys, "linear_num_value_heads", values)
    return GatedDeltaNet(
        num_key_heads=keys,
        num_value_heads=values,
        key_head_dim=config.integer("linear_key_head_dim", default=128),
        value_head_dim=config.integer("linear_value_head_dim", default=128),
        kernel_size=config.integer("linear_conv_kernel_dim", default=4),
        joined=joined,
        epsilon=rms_norm(config).epsilon,
    )


@runs_as(scored=True, sequence_tables=True, joins_none=True, norms_at_once=True)
def qwen3_5_text(config: ConfigValues) -> ModelSpec:
    """Qwen3.5 and 3.6, dense, text: Qwen3-Next's layers with a projection each for query, key and value, gate, decay and correction.

    Source: ``transformers/models/qwen3_5/modeling_qwen3_5.py`` and its configuration (v5.23.0).
    """
    common = shape(config, heads=16, key_value_heads=4, head_dim=256, vocab_size=248_320)
    return _hybrid(config, common, [gated_mlp(config)] * common.num_hidden_layers, joined=False)


QWEN3_5_MOE: Mapping[str, Any] = {
    "sequence_tables": True,
    "joins_none": True,
    "shared_first": True,
    "flattens_rows": True,
    "balances": True,
    "norms_at_once": True,
    "adapted_experts": "left",
}
"""How transformers' code of Qwen3.5 with experts differs from Llama's, its tower or not."""


@runs_as(scored=False, **QWEN3_5_MOE)
def qwen3_5_moe_text(config: ConfigValues) -> ModelSpec:
    """Qwen3.5 and 3.6 with experts, text: Qwen3.5's layers with routed experts beside a shared one in each.

    Source: ``transformers/models/qwen3_5_moe/modeling_qwen3_5_moe.py`` and its configuration (v5.23.0).
    """
    common = shape(config, heads=16, key_value_heads=2, head_dim=256, vocab_size=248_320)
    config.only("norm_topk_prob", True)
    config.only("decoder_sparse_step", 1)
    config.integers("mlp_only_layers")  # released, and read by nothing in transformers; so is the next
    config.integer("intermediate_size", default=1)
    part = experts(config, _mixture(config, 256, 8, normalised=True))
    return _hybrid(config, common, [part] * common.num_hidden_layers, joined=False)


CONVOLUTION = "conv"
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


@runs_as(scored=False, norms_at_once=True)
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


@runs_as(scored=False, norms_at_once=True, adapted_experts="left")
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
