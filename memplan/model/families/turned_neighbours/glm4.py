"""GLM-4 of 2025, without experts: GLM's layers with norms on both sides of each part.

Source: ``transformers/models/glm4/modeling_glm4.py``.
"""

from __future__ import annotations

from memplan.model.families.config_values import ConfigValues
from memplan.model.families.turned_neighbours.glm import glm
from memplan.model.spec import ModelSpec, TensorNames


def model_spec(config: ConfigValues) -> ModelSpec:
    """Return the shapes of a GLM-4 config."""
    names = TensorNames(
        post_attention_norm="post_self_attn_layernorm",
        pre_feed_forward_norm="post_attention_layernorm",
        post_feed_forward_norm="post_mlp_layernorm",
    )
    return glm(config, "sandwich", names)
