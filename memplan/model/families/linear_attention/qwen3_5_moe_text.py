"""Qwen3.5 and 3.6 with experts, text: Qwen3.5's layers with routed experts beside a shared one in each.

Source: ``transformers/models/qwen3_5_moe/modeling_qwen3_5_moe.py`` and its configuration (v5.23.0).
"""

from __future__ import annotations

from memplan.model.families.common_parts import experts, shape
from memplan.model.families.config_values import ConfigValues
from memplan.model.families.linear_attention.qwen3_next import hybrid, mixture
from memplan.model.spec import ModelSpec


def model_spec(config: ConfigValues) -> ModelSpec:
    """Return the shapes of a Qwen3.5 text config with experts."""
    common = shape(config, heads=16, key_value_heads=2, head_dim=256, vocab_size=248_320)
    config.only("norm_topk_prob", True)
    config.only("decoder_sparse_step", 1)
    config.integers("mlp_only_layers")  # released, and read by nothing in transformers; so is the next
    config.integer("intermediate_size", default=1)
    part = experts(config, mixture(config, 256, 8, normalised=True))
    return hybrid(config, common, [part] * common.num_hidden_layers, joined=False)
