"""Qwen2.5-VL: Qwen2's layers behind a tower with gated feed-forward parts, windows of attention and a merger of patches.

Source: ``transformers/models/qwen2_5_vl/modeling_qwen2_5_vl.py``; https://arxiv.org/abs/2502.13923.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memplan.model.families.llama_like import qwen2
from memplan.model.families.vision_towers import TowerParts, text_inside, with_tower
from memplan.model.tower import TowerShape

if TYPE_CHECKING:
    from memplan.model.families.config_values import ConfigValues
    from memplan.model.spec import ModelSpec

BLOCK = "model.visual.blocks.{}"
FULL_BLOCKS = (7, 15, 23, 31)
"""Blocks whose attention is over the whole image where a config names none (configuration_qwen2_5_vl.py, 5.23.0)."""


def model_spec(config: ConfigValues) -> ModelSpec:
    """Return the shapes of a Qwen2.5-VL config, whose text model's keys may be nested or its own."""
    vision = config.part("vision_config", "qwen2_5_vl_vision")
    parts = TowerParts(vision, (3584, 3420, 32, 16, 14))
    hidden, inner, blocks = parts.hidden, parts.inner, parts.blocks
    frames, merged = vision.integer("temporal_patch_size", default=2), vision.integer("spatial_merge_size", default=2)
    width = hidden * merged**2
    parts.add(
        "model.visual.patch_embed.proj", hidden, parts.channels, frames, parts.patch, parts.patch, role="embedding"
    )
    parts.add(f"{BLOCK}.norm1", hidden, role="norm", count=blocks)
    parts.add(f"{BLOCK}.norm2", hidden, role="norm", count=blocks)
    parts.add(f"{BLOCK}.attn.qkv", 3 * hidden, hidden, bias=True, count=blocks)
    parts.add(f"{BLOCK}.attn.proj", hidden, hidden, bias=True, count=blocks)
    parts.add(f"{BLOCK}.mlp.gate_proj", inner, hidden, bias=True, count=blocks)
    parts.add(f"{BLOCK}.mlp.up_proj", inner, hidden, bias=True, count=blocks)
    parts.add(f"{BLOCK}.mlp.down_proj", hidden, inner, bias=True, count=blocks)
    parts.add("model.visual.merger.ln_q", hidden, role="norm")
    parts.add("model.visual.merger.mlp.0", width, width, bias=True)
    parts.add("model.visual.merger.mlp.2", vision.integer("out_hidden_size", default=3584), width, bias=True)
    full = vision.integers("fullatt_block_indexes")
    shape = TowerShape(
        hidden_size=hidden,
        intermediate_size=inner,
        blocks=blocks,
        heads=parts.heads,
        patch_size=parts.patch,
        patch_values=parts.channels * frames * parts.patch**2,
        merge=merged,
        window=max(1, vision.integer("window_size", default=112) // merged // parts.patch),
        full_blocks=FULL_BLOCKS if full is None else tuple(full),
        output_size=vision.integer("out_hidden_size", default=3584),
    )
    config.take(vision)
    text = text_inside(config, "qwen2", qwen2.model_spec)
    return with_tower(config, text, parts, ("model.visual.merger",), shape)
