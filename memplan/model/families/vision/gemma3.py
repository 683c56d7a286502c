"""Gemma 3 with images: its text model behind a SigLIP tower, whose features are pooled and projected by one matrix.

Source: ``transformers/models/gemma3/modeling_gemma3.py``, ``transformers/models/siglip/modeling_siglip.py``;
https://arxiv.org/abs/2503.19786.
"""

from __future__ import annotations

from math import isqrt
from typing import TYPE_CHECKING

from memplan.model.families.gemma_like import gemma3_text
from memplan.model.families.vision_towers import TowerParts, text_inside, with_tower
from memplan.model.tower import TowerShape, TowerTensor

if TYPE_CHECKING:
    from memplan.model.families.config_values import ConfigValues
    from memplan.model.spec import ModelSpec

LAYER = "model.vision_tower.encoder.layers.{}"
PROJECTOR = "model.multi_modal_projector"


def model_spec(config: ConfigValues) -> ModelSpec:
    """Return the shapes of a Gemma 3 config."""
    vision = config.part("vision_config", "siglip_vision_model")
    parts = TowerParts(vision, (768, 3072, 12, 12, 16))
    hidden, inner, blocks = parts.hidden, parts.inner, parts.blocks
    embeddings = "model.vision_tower.embeddings"
    parts.add(
        f"{embeddings}.patch_embedding", hidden, parts.channels, parts.patch, parts.patch, bias=True, role="embedding"
    )
    size = vision.integer("image_size", default=224)
    side = max(size // parts.patch, 1)
    parts.add(f"{embeddings}.position_embedding", side**2, hidden, role="embedding")
    parts.add(f"{LAYER}.layer_norm1", hidden, bias=True, role="norm", count=blocks)
    for name in ("k_proj", "v_proj", "q_proj", "out_proj"):
        parts.add(f"{LAYER}.self_attn.{name}", hidden, hidden, bias=True, count=blocks)
    parts.add(f"{LAYER}.layer_norm2", hidden, bias=True, role="norm", count=blocks)
    parts.add(f"{LAYER}.mlp.fc1", inner, hidden, bias=True, count=blocks)
    parts.add(f"{LAYER}.mlp.fc2", hidden, inner, bias=True, count=blocks)
    parts.add("model.vision_tower.post_layernorm", hidden, bias=True, role="norm")
    if vision.flag("vision_use_head", default=True):
        vision.refuse("vision_use_head", "a head that pools patches is not modelled: Gemma 3 is released with false")
    config.take(vision)
    tokens = isqrt(config.integer("mm_tokens_per_image", default=256))
    text = text_inside(config, "gemma3_text", gemma3_text.model_spec)
    matrix = TowerTensor(f"{PROJECTOR}.mm_input_projection_weight", (hidden, text.hidden_size), "embedding")
    parts.tensors += [matrix, TowerTensor(f"{PROJECTOR}.mm_soft_emb_norm.weight", (hidden,), "norm")]
    shape = TowerShape(
        hidden_size=hidden,
        intermediate_size=inner,
        blocks=blocks,
        heads=parts.heads,
        patch_size=parts.patch,
        patch_values=parts.channels * parts.patch**2,
        merge=max(1, side // tokens),
        window=side,
        full_blocks=tuple(range(blocks)),
        output_size=text.hidden_size,
        kind="pooled",
        image_size=size,
    )
    return with_tower(config, text, parts, (PROJECTOR,), shape if tokens <= side else None)
