"""Vision-language models that put a whole image's patches, projected by one or two layers, before their text: LLaVA and PaliGemma."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from memplan.model.families.config_values import ConfigValues
from memplan.model.families.family_fields import runs_as
from memplan.model.families.kinds.gemma_like import gemma, gemma2
from memplan.model.families.kinds.llama_like import granite, llama, mistral, qwen2
from memplan.model.families.vision_towers import (
    TowerParts,
    add_clip_layers,
    add_siglip,
    named_text,
    pixtral_tower,
    text_inside,
    with_tower,
)
from memplan.model.spec import ModelSpec
from memplan.model.tower import TowerTensor

PROJECTOR = "model.multi_modal_projector"

LLAVA_TEXTS = {"llama": llama, "mistral": mistral, "qwen2": qwen2}


@runs_as(scored=False, wrapped=True, ahead=False)
def llava(config: ConfigValues) -> ModelSpec:
    """LLaVA 1.5, Pixtral 12B: Llama's, Mistral's or Qwen2's layers behind a tower of CLIP or Pixtral and a projector of two layers.

    Source: ``transformers/models/llava/modeling_llava.py``, ``transformers/models/clip/modeling_clip.py`` (v5.23.0);
    https://arxiv.org/abs/2310.03744.
    """
    text = named_text(config, LLAVA_TEXTS, "llama")
    parts = pixtral_tower(config) if _tower_kind(config) == "pixtral" else _clip_tower(config)
    return _behind_projector(config, text, parts)


@runs_as(scored=False, wrapped=False, ahead=False, scales_embedded=True)
def llava_next(config: ConfigValues) -> ModelSpec:
    """LLaVA 1.6, Granite Vision: LLaVA's parts, and an embedding of where rows of an image's tiles end.

    Source: ``transformers/models/llava_next/modeling_llava_next.py`` (v5.24.0).
    """
    text = named_text(config, LLAVA_TEXTS | {"granite": granite}, "llama")
    parts = _siglip_tower(config) if _tower_kind(config) == "siglip_vision_model" else _clip_tower(config)
    return _behind_tiles(config, text, parts)


@runs_as(scored=False, wrapped=False, ahead=False)
def llava_next_video(config: ConfigValues) -> ModelSpec:
    """LLaVA-NeXT-Video: LLaVA 1.6's parts, which read a video as images whose patches are averaged.

    Source: ``transformers/models/llava_next_video/modeling_llava_next_video.py`` (v5.24.0).
    """
    text = _tied_as_text(config, named_text(config, LLAVA_TEXTS, "llama"))
    if config.text("spatial_pool_mode", "average") == "conv":
        config.refuse(
            "spatial_pool_mode", "a convolution over patches of a video is not modelled: released are averages"
        )
    config.ignore("spatial_pool_mode", "spatial_pool_stride", "video_token_index", "video_seq_length")
    return _behind_tiles(config, text, _clip_tower(config))


@runs_as(scored=False, wrapped=False, ahead=False)
def llava_onevision(config: ConfigValues) -> ModelSpec:
    """LLaVA-OneVision: LLaVA 1.6's parts with Qwen2's layers and SigLIP's tower.

    Source: ``transformers/models/llava_onevision/modeling_llava_onevision.py`` (v5.24.0).
    """
    text = _tied_as_text(config, text_inside(config, "qwen2", qwen2))
    config.ignore("vision_aspect_ratio", "video_token_index")
    return _behind_tiles(config, text, _siglip_tower(config))


def _both_ways(text_spec: Callable[[ConfigValues], ModelSpec]) -> Callable[[ConfigValues], ModelSpec]:
    """Return what reads a text model whose prompt's tokens see those behind them, which changes no tensor's size."""

    def read(text: ConfigValues) -> ModelSpec:
        text.ignore("use_bidirectional_attention", "num_image_tokens", "is_encoder_decoder")
        return text_spec(text)

    return read


PALIGEMMA_TEXTS = {"gemma": _both_ways(gemma), "gemma2": _both_ways(gemma2)}


@runs_as(scored=False, wrapped=False, ahead=False, takes_flash_attn=False, masks=0, masks_from=2)
def paligemma(config: ConfigValues) -> ModelSpec:
    """PaliGemma 1 and 2: Gemma's layers behind SigLIP's tower, whose patches one matrix projects.

    Source: ``transformers/models/paligemma/modeling_paligemma.py`` (v5.24.0); https://arxiv.org/abs/2407.07726.
    """
    text = named_text(config, PALIGEMMA_TEXTS, "gemma")
    parts = _siglip_tower(config, (1152, 4096, 27, 16, 14), 224)
    config.expect("projection_dim", text.hidden_size)
    parts.add(f"{PROJECTOR}.linear", text.hidden_size, parts.hidden, bias=True)
    config.ignore("hidden_size", "vocab_size", "num_image_tokens", "_vocab_size")
    return with_tower(config, text, parts, (PROJECTOR,))


def _tied_as_text(config: ConfigValues, text: ModelSpec) -> ModelSpec:
    """Return a text model that is tied where its own config says so, which counts where the whole's is false."""
    tied = config.mapping("text_config").get("tie_word_embeddings")
    return replace(text, tie_word_embeddings=True) if tied else text


