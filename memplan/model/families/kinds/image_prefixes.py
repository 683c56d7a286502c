"""Vision-language models that put a whole image's patches, projected by one or two layers, before their text: LLaVA and PaliGemma."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

from memplan.model.families.common_parts import attention, gated_mlp, model, rms_norm, shape
from memplan.model.families.config_values import MAXIMUM_LAYERS, ConfigValues
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
from memplan.model.spec import Attention, Layer, LayerRun, Mlp, ModelSpec
from memplan.model.tower import LANGUAGE, TowerTensor

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


MLLAMA_CROSSED = (3, 8, 13, 18, 23, 28, 33, 38)
"""Layers that attend to images where a config names none (configuration_mllama.py, 5.24.0)."""


@runs_as(scored=False, wrapped=True, ahead=False)
def mllama(config: ConfigValues) -> ModelSpec:
    """Llama 3.2 Vision: Llama's layers, and between them some that attend to images alone, which rows of text skip.

    Source: ``transformers/models/mllama/modeling_mllama.py`` (v5.24.0), ``MllamaTextModel.forward``; https://arxiv.org/abs/2407.21783.
    """
    vision = config.part("vision_config", "mllama_vision_model")
    parts = _mllama_tower(vision)
    output = vision.integer("vision_output_dim", default=7680)
    config.take(vision)
    text = text_inside(config, "mllama_text_model", partial(_mllama_text, parts=parts))
    parts.add(PROJECTOR, text.hidden_size, output, bias=True)
    return with_tower(config, text, parts, (PROJECTOR,))


def _mllama_text(text: ConfigValues, parts: TowerParts) -> ModelSpec:
    """Return the layers that rows of text pass through, in their places; others are added to the tower's ``parts``."""
    common, norm = shape(text, key_value_heads=8), rms_norm(text, 1e-5)
    text.only("tie_word_embeddings", False)  # the embedding has more rows than the head
    listed = text.integers("cross_attention_layers")
    crossed = [index for index in (MLLAMA_CROSSED if listed is None else listed) if index < common.num_hidden_layers]
    heads, mlp = attention(text, common), gated_mlp(text)
    for index in crossed:
        _add_crossed(parts, f"{LANGUAGE}layers.{index}", heads, mlp)
    ends = sorted({-1, *crossed, common.num_hidden_layers})
    layer = Layer(heads, mlp, norm)
    runs = [LayerRun(layer, end - start - 1, start + 1) for start, end in pairwise(ends) if end - start > 1]
    spec = model(text, common, layer, dropout=("dropout",), unsaid_words=8)
    return replace(spec, runs=tuple(runs))


def _add_crossed(parts: TowerParts, layer: str, heads: Attention, mlp: Mlp) -> None:
    """Add a layer that attends to images."""
    hidden, inner = heads.query_size, mlp.intermediate_size
    for name, rows in (("q", hidden), ("k", heads.key_value_size), ("v", heads.key_value_size), ("o", hidden)):
        parts.add(f"{layer}.cross_attn.{name}_proj", rows, hidden)
    for name in ("q_norm", "k_norm"):
        parts.add(f"{layer}.cross_attn.{name}", heads.head_dim, role="norm")
    for name in ("input_layernorm", "post_attention_layernorm"):
        parts.add(f"{layer}.{name}", hidden, role="norm")
    for name, rows, columns in (("gate_proj", inner, hidden), ("up_proj", inner, hidden), ("down_proj", hidden, inner)):
        parts.add(f"{layer}.mlp.{name}", rows, columns)
    parts.tensors += [TowerTensor(f"{layer}.cross_attn_{part}_gate", (1,), "embedding") for part in ("attn", "mlp")]


def _mllama_tower(vision: ConfigValues) -> TowerParts:
    """Return a tower of tiles of an image: local layers, and global ones whose sums are gated."""
    parts, tower = TowerParts(vision, (1280, 5120, 32, 16, 14)), "model.vision_model"
    hidden, patch, tiles = parts.hidden, parts.patch, vision.integer("max_num_tiles", default=4)
    patches = max(vision.integer("image_size", default=448) // patch, 1) ** 2 + 1
    ratios = vision.keys.get("supported_aspect_ratios")
    ways = (len(ratios) if isinstance(ratios, list) else 8) + 1
    parts.tensors.append(TowerTensor(f"{tower}.class_embedding", (hidden,), "embedding"))
    parts.add(f"{tower}.patch_embedding", hidden, parts.channels, patch, patch, role="embedding")
    parts.tensors.append(TowerTensor(f"{tower}.gated_positional_embedding.embedding", (patches, hidden), "embedding"))
    parts.add(f"{tower}.gated_positional_embedding.tile_embedding", ways, tiles * patches * hidden, role="embedding")
    for name in ("pre_tile", "post_tile"):
        parts.add(f"{tower}.{name}_positional_embedding.embedding", ways, tiles * hidden, role="embedding")
    gates = [
        f"{tower}.{name}_embedding.gate" for name in ("gated_positional", "pre_tile_positional", "post_tile_positional")
    ]
    parts.tensors += [TowerTensor(name, (1,), "embedding") for name in gates]
    for name in ("layernorm_pre", "layernorm_post"):
        parts.add(f"{tower}.{name}", hidden, bias=True, role="norm")
    beyond = vision.integer("num_global_layers", default=8, maximum=MAXIMUM_LAYERS)
    for name, count in (("transformer", parts.blocks), ("global_transformer", beyond)):
        layer = f"{tower}.{name}.layers.{{}}"
        for matrix in ("q_proj", "k_proj", "v_proj", "o_proj"):
            parts.add(f"{layer}.self_attn.{matrix}", hidden, hidden, count=count)
        parts.add(f"{layer}.mlp.fc1", parts.inner, hidden, bias=True, count=count)
        parts.add(f"{layer}.mlp.fc2", hidden, parts.inner, bias=True, count=count)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            parts.add(f"{layer}.{norm}", hidden, bias=True, role="norm", count=count)
    parts.tensors += [TowerTensor(f"{layer}.gate_{part}", (1,), "embedding", beyond) for part in ("attn", "ffn")]
    vision.ignore("attention_heads", "intermediate_layers_indices", "supported_aspect_ratios", "norm_eps")
    return parts


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
