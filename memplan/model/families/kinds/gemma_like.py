"""Gemma's text models: norms with an offset, scaled embeddings, soft caps."""

from dataclasses import replace
from typing import Any

from memplan.model.families.bert_layers import modern_bert
from memplan.model.families.common_parts import (
    Shape,
    attention,
    experts,
    factor,
    model,
    rms_norm,
    shape,
    sliding_window,
    whole_heads,
)
from memplan.model.families.config_values import ConfigValues
from memplan.model.families.family_fields import GEMMA4, runs_as
from memplan.model.families.layer_windows import layer_windows
from memplan.model.spec import Activation, Attention, Layer, MixtureOfExperts, Mlp, ModelSpec


@runs_as(scored=True)
def gemma(config: ConfigValues) -> ModelSpec:
    """Gemma 1: GeGLU, scales of ``1 + weight``, embeddings scaled and tied to the head.

    Source: ``transformers/models/gemma/modeling_gemma.py``; https://arxiv.org/abs/2403.08295.
    """
    common = shape(config, head_dim=256)
    heads = attention(config, common, bias=config.flag("attention_bias"))
    layer = Layer(heads, _gemma_mlp(config), rms_norm(config, unit_offset=True))
    return model(config, common, layer, tied=True, embedding_scale=common.hidden_size**0.5)


def _gemma_mlp(config: ConfigValues) -> Mlp:
    """Return Gemma's GeGLU; plain ``gelu`` in its early configs means the tanh approximation."""
    named = config.activation("hidden_activation", "hidden_act", default="gelu_pytorch_tanh")
    activation: Activation = "gelu-tanh" if named == "gelu" else named
    return Mlp(config.integer("intermediate_size"), activation)


def _query_scale(config: ConfigValues) -> float:
    """Return the factor of attention scores in Gemma 2 and 3, which do not take the width of a head for it.

    Formula:
        ``query_pre_attn_scalar ** -0.5``; a missing key means 256, as in transformers.
    """
    return float(factor(config, "query_pre_attn_scalar", 256.0) ** -0.5)


@runs_as(scored=True, masks=2, masks_from=2)
def gemma2(config: ConfigValues) -> ModelSpec:
    """Gemma 2: norms before and after each part, soft caps on scores and logits.

    Source: ``transformers/models/gemma2/modeling_gemma2.py``; https://arxiv.org/abs/2408.00118.
    """
    common = shape(config, key_value_heads=4, head_dim=256)
    bias, norm = config.flag("attention_bias"), rms_norm(config, unit_offset=True)
    window = sliding_window(config, common.num_hidden_layers)
    capped = config.cap("attn_logit_softcapping", default=50.0)
    scale = _query_scale(config)
    heads = attention(config, common, bias=bias, logit_softcap=capped, scale=scale)
    return model(
        config,
        common,
        Layer(heads, _gemma_mlp(config), norm, placement="sandwich"),
        tied=True,
        embedding_scale=common.hidden_size**0.5,
        final_logit_softcap=config.cap("final_logit_softcapping", default=30.0),
        **window,
    )


@runs_as(scored=True, masks=2, masks_from=6)
def gemma3_text(config: ConfigValues) -> ModelSpec:
    """Gemma 3, text: Gemma 2's layers with normalised queries and keys in place of soft caps.

    Windowed and full layers rotate by different bases, so two pairs of tables are built. The
    defaults are transformers', which released multimodal configs rely on.

    Source: ``transformers/models/gemma3/modeling_gemma3.py``; https://arxiv.org/abs/2503.19786.
    """
    common = shape(config, heads=8, key_value_heads=4, head_dim=256, vocab_size=262_208)
    bias, norm = config.flag("attention_bias"), rms_norm(config, unit_offset=True)
    window = sliding_window(config, common.num_hidden_layers)
    capped = config.cap("attn_logit_softcapping", default=0.0)
    config.only("use_bidirectional_attention", False)
    heads = attention(config, common, bias=bias, query_key_norm=norm, logit_softcap=capped, scale=_query_scale(config))
    return model(
        config,
        common,
        Layer(heads, _gemma_mlp(config), norm, placement="sandwich"),
        tied=True,
        embedding_scale=common.hidden_size**0.5,
        final_logit_softcap=config.cap("final_logit_softcapping", default=0.0),
        rotary_tables=2,
        **window,
    )


@runs_as(scored=False, **GEMMA4, adapted_experts="left")
def gemma4_text(config: ConfigValues) -> ModelSpec:
    """Gemma 4, text: values normalised beside queries and keys; full layers have wider heads, and may have keys for values.

    Experts may stand beside the dense part. Small ones have embeddings for every layer, and last layers that attend to keys and
    values of earlier ones.

    Source: ``transformers/models/gemma4/modeling_gemma4.py`` (v5.23.0).
    """
    return _gemma4(config, embedded=256)


@runs_as(scored=False, **GEMMA4)
def gemma4_unified_text(config: ConfigValues) -> ModelSpec:
    """Gemma 4 12B, text: the dense Gemma 4's layers.

    Source: ``transformers/models/gemma4_unified/modeling_gemma4_unified.py`` (v5.23.0).
    """
    return _gemma4(config, embedded=0)


