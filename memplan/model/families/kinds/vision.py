"""Vision-language models that make fewer and wider patches before they project them: Qwen's, SmolVLM's and InternVL's."""

from collections.abc import Callable
from dataclasses import replace

from memplan.model.families.config_values import ConfigValues
from memplan.model.families.family_fields import runs_as
from memplan.model.families.kinds.linear_attention import QWEN3_5_MOE, lfm2, qwen3_5_moe_text, qwen3_5_text
from memplan.model.families.kinds.llama_like import llama, qwen2, qwen3
from memplan.model.families.kinds.mixtures import qwen3_moe
from memplan.model.families.vision_towers import (
    TowerParts,
    add_clip_layers,
    add_siglip,
    named_text,
    text_inside,
    with_tower,
)
from memplan.model.spec import MixtureOfExperts, ModelSpec
from memplan.model.tower import TEXT, TowerTensor

BLOCK = "model.visual.blocks.{}"


@runs_as(scored=False, wrapped=True, ahead=False, sequence_tables=True, passes_positions=False)
def qwen2_vl(config: ConfigValues) -> ModelSpec:
    """Qwen2-VL: Qwen2's layers behind a tower of blocks with layer norms and a merger of patches.

    Source: ``transformers/models/qwen2_vl/modeling_qwen2_vl.py``; https://arxiv.org/abs/2409.12191.
    """
    vision = config.part("vision_config", "qwen2_vl_vision")
    parts = TowerParts(vision, (1280, 5120, 32, 16, 14), width="embed_dim")
    hidden = parts.hidden
    inner = hidden * vision.integer("mlp_ratio", default=4)
    frames, merged = vision.integer("temporal_patch_size", default=2), vision.integer("spatial_merge_size", default=2)
    output, width = vision.integer("hidden_size", default=3584), hidden * merged**2
    patch = (parts.channels, frames, parts.patch, parts.patch)
    parts.add("model.visual.patch_embed.proj", hidden, *patch, role="embedding")
    _add_blocks(parts, inner, "fc1", "fc2")
    parts.add("model.visual.merger.ln_q", hidden, bias=True, role="norm")
    parts.add("model.visual.merger.mlp.0", width, width, bias=True)
    parts.add("model.visual.merger.mlp.2", output, width, bias=True)
    config.take(vision)
    return with_tower(config, text_inside(config, "qwen2", qwen2), parts, ("model.visual.merger",))


def _add_blocks(parts: TowerParts, inner: int, up: str, down: str) -> None:
    """Add blocks with layer norms, whose feed-forward layers have these names."""
    hidden, blocks = parts.hidden, parts.blocks
    parts.add(f"{BLOCK}.norm1", hidden, bias=True, role="norm", count=blocks)
    parts.add(f"{BLOCK}.norm2", hidden, bias=True, role="norm", count=blocks)
    parts.add(f"{BLOCK}.attn.qkv", 3 * hidden, hidden, bias=True, count=blocks)
    parts.add(f"{BLOCK}.attn.proj", hidden, hidden, bias=True, count=blocks)
    parts.add(f"{BLOCK}.mlp.{up}", inner, hidden, bias=True, count=blocks)
    parts.add(f"{BLOCK}.mlp.{down}", hidden, inner, bias=True, count=blocks)


FULL_BLOCKS = (7, 15, 23, 31)
"""Blocks whose attention is over the whole image where a config names none (configuration_qwen2_5_vl.py, 5.23.0)."""


@runs_as(scored=False, wrapped=True, ahead=True, sequence_tables=True, passes_positions=False)
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


@runs_as(scored=False, wrapped=True, ahead=False, sequence_tables=True, norms_at_once=True)
def qwen3_vl(config: ConfigValues) -> ModelSpec:
    """Qwen3-VL: Qwen3's layers behind a tower with learned positions, a merger of patches, and more mergers for early layers.

    Source: ``transformers/models/qwen3_vl/modeling_qwen3_vl.py``; https://arxiv.org/abs/2511.21631.
    """
    return _behind_deep_tower(config, "qwen3", qwen3)


