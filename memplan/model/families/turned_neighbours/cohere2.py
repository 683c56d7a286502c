"""Command R7B and Command A: Command R's layers, of which those within a window rotate and the others do not.

Source: ``transformers/models/cohere2/modeling_cohere2.py``.
"""

from __future__ import annotations

from dataclasses import replace

from memplan.model.families.common_parts import attention, factor, gated_mlp, model, shape, sliding_window
from memplan.model.families.config_values import ConfigValues
from memplan.model.families.layer_windows import layer_windows
from memplan.model.families.turned_neighbours.cohere import cohere_norm
from memplan.model.spec import Layer, ModelSpec


def model_spec(config: ConfigValues) -> ModelSpec:
    """Return the shapes of a Command R7B config."""
    common = shape(config)
    window, bias = sliding_window(config, common.num_hidden_layers), config.flag("attention_bias")
    config.only("use_qk_norm", False)
    config.only("use_parallel_block", True)
    config.only("use_gated_activation", True)
    heads = attention(config, common, qkv_bias=bias, output_bias=bias)
    turning = Layer(heads, gated_mlp(config), cohere_norm(config), placement="parallel")
    still = replace(turning, attention=replace(heads, rotary_dim=0))
    windows = layer_windows(config.keys, common.num_hidden_layers)
    layers = [turning if width else still for width in windows]
    return model(config, common, layers, tied=True, logit_scale=factor(config, "logit_scale", 0.0625), **window)
