"""What vision-language families have in common: a tower and a projector in front of a text model of another family."""

from collections.abc import Callable
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


def text_inside(config: ConfigValues, family: str, text_spec: Callable[[ConfigValues], ModelSpec]) -> ModelSpec:
    """Return the text model of a vision-language model, its parts named as they are inside the whole."""
    text = config.text_part(family)
    spec = text_spec(text)
    config.take(text)
    inside = [name.replace("model.", LANGUAGE, 1) if name.startswith("model.") else name for name in spec.names]
    return replace(spec, names=type(spec.names)(*inside))


def with_tower(
    config: ConfigValues,
    text: ModelSpec,
    parts: Parts,
    projector: tuple[str, ...],
    shape: TowerShape | None = None,
) -> ModelSpec:
    """Return a text model with a tower in front of it, and a projector, whose modules have these names, between them."""
    tower = Tower(tuple(parts.tensors), text.architecture, shape, tuple(f"{name}." for name in projector))
    return replace(text, architecture=config.family, tower=tower)
