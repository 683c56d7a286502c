"""Mistral Small 3.1 on, Magistral, Ministral 3: Mistral's layers behind a Pixtral tower and a projector that merges patches.

Source: ``transformers/models/mistral3/modeling_mistral3.py``, ``transformers/models/pixtral/modeling_pixtral.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memplan.model.families.llama_like import ministral3, mistral
from memplan.model.families.vision_towers import TowerParts, text_inside, with_tower

if TYPE_CHECKING:
    from memplan.model.families.config_values import ConfigValues
    from memplan.model.spec import ModelSpec

LAYER = "model.vision_tower.transformer.layers.{}"
PROJECTOR = "model.multi_modal_projector"
TEXT = {"mistral": mistral.model_spec, "ministral3": ministral3.model_spec}


def model_spec(config: ConfigValues) -> ModelSpec:
    """Return the shapes of a Mistral 3 config."""
    text = _text(config)
    vision = config.part("vision_config", "pixtral")
    parts = TowerParts(vision, (1024, 4096, 24, 16, 16))
    hidden, inner, blocks = parts.hidden, parts.inner, parts.blocks
    parts.add("model.vision_tower.patch_conv", hidden, parts.channels, parts.patch, parts.patch, role="embedding")
    parts.add("model.vision_tower.ln_pre", hidden, role="norm")
    parts.add(f"{LAYER}.attention_norm", hidden, role="norm", count=blocks)
    for name, rows, columns in (("gate_proj", inner, hidden), ("up_proj", inner, hidden), ("down_proj", hidden, inner)):
        parts.add(f"{LAYER}.feed_forward.{name}", rows, columns, count=blocks)
    for name in ("k_proj", "v_proj", "q_proj", "o_proj"):
        parts.add(f"{LAYER}.attention.{name}", hidden, hidden, count=blocks)
    parts.add(f"{LAYER}.ffn_norm", hidden, role="norm", count=blocks)
    vision.ignore("head_dim", "image_size")
    config.take(vision)
    _project(config, parts, text.hidden_size)
    return with_tower(config, text, parts, (PROJECTOR,))


def _text(config: ConfigValues) -> ModelSpec:
    """Return the text model, whose family its part of the config names."""
    family = config.mapping("text_config").get("model_type", "mistral")
    if family not in tuple(TEXT):
        config.refuse("text_config", f"a text model of family {family!r:.40} is not modelled; {', '.join(TEXT)} are")
        family = "mistral"
    return text_inside(config, family, TEXT[family])


def _project(config: ConfigValues, parts: TowerParts, width: int) -> None:
    """Add the projector: a norm, a merger of patches, and two layers."""
    hidden, bias = parts.hidden, config.flag("multimodal_projector_bias")
    parts.add(f"{PROJECTOR}.norm", hidden, role="norm")
    merged = hidden * config.integer("spatial_merge_size", default=2) ** 2
    parts.add(f"{PROJECTOR}.patch_merger.merging_layer", hidden, merged)
    parts.add(f"{PROJECTOR}.linear_1", width, hidden, bias=bias)
    parts.add(f"{PROJECTOR}.linear_2", width, width, bias=bias)
    config.only("vision_feature_layer", -1)
    config.ignore("projector_hidden_act")