def _siglip_tower(
    config: ConfigValues, missing: tuple[int, int, int, int, int] = (1152, 4304, 26, 16, 14), size: int = 384
) -> TowerParts:
    """Return SigLIP's tower; ``missing`` and ``size`` are what missing sizes mean."""
    vision = config.part("vision_config", "siglip_vision_model")
    parts = TowerParts(vision, missing)
    add_siglip(vision, parts, "model.vision_tower", size)
    if vision.flag("vision_use_head", default=bool(config.mapping("vision_config"))):
        _add_siglip_head(parts, "model.vision_tower.head")
    vision.ignore("num_image_tokens", "projection_dim", "projector_hidden_act")
    config.take(vision)
    return parts


def _add_siglip_head(parts: TowerParts, head: str) -> None:
    """Add the head of SigLIP that pools patches, which these models do not call.

    Source:
        ``SiglipMultiheadAttentionPoolingHead`` in transformers/models/siglip/modeling_siglip.py (v5.24.0).
    """
    hidden, attention = parts.hidden, f"{head}.attention"
    parts.tensors.append(TowerTensor(f"{head}.probe", (1, 1, hidden), "embedding"))
    parts.tensors.append(TowerTensor(f"{attention}.in_proj_weight", (3 * hidden, hidden), "embedding"))
    parts.tensors.append(TowerTensor(f"{attention}.in_proj_bias", (3 * hidden,), "bias"))
    parts.add(f"{attention}.out_proj", hidden, hidden, bias=True)
    parts.add(f"{head}.layernorm", hidden, bias=True, role="norm")
    parts.add(f"{head}.mlp.fc1", parts.inner, hidden, bias=True)
    parts.add(f"{head}.mlp.fc2", hidden, parts.inner, bias=True)


def _behind_tiles(config: ConfigValues, text: ModelSpec, parts: TowerParts) -> ModelSpec:
    """Return a text model behind a tower of tiles of an image, and an embedding of where their rows end."""
    parts.tensors.append(TowerTensor("model.image_newline", (text.hidden_size,), "embedding"))
    config.ignore("image_grid_pinpoints", "use_image_newline_parameter")
    return _behind_projector(config, text, parts)


def _tower_kind(config: ConfigValues) -> Any:
    return config.mapping("vision_config").get("model_type")


def _behind_projector(config: ConfigValues, text: ModelSpec, parts: TowerParts) -> ModelSpec:
    """Return a text model behind a tower and two layers, the first of which is given what one of the tower's layers returns, or several."""
    given = config.keys.get("vision_feature_layer")
    layers = len(given) if isinstance(given, list) else 1
    bias = config.flag("multimodal_projector_bias", default=True)
    parts.add(f"{PROJECTOR}.linear_1", text.hidden_size, parts.hidden * max(layers, 1), bias=bias)
    parts.add(f"{PROJECTOR}.linear_2", text.hidden_size, text.hidden_size, bias=bias)
    config.ignore("vision_feature_layer", "vision_feature_select_strategy", "projector_hidden_act", "image_seq_length")
    return with_tower(config, text, parts, (PROJECTOR,))


def _clip_tower(config: ConfigValues) -> TowerParts:
    """Return CLIP's tower, whose first token stands for the whole image."""
    vision = config.part("vision_config", "clip_vision_model")
    vision.only("model_type", "clip_vision_model")
    parts = TowerParts(vision, (1024, 4096, 24, 16, 14))
    embeddings, hidden = "model.vision_tower.embeddings", parts.hidden
    parts.tensors.append(TowerTensor(f"{embeddings}.class_embedding", (hidden,), "embedding"))
    parts.add(f"{embeddings}.patch_embedding", hidden, parts.channels, parts.patch, parts.patch, role="embedding")
    side = max(vision.integer("image_size", default=224) // parts.patch, 1)
    parts.add(f"{embeddings}.position_embedding", side**2 + 1, hidden, role="embedding")
    parts.add("model.vision_tower.pre_layrnorm", hidden, bias=True, role="norm")
    add_clip_layers(parts, "model.vision_tower")
    vision.ignore("projection_dim")
    config.take(vision)
    return parts