@runs_as(
    scored=False,
    wrapped=True,
    ahead=False,
    balances=True,
    sequence_tables=True,
    norms_at_once=True,
    adapted_experts="left",
)
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
    hidden, inner = parts.hidden, parts.inner
    frames = vision.integer("temporal_patch_size", default=2)
    patch = (parts.channels, frames, parts.patch, parts.patch)
    parts.add("model.visual.patch_embed.proj", hidden, *patch, bias=True, role="embedding")
    positions = vision.integer("num_position_embeddings", default=2304)
    parts.add("model.visual.pos_embed", positions, hidden, role="embedding")
    _add_blocks(parts, inner, "linear_fc1", "linear_fc2")
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


@runs_as(scored=True, wrapped=True, ahead=True, sequence_tables=True, joins_none=True, norms_at_once=True)
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


@runs_as(scored=False, wrapped=True, ahead=True, **QWEN3_5_MOE)
def qwen3_5_moe(config: ConfigValues) -> ModelSpec:
    """Qwen3.5 and 3.6 with experts: its text model behind Qwen3-VL's tower, without mergers for early layers.

    Source: ``transformers/models/qwen3_5_moe/modeling_qwen3_5_moe.py`` (v5.23.0), ``Qwen3_5VisionModel``.
    """
    return _behind_tower(config, qwen3_5_moe_text)


@runs_as(scored=False, wrapped="self_attn", ahead=False)
def idefics3(config: ConfigValues) -> ModelSpec:
    """Idefics3 and SmolVLM: Llama's layers behind SigLIP's, whose patches one matrix projects, several at once.

    Source: ``transformers/models/idefics3/modeling_idefics3.py`` (v5.24.0), ``Idefics3Model``.
    """
    vision = config.part("vision_config", f"{config.family}_vision")
    vision.square("image_size", "patch_size")
    parts = TowerParts(vision, (1152, 3072, 12, 16, 32))
    add_siglip(vision, parts, "model.vision_model")
    vision.ignore("max_image_size", "size")
    config.ignore("_pad_token_id")
    config.take(vision)
    text = named_text(config, {"llama": llama}, "llama", TEXT)
    merged = parts.hidden * config.integer("scale_factor", default=2) ** 2
    parts.add("model.connector.modality_projection.proj", text.hidden_size, merged)
    return with_tower(config, text, parts, ("model.connector",))


@runs_as(scored=False, wrapped="self_attn", ahead=False)
def smolvlm(config: ConfigValues) -> ModelSpec:
    """SmolVLM2: Idefics3 itself, which reads videos as images.

    Source: ``transformers/models/smolvlm/modeling_smolvlm.py`` (v5.24.0).
    """
    return idefics3(config)


@runs_as(scored=False, wrapped=False, ahead=False, norms_at_once=True)
def lfm2_vl(config: ConfigValues) -> ModelSpec:
    """LFM2-VL: LFM2's layers behind SigLIP 2's, whose patches a linear layer embeds, and a projector of several patches.

    Source: ``transformers/models/lfm2_vl/modeling_lfm2_vl.py``, ``transformers/models/siglip2/modeling_siglip2.py`` (v5.24.0).
    """
    vision = config.part("vision_config", "siglip2_vision_model")
    parts = TowerParts(vision, (768, 3072, 12, 12, 16))
    hidden, embeddings = parts.hidden, "model.vision_tower.embeddings"
    vision.ignore("image_size")
    parts.add(f"{embeddings}.patch_embedding", hidden, parts.channels * parts.patch**2, bias=True)
    parts.add(f"{embeddings}.position_embedding", vision.integer("num_patches", default=256), hidden, role="embedding")
    add_clip_layers(parts, "model.vision_tower")
    if vision.flag("vision_use_head", default=True):
        vision.refuse("vision_use_head", "a head that pools patches is not modelled: LFM2-VL is released with false")
    config.take(vision)
    text = text_inside(config, "lfm2", lfm2)
    merged, inner = (
        hidden * config.integer("downsample_factor", default=2) ** 2,
        config.integer("projector_hidden_size", default=2560),
    )
    biased, projector = config.flag("projector_bias", default=True), "model.multi_modal_projector"
    if config.flag("projector_use_layernorm", default=True):
        parts.add(f"{projector}.layer_norm", merged, bias=True, role="norm")
    parts.add(f"{projector}.linear_1", inner, merged, bias=biased)
    parts.add(f"{projector}.linear_2", text.hidden_size, inner, bias=biased)
    config.ignore("projector_hidden_act", "tie_embedding", *LFM2_PROCESSING)
    return with_tower(config, text, parts, (projector,))