def _gemma4(config: ConfigValues, embedded: int) -> ModelSpec:
    """Return the shapes of a text model of Gemma 4's; ``embedded`` is the width of every layer's embedding where none is said."""
    common = shape(config, heads=8, key_value_heads=4, head_dim=256, vocab_size=262_144)
    config.integer("sliding_window", default=512)
    config.only("use_bidirectional_attention", None, "vision")
    config.ignore("per_layer_config", "vocab_size_per_layer_input")
    bias, norm = config.flag("attention_bias"), rms_norm(config)
    kinds = layer_windows(config.keys, common.num_hidden_layers)
    as_values = config.flag("attention_k_eq_v")
    wide = _full_heads(config, common, [index for index, window in enumerate(kinds) if not window], as_values)
    options: dict[str, Any] = {
        "qkv_bias": bias,
        "output_bias": bias,
        "query_key_norm": norm,
        "scale": 1.0,
        "value_norm": True,
    }
    within = Layer(attention(config, common, **options), _gemma_mlp(config), norm, placement="sandwich")
    within = replace(within, experts=_gemma4_experts(config))
    full = replace(within, attention=attention(config, wide, keys_as_values=as_values, **options))
    layers = _sharing(config, [within if window else full for window in kinds], kinds)
    return model(
        config,
        common,
        layers,
        tied=True,
        embedding_scale=common.hidden_size**0.5,
        final_logit_softcap=config.cap("final_logit_softcapping", default=0.0),
        rotary_tables=len(set(kinds)),
        window=max(kinds),
        full_layers=tuple([index for index, window in enumerate(kinds) if not window]),
        layer_input=(width := config.integer("hidden_size_per_layer_input", default=embedded, minimum=0)),
        layer_vocab=config.integer("vocab_size_per_layer_input", default=262_144) if width else 0,
    )


def _sharing(config: ConfigValues, layers: list[Layer], windows: tuple[int, ...]) -> list[Layer]:
    """Return the layers, of which the last ones attend to keys and values of the last of their kind before, and may be twice as wide inside.

    Source: ``Gemma4TextConfig.kv_sharing_modes``, ``Gemma4TextMLP.__init__`` (v5.23.0).
    """
    shared = config.integer("num_kv_shared_layers", default=0, minimum=0, maximum=max(0, len(layers) - 1))
    first = len(layers) - shared
    if shared and {bool(window) for window in windows} != {bool(window) for window in windows[:first]}:
        config.conflict("num_kv_shared_layers", f"a kind of layers is among the last {shared} alone")
    twice = 1 + config.flag("use_double_wide_mlp")
    return [layer if index < first else _reusing(layer, twice) for index, layer in enumerate(layers)]


def _reusing(layer: Layer, twice: int) -> Layer:
    assert isinstance(layer.attention, Attention)
    assert isinstance(layer.feed_forward, Mlp)
    wide = replace(layer.feed_forward, intermediate_size=twice * layer.feed_forward.intermediate_size)
    return replace(layer, attention=replace(layer.attention, reuses=True), feed_forward=wide)


def _full_heads(config: ConfigValues, common: Shape, full: list[int], as_values: bool) -> Shape:
    """Return the shape of full layers: by keys of their own, or as ``per_layer_config`` has it, which must be alike for all.

    Source: ``Gemma4TextConfig.__post_init__`` (v5.23.0).
    """
    listed = config.mapping("per_layer_config")
    alike = listed.get(str(full[0]), {})
    if listed and (set(listed) != {str(index) for index in full} or any(own != alike for own in listed.values())):
        config.refuse(
            "per_layer_config", "layers that differ otherwise than by full attention and windows are not modelled"
        )
    own = alike if isinstance(alike, dict) else {}
    width = own.get("head_dim") or config.integer("global_head_dim", default=512)
    groups = config.integer("num_global_key_value_heads", default=common.num_key_value_heads)
    groups = own.get("num_key_value_heads") or (groups if as_values else common.num_key_value_heads)
    if not all(isinstance(value, int) and value > 0 for value in (width, groups)):
        config.problem("per_layer_config", "expected positive integers")
        return common
    config.divides("num_global_key_value_heads", groups, "num_attention_heads", common.num_attention_heads)
    return replace(common, head_dim=width, num_key_value_heads=groups)


def _gemma4_experts(config: ConfigValues) -> MixtureOfExperts | None:
    """Return the experts beside each layer's dense part, where there are any."""
    if not config.flag("enable_moe_block"):
        config.ignore("num_experts", "top_k_experts", "moe_intermediate_size")
        return None
    mixture = MixtureOfExperts(
        num_experts=config.integer("num_experts"),
        experts_per_token=config.integer("top_k_experts", "num_experts_per_tok"),
        intermediate_size=config.integer("moe_intermediate_size"),
        activation=_gemma_mlp(config).activation,
        fp32_scores=True,
    )
    return experts(config, mixture)


@runs_as(
    scored=True,
    dropouts=("embeddings.norm", "attn.Wo", "mlp.Wi"),
    masks=2,
    masks_from=2,
    names_attention=True,
    widens_rotated=True,
    passes_positions=False,
    drops_embedding="never",
)
def modernbert(config: ConfigValues) -> ModelSpec:
    """ModernBERT: an encoder of two kinds of layers, within a window of either side and not, with GeGLU; dropout is not modelled.

    Source: ``transformers/models/modernbert/modeling_modernbert.py``; https://arxiv.org/abs/2412.13663.
    """
    return modern_bert(config, whole_heads(config))
