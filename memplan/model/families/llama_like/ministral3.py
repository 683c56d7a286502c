"""Ministral 3: Mistral's layers, whose queries are scaled by their position after they are rotated.

Source: ``transformers/models/ministral3/modeling_ministral3.py``.
"""

from __future__ import annotations

from memplan.model.families.common_parts import attention, gated_mlp, model, rms_norm, shape, sliding_window
from memplan.model.families.config_values import ConfigValues
from memplan.model.spec import Layer, ModelSpec


def model_spec(config: ConfigValues) -> ModelSpec:
    """Return the shapes of a Ministral 3 config."""
    common = shape(config, key_value_heads=8, head_dim=128)
    window = sliding_window(config, common.num_hidden_layers)
    layer = Layer(attention(config, common, scales_query=True), gated_mlp(config), rms_norm(config, 1e-5))
    return model(config, common, layer, **window)
