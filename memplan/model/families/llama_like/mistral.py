"""Mistral: Llama's layers with grouped queries and, in the first release, a sliding window.

Source: ``transformers/models/mistral/modeling_mistral.py``; https://arxiv.org/abs/2310.06825.
"""

from __future__ import annotations

from memplan.model.families.common_parts import attention, gated_mlp, model, rms_norm, shape, sliding_window
from memplan.model.families.config_values import ConfigValues
from memplan.model.spec import Layer, ModelSpec


def model_spec(config: ConfigValues) -> ModelSpec:
    """Return the shapes of a Mistral config."""
    common = shape(config, key_value_heads=8)
    window = sliding_window(config, common.num_hidden_layers)
    layer = Layer(attention(config, common), gated_mlp(config), rms_norm(config))
    return model(config, common, layer, **window)