LFM2_PROCESSING = (
    "do_image_splitting", "encoder_patch_size", "max_image_tokens", "max_num_patches", "max_pixels_tolerance", "max_tiles",
    "min_image_tokens", "min_tiles", "tile_size", "use_image_special_tokens", "use_thumbnail",
)  # fmt: skip
"""Keys of LFM2-VL's config that its processor reads."""

INTERN = "model.vision_tower.encoder.layer.{}"


@runs_as(scored=False, wrapped=True, ahead=False, norms_at_once=True, drops_routers=True, adapted_experts="left")
def internvl(config: ConfigValues) -> ModelSpec:
    """InternVL 3 and 3.5 as transformers has them (``-hf``): a tower that scales what its blocks add, and a projector of several patches.

    Source: ``transformers/models/internvl/modeling_internvl.py`` (v5.24.0).
    """
    vision = config.part("vision_config", "internvl_vision")
    vision.square("image_size", "patch_size")
    parts = TowerParts(vision, (1024, 4096, 24, 16, 14))
    hidden, inner, blocks = parts.hidden, parts.inner, parts.blocks
    embeddings, side = "model.vision_tower.embeddings", vision.integer("image_size", default=448) // parts.patch
    parts.tensors.append(TowerTensor(f"{embeddings}.cls_token", (1, 1, hidden), "embedding"))
    if vision.flag("use_mask_token"):
        parts.tensors.append(TowerTensor(f"{embeddings}.mask_token", (1, 1, hidden), "embedding"))
    if vision.flag("use_absolute_position_embeddings", default=True):
        table = (1, side**2 + 1, hidden)
        parts.tensors.append(TowerTensor(f"{embeddings}.position_embeddings", table, "embedding"))
    patch = (parts.channels, parts.patch, parts.patch)
    parts.add(f"{embeddings}.patch_embeddings.projection", hidden, *patch, bias=True, role="embedding")
    for name in ("lambda_1", "lambda_2"):
        parts.tensors.append(TowerTensor(f"{INTERN}.{name}", (hidden,), "norm", blocks))
    biased = vision.flag("attention_bias")
    for name in ("q_proj", "k_proj", "v_proj"):
        parts.add(f"{INTERN}.attention.{name}", hidden, hidden, bias=biased, count=blocks)
    parts.add(f"{INTERN}.attention.projection_layer", hidden, hidden, bias=True, count=blocks)
    for name in ("q_norm", "k_norm") if vision.flag("use_qk_norm") else ():
        parts.add(f"{INTERN}.attention.{name}", hidden, role="norm", count=blocks)
    parts.add(f"{INTERN}.mlp.fc1", inner, hidden, bias=True, count=blocks)
    parts.add(f"{INTERN}.mlp.fc2", hidden, inner, bias=True, count=blocks)
    shifted = vision.text("norm_type", "layer_norm") == "layer_norm"
    for name in ("layernorm_before", "layernorm_after"):
        parts.add(f"{INTERN}.{name}", hidden, bias=shifted, role="norm", count=blocks)
    if not vision.flag("use_mean_pooling", default=True):
        parts.add("model.vision_tower.layernorm", hidden, bias=True, role="norm")
    vision.ignore("hidden_dropout_prob", "projection_dropout", "layer_scale_init_value")
    config.take(vision)
    text = named_text(config, {"llama": llama, "qwen2": qwen2, "qwen3": qwen3, "qwen3_moe": qwen3_moe}, "qwen2")
    merged = hidden * int(1 / config.number("downsample_ratio", default=0.5)) ** 2
    projector = "model.multi_modal_projector"
    parts.add(f"{projector}.layer_norm", merged, bias=True, role="norm")
    parts.add(f"{projector}.linear_1", text.hidden_size, merged, bias=True)
    parts.add(f"{projector}.linear_2", text.hidden_size, text.hidden_size, bias=True)
    config.ignore("image_seq_length", "projector_hidden_act", "vision_feature_layer", "vision_feature_select_strategy")
    return with_tower(config, text, parts, (projector,))
