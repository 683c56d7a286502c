"""Qwen3.5 and 3.6, dense: its text model behind Qwen3-VL's tower, without mergers for early layers.

Source: ``transformers/models/qwen3_5/modeling_qwen3_5.py`` (v5.23.0), ``Qwen3_5VisionModel``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memplan.model.families.linear_attention import qwen3_5_text
from memplan.model.families.vision.qwen3_vl import MERGERS, tower
from memplan.model.families.vision_towers import text_inside, with_tower

if TYPE_CHECKING:
    from collections.abc import Callable

    from memplan.model.families.config_values import ConfigValues
    from memplan.model.spec import ModelSpec


def model_spec(config: ConfigValues) -> ModelSpec:
    """Return the shapes of a config of Qwen3.5 and 3.6, dense."""
    return behind_tower(config, qwen3_5_text.model_spec)


def behind_tower(config: ConfigValues, text: Callable[[ConfigValues], ModelSpec]) -> ModelSpec:
    """Return the shapes of a config whose text part ``text`` reads."""
    vision = config.part("vision_config", f"{config.family}_vision")
    parts = tower(vision)
    vision.only("deepstack_visual_indexes", [])
    config.take(vision)
    return with_tower(config, text_inside(config, f"{config.family}_text", text), parts, MERGERS[:1])
