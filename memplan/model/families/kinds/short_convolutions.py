"""Families most of whose layers are short convolutions, and the others attention."""

from collections.abc import Sequence

from memplan.model.families.common_parts import Shape, attention, experts, model, shape
from memplan.model.families.config_values import ConfigValues
from memplan.model.short_convolution import ShortConvolution
from memplan.model.spec import Layer, MixtureOfExperts, Mlp, ModelSpec, Norm, TensorNames

CONVOLUTION, FULL = "conv", "full_attention"
NAMES = TensorNames(
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


def lfm2(config: ConfigValues) -> ModelSpec:
    """LFM2 and LFM2.5: short convolutions between gates, attention with normalised queries and keys in some layers.

    Source: ``transformers/models/lfm2/modeling_lfm2.py`` and its configuration (v5.23.0).
    """
    common = shape(config, key_value_heads=8, vocab_size=65_536)
    return _mixed(config, common, [Mlp(_width(config))] * common.num_hidden_layers)


def _width(config: ConfigValues) -> int:
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
    return _mixed(config, common, [dense if index < first else sparse for index in range(common.num_hidden_layers)])


def _mixed(config: ConfigValues, common: Shape, parts: Sequence[Mlp | MixtureOfExperts]) -> ModelSpec:
    """Return a model with these feed-forward parts, whose layers are convolutions where they are not attention."""
    norm = Norm(epsilon=config.number("norm_eps", default=1e-5))
    config.only("conv_bias", False)
    config.ignore("conv_dim", "conv_dim_out", "conv_use_xavier_init", "block_dim", "block_norm_eps", "block_use_swiglu")
    config.ignore(
        "block_use_xavier_init", "num_heads", "use_pos_enc", "theta", "block_mlp_init_scale", "block_out_init_scale"
    )
    kinds = _kinds(config, common.num_hidden_layers)
    if FULL not in kinds:
        config.refuse(
            "layer_types", "a model without attention is not modelled: transformers' code of its cache has none either"
        )
    convolution = ShortConvolution(config.integer("conv_L_cache", default=3, maximum=64))
    heads = attention(config, common, query_key_norm=norm)
    mixers = [heads if kind != CONVOLUTION else convolution for kind in kinds]
    layers = [Layer(mixer, part, norm) for mixer, part in zip(mixers, parts, strict=True)]
    tied = config.flag("tie_embedding", default=True)
    return model(config, common, layers, tied=tied, layer_kinds=(CONVOLUTION,), names=NAMES)


def _kinds(config: ConfigValues, count: int) -> list[str]:
    """Return the kind of each layer, as listed, or attention where ``full_attn_idxs`` has it."""
    attended = config.integers("full_attn_idxs")
    listed = config.keys.get("layer_types")  # checked where the model is put together
    if isinstance(listed, list) and len(listed) == count:
        return [str(kind) for kind in listed]
    chosen = range(count) if attended is None else attended
    return [FULL if index in chosen else CONVOLUTION for index in range(count)]
