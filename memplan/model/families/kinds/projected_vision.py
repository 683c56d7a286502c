"""Vision-language models whose tower attends to whole images by itself: CLIP's, SigLIP's and Pixtral's, behind a projector."""

from math import isqrt

from memplan.model.families.common_parts import attention, model, rms_norm, rotary_dim, shape
from memplan.model.families.config_values import ConfigValues
from memplan.model.families.family_fields import GEMMA4, runs_as
from memplan.model.families.kinds.gemma_like import gemma3_text, gemma4_text, gemma4_unified_text
from memplan.model.families.kinds.interleaved_and_parallel import GLM4_NAMES
from memplan.model.families.kinds.llama_like import ministral3, mistral
from memplan.model.families.latent_mixtures import grouped, latent_mixture
from memplan.model.families.vision_towers import (
    Parts,
    TowerParts,
    add_siglip,
    named_text,
    pixtral_tower,
    text_inside,
    with_tower,
)
from memplan.model.spec import Layer, MixtureOfExperts, Mlp, ModelSpec
from memplan.model.tower import TowerTensor

PROJECTOR = "model.multi_modal_projector"


@runs_as(scored=True, wrapped=False, ahead=False, masks=2, masks_from=6)
def gemma3(config: ConfigValues) -> ModelSpec:
    """Gemma 3 with images: its text model behind a SigLIP tower, whose features are pooled and projected by one matrix.

    Source: ``transformers/models/gemma3/modeling_gemma3.py``, ``transformers/models/siglip/modeling_siglip.py``;
    https://arxiv.org/abs/2503.19786.
    """
    vision = config.part("vision_config", "siglip_vision_model")
    parts = TowerParts(vision, (768, 3072, 12, 12, 16))
    hidden, blocks, size = parts.hidden, parts.blocks, vision.integer("image_size", default=224)
    side = add_siglip(vision, parts, "model.vision_tower")
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


@runs_as(scored=True)
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
    mixture = grouped(config, mixture)
    return latent_mixture(config, mixture, scales_query=True, q_lora_rank=1024, kv_lora_rank=256, qk_nope_head_dim=64)


PIXTRAL_TEXTS = {"mistral": mistral, "ministral3": ministral3, "mistral4": _mistral4}


@runs_as(scored=False, wrapped=True, ahead=False, adapted_experts="left")
def mistral3(config: ConfigValues) -> ModelSpec:
    """Mistral Small 3.1 on, Magistral, Ministral 3, Mistral Small 4: Mistral's layers behind a Pixtral tower and a projector that merges patches.

    Source: ``transformers/models/mistral3/modeling_mistral3.py``, ``transformers/models/pixtral/modeling_pixtral.py``.
    """
    text = named_text(config, PIXTRAL_TEXTS, "mistral")
    parts = pixtral_tower(config)
    _add_projector(config, parts, text.hidden_size)
    return with_tower(config, text, parts, (PROJECTOR,))


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


VISUAL, GLM_BLOCK = "model.visual", "model.visual.blocks.{}"


