"""Qwen3.5 and 3.6 with experts: its text model behind Qwen3-VL's tower, without mergers for early layers.

Source: ``transformers/models/qwen3_5_moe/modeling_qwen3_5_moe.py`` (v5.23.0), ``Qwen3_5VisionModel``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memplan.model.families.linear_attention import qwen3_5_moe_text
from memplan.model.families.vision.qwen3_5 import behind_tower

if TYPE_CHECKING:
    from memplan.model.families.config_values import ConfigValues
    from memplan.model.spec import ModelSpec


def model_spec(config: ConfigValues) -> ModelSpec:
    """Return the shapes of a config of Qwen3.5 and 3.6 with experts."""
    return behind_tower(config, qwen3_5_moe_text.model_spec)
