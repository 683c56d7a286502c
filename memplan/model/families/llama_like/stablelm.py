"""StableLM 2 and StableLM-3B-4E1T: Llama's layers with LayerNorm and partly rotated heads.

A norm with weights for each head apart (StableLM-2-12B) is refused.

Source: ``transformers/models/stablelm/modeling_stablelm.py``; https://arxiv.org/abs/2402.17834.
"""

from __future__ import annotations

from memplan.model.families.common_parts import attention, gated_mlp, layer_norm, model, rotary_dim, shape
from memplan.model.families.config_values import ConfigValues
from memplan.model.spec import Layer, ModelSpec, Placement


def model_spec(config: ConfigValues) -> ModelSpec:
    """Return the shapes of a StableLM config."""
    common = shape(config)
    rotated = rotary_dim(config, common.head_dim, default=0.25)
    heads = attention(config, common, rotated, qkv_bias=config.flag("use_qkv_bias"))
    placement: Placement = "parallel" if config.flag("use_parallel_residual") else "pre"
    layer = Layer(heads, gated_mlp(config), layer_norm(config), placement=placement)
    return model(config, common, layer, dropout=("attention_dropout", "hidden_dropout"))
