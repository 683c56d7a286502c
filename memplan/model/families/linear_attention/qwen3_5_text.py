"""Qwen3.5 and 3.6, dense, text: Qwen3-Next's layers with a projection each for query, key and value, gate, decay and correction.

Source: ``transformers/models/qwen3_5/modeling_qwen3_5.py`` and its configuration (v5.23.0).
"""

from __future__ import annotations

from memplan.model.families.common_parts import gated_mlp, shape
from memplan.model.families.config_values import ConfigValues
from memplan.model.families.linear_attention.qwen3_next import hybrid
from memplan.model.spec import ModelSpec


def model_spec(config: ConfigValues) -> ModelSpec:
    """Return the shapes of a Qwen3.5 text config."""
    common = shape(config, heads=16, key_value_heads=4, head_dim=256, vocab_size=248_320)
    return hybrid(config, common, [gated_mlp(config)] * common.num_hidden_layers, joined=False)
