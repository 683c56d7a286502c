"""EXAONE 4: a norm after each part, as in OLMo 2, normalised heads, and positions in windowed layers alone where there are any.

Source: ``transformers/models/exaone4/modeling_exaone4.py``; https://arxiv.org/abs/2507.11407.
"""

from __future__ import annotations

from dataclasses import replace

from memplan.model.families.common_parts import attention, gated_mlp, model, rms_norm, shape, sliding_window
from memplan.model.families.config_values import ConfigValues
from memplan.model.families.layer_windows import layer_windows
from memplan.model.spec import Layer, ModelSpec


def model_spec(config: ConfigValues) -> ModelSpec:
    """Return the shapes of an EXAONE 4 config."""
    common = shape(config)
    norm, window = rms_norm(config, 1e-5), sliding_window(config, common.num_hidden_layers)
    heads = attention(config, common, query_key_norm=norm)
    turning = Layer(heads, gated_mlp(config), norm, placement="post")
    still = replace(turning, attention=replace(heads, rotary_dim=0)) if window else turning
    windows = layer_windows(config.keys, common.num_hidden_layers)
    return model(config, common, [turning if width else still for width in windows], **window)
