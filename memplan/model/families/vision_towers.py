"""What vision-language families have in common: a tower and a projector in front of a text model of another family."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

from memplan.model.families.config_values import MAXIMUM_LAYERS, ConfigValues
from memplan.model.spec import ModelSpec
from memplan.model.tower import LANGUAGE, Tower, TowerShape, TowerTensor

OF_ACTIVATIONS = (
    "attention_dropout", "fullatt_block_indexes", "hidden_act", "tokens_per_second", "vocab_size", "window_size"
)  # fmt: skip
"""Keys of a tower that no parameter depends on."""


class Parts:
    """Writes down the parameters of what stands in front of a text model."""

    def __init__(self) -> None:
        self.tensors: list[TowerTensor] = []

    def add(
        self,
        name: str,
        *shape: int,
        bias: bool = False,
        role: Literal["embedding", "hidden_matrix", "norm"] = "hidden_matrix",
        count: int = 1,
    ) -> None:
        """Add a weight, and a bias of as many elements as it has rows.

        Args:
            name: Of the module, with ``{}`` for its number where there are several.
            bias: Whether there is one.
        """
        self.tensors.append(TowerTensor(f"{name}.weight", shape, role, count))
        if bias:
            self.tensors.append(TowerTensor(f"{name}.bias", shape[:1], "bias", count))


class TowerParts(Parts):
    """Those of a tower, whose sizes that all have are read here.

    Args:
        config: Values of its ``vision_config``.
        missing: What missing sizes mean: hidden and intermediate size, blocks, heads and patch size, as the defaults of
            the family's configuration class in transformers 5.23.0 have them.
        width: Key of the hidden size.
    """

    def __init__(
        self, config: ConfigValues, missing: tuple[int, int, int, int, int], width: str = "hidden_size"
    ) -> None:
        super().__init__()
        hidden, inner, blocks, heads, patch = missing
        self.hidden = config.integer(width, default=hidden)
        self.inner = config.integer("intermediate_size", default=inner)
        self.blocks = config.integer("depth", "num_hidden_layers", default=blocks, maximum=MAXIMUM_LAYERS)
        self.channels = config.integer("in_channels", "in_chans", "num_channels", default=3)
        self.patch = config.integer("patch_size", "spatial_patch_size", default=patch)
        self.heads = config.integer("num_heads", "num_attention_heads", default=heads)
        config.divides("num_attention_heads", self.heads, width, self.hidden)
        config.ignore(*OF_ACTIVATIONS)

    def shape(self, *, frames: int = 1, **others: Any) -> TowerShape:
        """Return the tower's shape: its sizes and ``others``, with patches of so many ``frames``."""
        return TowerShape(
            hidden_size=self.hidden,
            intermediate_size=self.inner,
            blocks=self.blocks,
            heads=self.heads,
            patch_size=self.patch,
            patch_values=self.channels * frames * self.patch**2,
            **others,
        )


def add_clip_layers(parts: TowerParts, tower: str) -> None:
    """Add the layers of CLIP and SigLIP to the tower of this name, and the norm behind them."""
    hidden, inner, blocks, layer = parts.hidden, parts.inner, parts.blocks, f"{tower}.encoder.layers.{{}}"
    parts.add(f"{layer}.layer_norm1", hidden, bias=True, role="norm", count=blocks)
    for name in ("k_proj", "v_proj", "q_proj", "out_proj"):
        parts.add(f"{layer}.self_attn.{name}", hidden, hidden, bias=True, count=blocks)
    parts.add(f"{layer}.layer_norm2", hidden, bias=True, role="norm", count=blocks)
    parts.add(f"{layer}.mlp.fc1", inner, hidden, bias=True, count=blocks)
    parts.add(f"{layer}.mlp.fc2", hidden, inner, bias=True, count=blocks)
    parts.add(f"{tower}.post_layernorm", hidden, bias=True, role="norm")


def add_siglip(vision: ConfigValues, parts: TowerParts, tower: str, size: int = 224) -> int:
    """Add SigLIP's tower under this name, for images of this ``size`` where nothing is said; return how many patches one has each way."""
    hidden, side = parts.hidden, max(vision.integer("image_size", default=size) // parts.patch, 1)
    patch = (parts.channels, parts.patch, parts.patch)
    parts.add(f"{tower}.embeddings.patch_embedding", hidden, *patch, bias=True, role="embedding")
    parts.add(f"{tower}.embeddings.position_embedding", side**2, hidden, role="embedding")
    add_clip_layers(parts, tower)
    return side


def text_inside(
    config: ConfigValues, family: str, text_spec: Callable[[ConfigValues], ModelSpec], within: str = LANGUAGE
) -> ModelSpec:
    """Return the text model of a vision-language model, its parts named as they are inside the whole."""
    text = config.text_part(family)
    spec = text_spec(text)
    config.take(text)
    inside = [name.replace("model.", within, 1) if name.startswith("model.") else name for name in spec.names]
    return replace(spec, names=type(spec.names)(*inside))


def named_text(
    config: ConfigValues,
    texts: Mapping[str, Callable[[ConfigValues], ModelSpec]],
    missing: str,
    within: str = LANGUAGE,
) -> ModelSpec:
    """Return the text model, whose family its part of the config names; ``missing`` is what no name means."""
    family = config.mapping("text_config").get("model_type", missing)
    if family not in tuple(texts):
        config.refuse("text_config", f"a text model of family {family!r:.40} is not modelled; {', '.join(texts)} are")
        family = missing
    return text_inside(config, family, texts[family], within)


def with_tower(
    config: ConfigValues,
    text: ModelSpec,
    parts: Parts,
    projector: tuple[str, ...],
    shape: TowerShape | None = None,
) -> ModelSpec:
    """Return a text model with a tower in front of it, and a projector, whose modules have these names, between them.

    The whole has a head of its own, behind which nothing scales logits: Granite's and Cohere's factors are of their own heads.

    Source: ``LlavaNextForConditionalGeneration.forward`` in transformers/models/llava_next/modeling_llava_next.py, and as much in
    the others' (5.24.0).
    """
    tower = Tower(tuple(parts.tensors), text.architecture, shape, tuple(f"{name}." for name in projector))
    return replace(text, architecture=config.family, tower=tower, logit_scale=0.0)


PIXTRAL_LAYER = "model.vision_tower.transformer.layers.{}"


def pixtral_tower(config: ConfigValues) -> TowerParts:
    """Return Pixtral's tower, whose patches are rotated by where they lie."""
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
    return parts