@runs_as(scored=False, wrapped=True, ahead=False, sequence_tables=True, joins_none=True, interleaved="by-model")
def glm4v(config: ConfigValues) -> ModelSpec:
    """GLM-4.1V and GLM-4.6V-Flash: GLM-4's layers of 2025 behind a tower with gated feed-forward parts, whose patches a convolution merges.

    Source: ``transformers/models/glm4v/modeling_glm4v.py`` (v5.24.0); https://arxiv.org/abs/2507.01006.
    """
    vision = config.part("vision_config", "glm4v_vision")
    parts = TowerParts(vision, (1536, 13_696, 24, 12, 14))
    hidden, blocks, output = parts.hidden, parts.blocks, vision.integer("out_hidden_size", default=4096)
    frames, merged = vision.integer("temporal_patch_size", default=2), vision.integer("spatial_merge_size", default=2)
    side = max(vision.integer("image_size", default=336) // parts.patch, 1)
    parts.add(f"{VISUAL}.embeddings.position_embedding", side**2, hidden, role="embedding")
    patch = (parts.channels, frames, parts.patch, parts.patch)
    parts.add(f"{VISUAL}.patch_embed.proj", hidden, *patch, bias=True, role="embedding")
    for name in ("norm1", "norm2"):
        parts.add(f"{GLM_BLOCK}.{name}", hidden, role="norm", count=blocks)
    parts.add(f"{GLM_BLOCK}.attn.qkv", 3 * hidden, hidden, bias=vision.flag("attention_bias"), count=blocks)
    parts.add(f"{GLM_BLOCK}.attn.proj", hidden, hidden, count=blocks)
    for name, width, inner, count in (
        (f"{GLM_BLOCK}.mlp", hidden, output, blocks),
        (f"{VISUAL}.merger", output, parts.inner, 1),
    ):
        parts.add(f"{name}.gate_proj", inner, width, count=count)
        parts.add(f"{name}.up_proj", inner, width, count=count)
        parts.add(f"{name}.down_proj", width, inner, count=count)
    parts.add(f"{VISUAL}.merger.proj", output, output)
    parts.add(f"{VISUAL}.merger.post_projection_norm", output, bias=True, role="norm")
    parts.add(f"{VISUAL}.downsample", output, hidden, merged, merged, bias=True, role="embedding")
    for name in ("post_conv_layernorm", "post_layernorm"):
        parts.add(f"{VISUAL}.{name}", hidden, role="norm")
    config.take(vision)
    config.ignore(*[f"{kind}_{end}_token_id" for kind in ("image", "video") for end in ("start", "end")])
    return with_tower(config, text_inside(config, "glm4v_text", _glm4v_text), parts, (f"{VISUAL}.merger",))


def _glm4v_text(text: ConfigValues) -> ModelSpec:
    """Return GLM-4's layers of 2025, whose heads divide the residual stream and have biases always."""
    text.ignore("attention_bias", "head_dim")
    common = shape(text, key_value_heads=2)
    heads = attention(text, common, rotary_dim(text, common.head_dim), qkv_bias=True)
    mlp = Mlp(text.integer("intermediate_size"), text.activation("hidden_act"), fused_gate_up=True)
    return model(text, common, Layer(heads, mlp, rms_norm(text, 1e-5), placement="sandwich"), names=GLM4_NAMES)


GEMMA_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
GEMMA4_LAYER = "model.vision_tower.encoder.layers.{}"


SOUND_NORMS = (
    *[f"{part}.{side}_layer_norm" for part in ("feed_forward1", "feed_forward2") for side in ("pre", "post")],
    "lconv1d.pre_layer_norm",
    "lconv1d.conv_norm",
    "norm_pre_attn",
    "norm_post_attn",
    "norm_out",
)
"""Norms of a layer of the tower for sound."""

SOUND_ARITHMETIC = (
    "residual_weight",
    "attention_chunk_size",
    "attention_context_left",
    "attention_context_right",
    "attention_logit_cap",
    "attention_invalid_logits_value",
    "gradient_clipping",
    "hidden_act",
)
"""Keys of that tower that no parameter depends on."""


@runs_as(scored=False, wrapped=True, ahead=False, **GEMMA4, adapted_experts="left")
def gemma4(config: ConfigValues) -> ModelSpec:
    """Gemma 4 with images, and small ones with sound: its text model behind towers, whose features one matrix each projects.

    Source: ``transformers/models/gemma4/modeling_gemma4.py`` (v5.23.0).
    """
    config.ignore("audio_token_id", "boa_token_id", "eoa_token_index", "eoa_token_id")
    vision = config.part("vision_config", "gemma4_vision")
    parts = TowerParts(vision, (768, 3072, 16, 12, 16))
    hidden, inner, blocks = parts.hidden, parts.inner, parts.blocks
    embedder, positions = "model.vision_tower.patch_embedder", vision.integer("position_embedding_size", default=10_240)
    parts.tensors.append(TowerTensor(f"{embedder}.position_embedding_table", (2, positions, hidden), "embedding"))
    parts.add(f"{embedder}.input_proj", hidden, 3 * parts.patch**2)
    width = vision.integer("head_dim", default=64)
    groups = vision.integer("num_key_value_heads", default=12)
    for name, rows in (("q_proj", parts.heads * width), ("k_proj", groups * width), ("v_proj", groups * width)):
        parts.add(f"{GEMMA4_LAYER}.self_attn.{name}.linear", rows, hidden, count=blocks)
    parts.add(f"{GEMMA4_LAYER}.self_attn.o_proj.linear", hidden, parts.heads * width, count=blocks)
    for name in ("q_norm", "k_norm"):
        parts.add(f"{GEMMA4_LAYER}.self_attn.{name}", width, role="norm", count=blocks)
    for name, rows, columns in (("gate_proj", inner, hidden), ("up_proj", inner, hidden), ("down_proj", hidden, inner)):
        parts.add(f"{GEMMA4_LAYER}.mlp.{name}.linear", rows, columns, count=blocks)
    for name in GEMMA_NORMS:
        parts.add(f"{GEMMA4_LAYER}.{name}", hidden, role="norm", count=blocks)
    vision.ignore(
        "use_clipped_linears",  # four numbers for each matrix, which are no parameters
        "standardize",
        "pooling_kernel_size",
        "hidden_activation",
        "attention_bias",
        "max_position_embeddings",
    )
    config.take(vision)
    heard = _add_sound(config, parts) if config.mapping("audio_config") else 0
    text = text_inside(config, "gemma4_text", gemma4_text)
    parts.add("model.embed_vision.embedding_projection", text.hidden_size, hidden)
    if heard:
        parts.add("model.embed_audio.embedding_projection", text.hidden_size, heard)
    return with_tower(config, text, parts, ("model.embed_vision", "model.embed_audio")[: 1 + bool(heard)])


def _add_sound(config: ConfigValues, parts: Parts) -> int:
    """Add the tower that sound passes through, convolutions and conformer layers; return the width of its features.

    Source: ``Gemma4AudioModel`` and ``Gemma4AudioLayer`` in transformers/models/gemma4/modeling_gemma4.py (v5.23.0).
    """
    sound = config.part("audio_config", "gemma4_audio")
    hidden, layers = sound.integer("hidden_size", default=1024), sound.integer("num_hidden_layers", default=12)
    heads, kernel = sound.integer("num_attention_heads", default=8), sound.integer("conv_kernel_size", default=5)
    first, second = (*(sound.integers("subsampling_conv_channels", 2) or (128, 32)), 0)[:2]
    sound.divides("num_attention_heads", heads, "hidden_size", hidden)
    width = sound.integer("output_proj_dims", default=1536)
    sound.ignore("use_clipped_linears", *SOUND_ARITHMETIC)
    config.take(sound)
    front, layer = "model.audio_tower.subsample_conv_projection", "model.audio_tower.layers.{}"
    for name, rows, columns in (("layer0", first, 1), ("layer1", second, first)):
        parts.add(f"{front}.{name}.conv", rows, columns, 3, 3, role="embedding")
        parts.add(f"{front}.{name}.norm", rows, role="norm")
    parts.add(f"{front}.input_proj_linear", hidden, first // 4 * second)
    for name in ("feed_forward1", "feed_forward2"):
        parts.add(f"{layer}.{name}.ffw_layer_1.linear", 4 * hidden, hidden, count=layers)
        parts.add(f"{layer}.{name}.ffw_layer_2.linear", hidden, 4 * hidden, count=layers)
    parts.tensors.append(TowerTensor(f"{layer}.self_attn.per_dim_scale", (hidden // heads,), "norm", layers))
    for name in ("q_proj.linear", "k_proj.linear", "v_proj.linear", "post.linear", "relative_k_proj"):
        parts.add(f"{layer}.self_attn.{name}", hidden, hidden, count=layers)
    parts.add(f"{layer}.lconv1d.linear_start.linear", 2 * hidden, hidden, count=layers)
    parts.add(f"{layer}.lconv1d.linear_end.linear", hidden, hidden, count=layers)
    parts.add(f"{layer}.lconv1d.depthwise_conv1d", hidden, 1, kernel, role="embedding", count=layers)
    for name in SOUND_NORMS:
        parts.add(f"{layer}.{name}", hidden, role="norm", count=layers)
    parts.add("model.audio_tower.output_proj", width, hidden, bias=True)
    return width


@runs_as(scored=False, wrapped=True, ahead=False, **GEMMA4, masks_jointly=True, masks_by_kind=True)
def gemma4_unified(config: ConfigValues) -> ModelSpec:
    """Gemma 4 12B with images and sound, which have no towers: one matrix each projects patches and frames of waves.

    Source: ``transformers/models/gemma4_unified/modeling_gemma4_unified.py`` (v5.23.0).
    """
    vision = config.part("vision_config", "gemma4_unified_vision")
    text = text_inside(config, "gemma4_unified_text", gemma4_unified_text)
    width, places = vision.integer("mm_embed_dim", default=3840), vision.integer("mm_posemb_size", default=1120)
    patch = 3 * (vision.integer("patch_size", default=16) * vision.integer("pooling_kernel_size", default=3)) ** 2
    inner = vision.integer("output_proj_dims", default=3840)
    vision.ignore("model_patch_size", "num_soft_tokens")
    config.take(vision)
    parts = Parts()
    parts.tensors.append(TowerTensor("model.embed_vision.pos_embedding", (places, 2, width), "embedding"))
    parts.add("model.embed_vision.patch_ln1", patch, bias=True, role="norm")
    parts.add("model.embed_vision.patch_dense", width, patch, bias=True)
    for name in ("patch_ln2", "pos_norm"):
        parts.add(f"model.embed_vision.{name}", width, bias=True, role="norm")
    parts.add("model.embed_vision.multimodal_embedder.embedding_projection", text.hidden_size, inner)
    if config.mapping("audio_config"):
        sound = config.part("audio_config", "gemma4_unified_audio")
        frames = sound.integer("audio_embed_dim", default=640)
        frames = sound.integer("output_proj_dims", default=frames)
        sound.ignore("audio_samples_per_token")
        config.take(sound)
        parts.add("model.embed_audio.embedding_projection", text.hidden_size, frames)
    config.ignore("audio_token_id", "boa_token_id", "eoa_token_index")
    return with_tower(config, text, parts, ("model.embed_vision", "model.embed_audio"))
