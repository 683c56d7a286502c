"""SmolLM3: Llama's layers, of which every fourth rotates nothing.

Source: ``transformers/models/smollm3/modeling_smollm3.py``.
"""

from __future__ import annotations

from memplan.model.families.common_parts import attention, gated_mlp, model, rms_norm, shape, sliding_window
from memplan.model.families.config_values import MAXIMUM_LAYERS, ConfigValues
from memplan.model.spec import Layer, ModelSpec


def model_spec(config: ConfigValues) -> ModelSpec:
    """Return the shapes of a SmolLM3 config."""
    common = shape(config, key_value_heads=4)
    bias = config.flag("attention_bias")
    mlp = gated_mlp(config, bias=config.flag("mlp_bias"))
    window = sliding_window(config, common.num_hidden_layers)
    rotated = Layer(attention(config, common, qkv_bias=bias, output_bias=bias), mlp, rms_norm(config))
    plain = Layer(attention(config, common, 0, qkv_bias=bias, output_bias=bias), mlp, rms_norm(config))
    layers = [rotated if rotates else plain for rotates in _rotating(config, common.num_hidden_layers)]
    return model(config, common, layers, tied=True, **window)


def _rotating(config: ConfigValues, count: int) -> list[bool]:
    """Return for each layer whether it rotates; ``no_rope_layers`` holds 1 where it does."""
    interval = config.integer("no_rope_layer_interval", default=4, maximum=MAXIMUM_LAYERS)
    listed = config.integers("no_rope_layers", length=count)
    if listed is None:
        return [(index + 1) % interval != 0 for index in range(count)]
    return [bool(value) for value in listed[:count]]
