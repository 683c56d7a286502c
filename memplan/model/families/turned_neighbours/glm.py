"""GLM-4 of 2024: Llama's layers with one matrix for both projections up, and half of a head rotated.

Source: ``transformers/models/glm/modeling_glm.py``; https://arxiv.org/abs/2406.12793.
"""

from __future__ import annotations

from memplan.model.families.common_parts import attention, model, rms_norm, rotary_dim, shape
from memplan.model.families.config_values import ConfigValues
from memplan.model.spec import Layer, Mlp, ModelSpec, Placement, TensorNames


def model_spec(config: ConfigValues) -> ModelSpec:
    """Return the shapes of a GLM config."""
    return glm(config, "pre", TensorNames())


def glm(config: ConfigValues, placement: Placement, names: TensorNames) -> ModelSpec:
    """Return the shapes of a config of GLM's first or second kind, which differ in their norms."""
    common = shape(config, key_value_heads=2, head_dim=128)
    rotated = rotary_dim(config, common.head_dim, default=0.5)
    heads = attention(config, common, rotated, qkv_bias=config.flag("attention_bias", default=True))
    mlp = Mlp(config.integer("intermediate_size"), config.activation("hidden_act"), fused_gate_up=True)
    return model(config, common, Layer(heads, mlp, rms_norm(config, 1.5625e-7), placement=placement), names=names)
