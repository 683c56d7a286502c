"""Qwen3-VL: Qwen3's layers behind a tower with learned positions, a merger of patches, and more mergers for early layers.

Source: ``transformers/models/qwen3_vl/modeling_qwen3_vl.py``; https://arxiv.org/abs/2511.21631.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memplan.model.families.llama_like import qwen3
from memplan.model.families.vision_towers import TowerParts, text_inside, with_tower
from memplan.model.tower import TowerShape

if TYPE_CHECKING:
    from memplan.model.families.config_values import ConfigValues
    from memplan.model.spec import ModelSpec

BLOCK = "model.visual.blocks.{}"
MERGERS = ("model.visual.merger", "model.visual.deepstack_merger_list")
DEEPSTACK = (8, 16, 24)
"""Blocks whose output goes to early layers where a config names none (configuration_qwen3_vl.py, 5.23.0)."""


def model_spec(config: ConfigValues) -> ModelSpec:
    """Return the shapes of a Qwen3-VL config."""
    vision = config.part("vision_config", "qwen3_vl_vision")
    parts = tower(vision)
    early = vision.integers("deepstack_visual_indexes")
    deep = DEEPSTACK if early is None else tuple(early)
    merged = vision.integer("spatial_merge_size", default=2)
    add_merger(vision, parts, "deepstack_merger_list.{}", parts.hidden * merged**2, len(deep))
    shape = TowerShape(
        hidden_size=parts.hidden,
        intermediate_size=parts.inner,
        blocks=parts.blocks,
        heads=parts.heads,
        patch_size=parts.patch,
        patch_values=parts.channels * vision.integer("temporal_patch_size", default=2) * parts.patch**2,
        merge=merged,
        window=1,
        full_blocks=(),
        output_size=vision.integer("out_hidden_size", default=3584),
        kind="stacked",
        deep_blocks=deep,
    )
    config.take(vision)
    return with_tower(config, text_inside(config, "qwen3", qwen3.model_spec), parts, MERGERS, shape)


def tower(vision: ConfigValues) -> TowerParts:
    """Return a tower of Qwen3-VL's blocks, and the merger behind it."""
    parts = TowerParts(vision, (1152, 4304, 27, 16, 16))
    hidden, inner, blocks = parts.hidden, parts.inner, parts.blocks
    frames = vision.integer("temporal_patch_size", default=2)
    patch = (parts.channels, frames, parts.patch, parts.patch)
    parts.add("model.visual.patch_embed.proj", hidden, *patch, bias=True, role="embedding")
    positions = vision.integer("num_position_embeddings", default=2304)
    parts.add("model.visual.pos_embed", positions, hidden, role="embedding")
    parts.add(f"{BLOCK}.norm1", hidden, bias=True, role="norm", count=blocks)
    parts.add(f"{BLOCK}.norm2", hidden, bias=True, role="norm", count=blocks)
    parts.add(f"{BLOCK}.attn.qkv", 3 * hidden, hidden, bias=True, count=blocks)
    parts.add(f"{BLOCK}.attn.proj", hidden, hidden, bias=True, count=blocks)
    parts.add(f"{BLOCK}.mlp.linear_fc1", inner, hidden, bias=True, count=blocks)
    parts.add(f"{BLOCK}.mlp.linear_fc2", hidden, inner, bias=True, count=blocks)
    add_merger(vision, parts, "merger", hidden)
    return parts


def add_merger(vision: ConfigValues, parts: TowerParts, name: str, normed: int, count: int = 1) -> None:
    """Add what merges patches, in one place or in ``count``; ``normed`` is the width of its norm."""
    width = parts.hidden * vision.integer("spatial_merge_size", default=2) ** 2
    output = vision.integer("out_hidden_size", default=3584)
    if count:
        parts.add(f"model.visual.{name}.norm", normed, bias=True, role="norm", count=count)
        parts.add(f"model.visual.{name}.linear_fc1", width, width, bias=True, count=count)
        parts.add(f"model.visual.{name}.linear_fc2", output, width, bias=True, count=count)
