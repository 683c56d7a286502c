"""Families with interleaved rotary positions, which turn neighbouring dimensions of a head and not its halves."""

from dataclasses import replace

from memplan.model.families.common_parts import (
    attention,
    factor,
    gated_mlp,
    model,
    rms_norm,
    rotary_dim,
    shape,
    sliding_window,
)
from memplan.model.families.config_values import ConfigValues
from memplan.model.families.layer_windows import layer_windows
from memplan.model.spec import Layer, Mlp, ModelSpec, Norm, Placement, TensorNames


def cohere(config: ConfigValues) -> ModelSpec:
    """Command R and Aya: attention and feed-forward in parallel behind one LayerNorm without a shift, and scaled logits.

    Source: ``transformers/models/cohere/modeling_cohere.py``.
    """
    common, norm = shape(config), _cohere_norm(config)
    bias, normed = config.flag("attention_bias"), config.flag("use_qk_norm")
    heads = attention(
        config,
        common,
        qkv_bias=bias,
        output_bias=bias,
        query_key_norm=norm if normed else None,
        query_key_norm_scope="each" if normed else "head",
    )
    layer = Layer(heads, gated_mlp(config), norm, placement="parallel")
    return model(config, common, layer, tied=True, logit_scale=factor(config, "logit_scale", 0.0625))


def _cohere_norm(config: ConfigValues) -> Norm:
    """Return a LayerNorm that has a scale alone."""
    return Norm("layer", epsilon=config.number("layer_norm_eps", default=1e-5))


def cohere2(config: ConfigValues) -> ModelSpec:
    """Command R7B and Command A: Command R's layers, of which those within a window rotate and the others do not.

    Source: ``transformers/models/cohere2/modeling_cohere2.py``.
    """
    common = shape(config)
    window, bias = sliding_window(config, common.num_hidden_layers), config.flag("attention_bias")
    config.only("use_qk_norm", False)
    config.only("use_parallel_block", True)
    config.only("use_gated_activation", True)
    heads = attention(config, common, qkv_bias=bias, output_bias=bias)
    turning = Layer(heads, gated_mlp(config), _cohere_norm(config), placement="parallel")
    still = replace(turning, attention=replace(heads, rotary_dim=0))
    windows = layer_windows(config.keys, common.num_hidden_layers)
    layers = [turning if width else still for width in windows]
    return model(config, common, layers, tied=True, logit_scale=factor(config, "logit_scale", 0.0625), **window)


def ernie4_5(config: ConfigValues) -> ModelSpec:
    """ERNIE 4.5 without experts: Llama's layers, rotated in fp32.

    Source: ``transformers/models/ernie4_5/modeling_ernie4_5.py``.
    """
    common, bias = shape(config, key_value_heads=2, head_dim=128), config.flag("use_bias")
    heads = attention(config, common, qkv_bias=bias, output_bias=bias)
    layer = Layer(heads, gated_mlp(config, bias=bias), rms_norm(config, 1e-5))
    return model(config, common, layer, tied=True)


def glm(config: ConfigValues) -> ModelSpec:
    """GLM-4 of 2024: Llama's layers with one matrix for both projections up, and half of a head rotated.

    Source: ``transformers/models/glm/modeling_glm.py``; https://arxiv.org/abs/2406.12793.
    """
    return _glm(config, "pre", TensorNames())


def _glm(config: ConfigValues, placement: Placement, names: TensorNames) -> ModelSpec:
    """Return the shapes of a config of GLM's first or second kind, which differ in their norms."""
    common = shape(config, key_value_heads=2, head_dim=128)
    rotated = rotary_dim(config, common.head_dim, default=0.5)
    heads = attention(config, common, rotated, qkv_bias=config.flag("attention_bias", default=True))
    mlp = Mlp(config.integer("intermediate_size"), config.activation("hidden_act"), fused_gate_up=True)
    return model(config, common, Layer(heads, mlp, rms_norm(config, 1.5625e-7), placement=placement), names=names)


def glm4(config: ConfigValues) -> ModelSpec:
    """GLM-4 of 2025, without experts: GLM's layers with norms on both sides of each part.

    Source: ``transformers/models/glm4/modeling_glm4.py``.
    """
    names = TensorNames(
        post_attention_norm="post_self_attn_layernorm",
        pre_feed_forward_norm="post_attention_layernorm",
        post_feed_forward_norm="post_mlp_layernorm",
    )
    return _glm(config, "sandwich", names)
