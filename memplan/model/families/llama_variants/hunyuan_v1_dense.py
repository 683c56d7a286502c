"""Hunyuan without experts: Llama's layers, whose queries and keys are normalised after they are rotated.

Source: ``transformers/models/hunyuan_v1_dense/modeling_hunyuan_v1_dense.py``.
"""

from __future__ import annotations

from memplan.model.families.common_parts import attention, gated_mlp, model, rms_norm, shape
from memplan.model.families.config_values import ConfigValues
from memplan.model.spec import Layer, ModelSpec, TensorNames


def model_spec(config: ConfigValues) -> ModelSpec:
    """Return the shapes of a Hunyuan config."""
    common = shape(config)
    bias, norm = config.flag("attention_bias"), rms_norm(config, 1e-5)
    config.only("use_qk_norm", True)
    config.only("use_cla", False)
    config.only("mlp_bias", False)
    config.only("num_experts", 1)
    config.ignore("attention_head_dim", "eod_token_id")
    heads = attention(config, common, qkv_bias=bias, output_bias=bias, query_key_norm=norm, norms_rotated=True)
    names = TensorNames(query_norm="query_layernorm", key_norm="key_layernorm")
    return model(config, common, Layer(heads, gated_mlp(config), norm), names=names)
