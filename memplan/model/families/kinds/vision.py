"""Vision-language models: a vision tower, a projector, and a text model of another family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import isqrt

from memplan.model.families.config_values import ConfigValues
from memplan.model.families.kinds.gemma_like import gemma3_text
from memplan.model.families.kinds.linear_attention import qwen3_5_moe_text, qwen3_5_text
from memplan.model.families.kinds.llama_like import ministral3, mistral, qwen2, qwen3
from memplan.model.families.kinds.mixtures import qwen3_moe
from memplan.model.families.latent_mixtures import grouped, latent_mixture
from memplan.model.families.vision_towers import TowerParts, text_inside, with_tower
from memplan.model.spec import MixtureOfExperts, ModelSpec
from memplan.model.tower import TowerTensor

SIGLIP_LAYER = "model.vision_tower.encoder.layers.{}"
PROJECTOR = "model.multi_modal_projector"


def gemma3(config: ConfigValues) -> ModelSpec:
    """Gemma 3 with images: its text model behind a SigLIP tower, whose features are pooled and projected by one matrix.

    Source: ``transformers/models/gemma3/modeling_gemma3.py``, ``transformers/models/siglip/modeling_siglip.py``;
    https://arxiv.org/abs/2503.19786.
    """
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
    parts.add(f"{SIGLIP_LAYER}.layer_norm1", hidden, bias=True, role="norm", count=blocks)
    for name in ("k_proj", "v_proj", "q_proj", "out_proj"):
        parts.add(f"{SIGLIP_LAYER}.self_attn.{name}", hidden, hidden, bias=True, count=blocks)
    parts.add(f"{SIGLIP_LAYER}.layer_norm2", hidden, bias=True, role="norm", count=blocks)
    parts.add(f"{SIGLIP_LAYER}.mlp.fc1", inner, hidden, bias=True, count=blocks)
    parts.add(f"{SIGLIP_LAYER}.mlp.fc2", hidden, inner, bias=True, count=blocks)
    parts.add("model.vision_tower.post_layernorm", hidden, bias=True, role="norm")
    if vision.flag("vision_use_head", default=True):
        vision.refuse("vision_use_head", "a head that pools patches is not modelled: Gemma 3 is released with false")
    config.take(vision)
    tokens = isqrt(config.integer("mm_tokens_per_image", default=256))
    text = text_inside(config, "gemma3_text", gemma3_text)
    matrix = TowerTensor(f"{PROJECTOR}.mm_input_projection_weight", (hidden, text.hidden_size), "embedding")
    parts.tensors += [matrix, TowerTensor(f"{PROJECTOR}.mm_soft_emb_norm.weight", (hidden,), "norm")]
    shape = parts.shape(
        merge=max(1, side // tokens),
        window=side,
        full_blocks=tuple(range(blocks)),
        output_size=text.hidden_size,
        kind="pooled",
        image_size=size,
    )
    return with_tower(config, text, parts, (PROJECTOR,), shape if tokens <= side else None)


PIXTRAL_LAYER = "model.vision_tower.transformer.layers.{}"


def _mistral4(config: ConfigValues) -> ModelSpec:
    """Mistral Small 4, text: DeepSeek-V3's latent attention, whose queries are scaled by their position, and experts beside a shared one.

    Source: ``transformers/models/mistral4/modeling_mistral4.py`` (v5.23.0).
    """
    inner = config.integer("moe_intermediate_size", default=2048)
    mixture = MixtureOfExperts(
        num_experts=config.integer("n_routed_experts", "num_local_experts", "num_experts", default=128),
        experts_per_token=config.integer("num_experts_per_tok", default=4),
        intermediate_size=inner,
        activation=config.activation("hidden_act"),
        shared_intermediate_size=inner * config.integer("n_shared_experts", default=1),
        scores_as_routed=True,
        normalised=config.flag("norm_topk_prob", default=True),
    )
    sizes = {"q_lora_rank": 1024, "kv_lora_rank": 256, "qk_nope_head_dim": 64}
    return latent_mixture(config, grouped(config, mixture), dense=0, scale=1.0, scales_query=True, **sizes)


PIXTRAL_TEXTS = {"mistral": mistral, "ministral3": ministral3, "mistral4": _mistral4}


def mistral3(config: ConfigValues) -> ModelSpec:
    """Mistral Small 3.1 on, Magistral, Ministral 3, Mistral Small 4: Mistral's layers behind a Pixtral tower and a projector that merges patches.

    Source: ``transformers/models/mistral3/modeling_mistral3.py``, ``transformers/models/pixtral/modeling_pixtral.py``.
    """
    text = _pixtral_text(config)
    vision = config.part("vision_config", "pixtral")
    parts = TowerParts(vision, (1024, 4096, 24, 16, 16))
    hidden, inner, blocks = parts.hidden, parts.inner, parts.blocks
    parts.add("model.vision_tower.patch_conv", hidden, parts.channels, parts.patch, parts.patch, role="embedding")
    parts.add("model.vision_tower.ln_pre", hidden, role="norm")
    parts.add(f"{PIXTRAL_LAYER}.attention_norm", hidden, role="norm", count=blocks)
    for name, rows, columns in (("gate_proj", inner, hidden), ("up_proj", inner, hidden), ("down_proj", hidden, inner)):
        parts.add(f"{PIXTRAL_LAYER}.feed_forward.{name}", rows, columns, count=blocks)
    for name in ("k_proj", "v_proj", "q_proj", "o_proj"):
        parts.add(f"{PIXTRAL_LAYER}.attention.{name}", hidden, hidden, count=blocks)
    parts.add(f"{PIXTRAL_LAYER}.ffn_norm", hidden, role="norm", count=blocks)
    vision.ignore("head_dim", "image_size")
    config.take(vision)
    _add_projector(config, parts, text.hidden_size)
    return with_tower(config, text, parts, (PROJECTOR,))


def _pixtral_text(config: ConfigValues) -> ModelSpec:
    """Return the text model, whose family its part of the config names."""
    family = config.mapping("text_config").get("model_type", "mistral")
    if family not in tuple(PIXTRAL_TEXTS):
        config.refuse(
            "text_config", f"a text model of family {family!r:.40} is not modelled; {', '.join(PIXTRAL_TEXTS)} are"
        )
        family = "mistral"
    return text_inside(config, family, PIXTRAL_TEXTS[family])


def _add_projector(config: ConfigValues, parts: TowerParts, width: int) -> None:
    """Add the projector: a norm, a merger of patches, and two layers."""
    hidden, bias = parts.hidden, config.flag("multimodal_projector_bias")
    parts.add(f"{PROJECTOR}.norm", hidden, role="norm")
    merged = hidden * config.integer("spatial_merge_size", default=2) ** 2
    parts.add(f"{PROJECTOR}.patch_merger.merging_layer", hidden, merged)
    parts.add(f"{PROJECTOR}.linear_1", width, hidden, bias=bias)
    parts.add(f"{PROJECTOR}.linear_2", width, width, bias=bias)
    config.only("vision_feature_layer", -1)
    config.ignore("projector_hidden_act")


BLOCK = "model.visual.blocks.{}"
FULL_BLOCKS = (7, 15, 23, 31)
"""Blocks whose attention is over the whole image where a config names none (configuration_qwen2_5_vl.py, 5.23.0)."""


def qwen2_5_vl(config: ConfigValues) -> ModelSpec:
    """Qwen2.5-VL: Qwen2's layers behind a tower with gated feed-forward parts, windows of attention and a merger of patches.

    Source: ``transformers/models/qwen2_5_vl/modeling_qwen2_5_vl.py``; https://arxiv.org/abs/2502.13923.
    """
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
    shape = parts.shape(
        frames=frames,
        merge=merged,
        window=max(1, vision.integer("window_size", default=112) // merged // parts.patch),
        full_blocks=FULL_BLOCKS if full is None else tuple(full),
        output_size=vision.integer("out_hidden_size", default=3584),
    )
    config.take(vision)
    text = text_inside(config, "qwen2", qwen2)
    return with_tower(config, text, parts, ("model.visual.merger",), shape)


MERGERS = ("model.visual.merger", "model.visual.deepstack_merger_list")
DEEPSTACK = (8, 16, 24)
"""Blocks whose output goes to early layers where a config names none (configuration_qwen3_vl.py, 5.23.0)."""


def qwen3_vl(config: ConfigValues) -> ModelSpec:
    """Qwen3-VL: Qwen3's layers behind a tower with learned positions, a merger of patches, and more mergers for early layers.

    Source: ``transformers/models/qwen3_vl/modeling_qwen3_vl.py``; https://arxiv.org/abs/2511.21631.
    """
    return _behind_deep_tower(config, "qwen3", qwen3)


def qwen3_vl_moe(config: ConfigValues) -> ModelSpec:
    """Qwen3-VL with experts: Qwen3-MoE's layers, whose chosen scores always add up to one, behind Qwen3-VL's tower.

    Source: ``transformers/models/qwen3_vl_moe/modeling_qwen3_vl_moe.py`` (v5.23.0).
    """
    return _behind_deep_tower(config, "qwen3_moe", _normalised_qwen3_moe)


def _normalised_qwen3_moe(text: ConfigValues) -> ModelSpec:
    """Return the shapes of Qwen3-MoE, of which this text model has no window and no choice of unnormalised scores."""
    text.only("norm_topk_prob", True)
    text.only("use_sliding_window", False)
    spec = qwen3_moe(text)
    parts = [(run, run.layer.feed_forward) for run in spec.runs]
    layers = [
        replace(run, layer=replace(run.layer, feed_forward=replace(part, normalised=True)))
        if isinstance(part, MixtureOfExperts)
        else run
        for run, part in parts
    ]
    return replace(spec, runs=tuple(layers))


def _behind_deep_tower(config: ConfigValues, family: str, text: Callable[[ConfigValues], ModelSpec]) -> ModelSpec:
    """Return the shapes of a config whose text part ``text`` reads, behind a tower that hands patches to early layers too."""
    vision = config.part("vision_config", f"{config.family}_vision")
    parts = _tower(vision)
    early = vision.integers("deepstack_visual_indexes")
    deep = DEEPSTACK if early is None else tuple(early)
    merged = vision.integer("spatial_merge_size", default=2)
    _add_merger(vision, parts, "deepstack_merger_list.{}", parts.hidden * merged**2, len(deep))
    shape = parts.shape(
        frames=vision.integer("temporal_patch_size", default=2),
        merge=merged,
        window=1,
        full_blocks=(),
        output_size=vision.integer("out_hidden_size", default=3584),
        kind="stacked",
        deep_blocks=deep,
    )
    config.take(vision)
    return with_tower(config, text_inside(config, family, text), parts, MERGERS, shape)


def _tower(vision: ConfigValues) -> TowerParts:
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
    _add_merger(vision, parts, "merger", hidden)
    return parts


def _add_merger(vision: ConfigValues, parts: TowerParts, name: str, normed: int, count: int = 1) -> None:
    """Add what merges patches, in one place or in ``count``; ``normed`` is the width of its norm."""
    width = parts.hidden * vision.integer("spatial_merge_size", default=2) ** 2
    output = vision.integer("out_hidden_size", default=3584)
    if count:
        parts.add(f"model.visual.{name}.norm", normed, bias=True, role="norm", count=count)
        parts.add(f"model.visual.{name}.linear_fc1", width, width, bias=True, count=count)
        parts.add(f"model.visual.{name}.linear_fc2", output, width, bias=True, count=count)


def qwen3_5(config: ConfigValues) -> ModelSpec:
    """Qwen3.5 and 3.6, dense: its text model behind Qwen3-VL's tower, without mergers for early layers.

    Source: ``transformers/models/qwen3_5/modeling_qwen3_5.py`` (v5.23.0), ``Qwen3_5VisionModel``.
    """
    return _behind_tower(config, qwen3_5_text)


def _behind_tower(config: ConfigValues, text: Callable[[ConfigValues], ModelSpec]) -> ModelSpec:
    """Return the shapes of a config whose text part ``text`` reads."""
    vision = config.part("vision_config", f"{config.family}_vision")
    parts = _tower(vision)
    vision.only("deepstack_visual_indexes", [])
    config.take(vision)
    return with_tower(config, text_inside(config, f"{config.family}_text", text), parts, MERGERS[:1])


def qwen3_5_moe(config: ConfigValues) -> ModelSpec:
    """Qwen3.5 and 3.6 with experts: its text model behind Qwen3-VL's tower, without mergers for early layers.

    Source: ``transformers/models/qwen3_5_moe/modeling_qwen3_5_moe.py`` (v5.23.0), ``Qwen3_5VisionModel``.
    """
    return _behind_tower(config, qwen3_5_moe_text)
