"""What the parts of a vision tower on tape depend on besides their weights."""

from dataclasses import replace
from typing import Literal

from memplan.documents.frozen_values import dataclass
from memplan.model.spec import ModelSpec
from memplan.model.tower import TEXTS, ImageGrid, TowerShape
from memplan.step.blocks.block_settings import BlockSettings, Regime
from memplan.step.kernels.image_rows import asks_by_layer, image_grid, is_embedded_ahead
from memplan.step.states.model_states import ModelStates
from memplan.training.resolved import TrainingSetup

ROW_AND_COLUMN_BYTES = 16
"""Of a patch: its row and its column, in 64 bits each."""

TAPS = 4
"""Learned positions that one of a patch lies between."""

TAP_BYTES = TAPS * (8 + 4)
"""Of a patch: their places, in 64 bits each, and their shares, in fp32."""

MASK_BYTES = 1
"""Of a token: whether it is of an image."""


@dataclass(frozen=True, slots=True)
class TowerSettings:
    """All that a tower's parts depend on, their weights aside.

    Attributes:
        block: What operations depend on, of the tower.
        shape: Sizes of the tower.
        grid: Patches of one image.
        per_row: Images in each row.
        text_width: Width of the text model's residual stream.
        text_bytes: Bytes of an element of it.
        patch_bytes: Bytes of an element of the patches' weight, which pixels are cast to.
        stream_bytes: Bytes of an element of the tower's residual stream.
        leaf: What is made to need a gradient: what ``patches`` become, the input of a ``block`` that trains, or ``none``.
        by_layer: Whether blocks are checkpointed only where they train.
        ahead: Whether it runs ahead of the forward, whose names and regions are not its own.
        reads_tokens: Whether what tokens become needs a gradient.
    """

    block: BlockSettings
    shape: TowerShape
    grid: ImageGrid
    per_row: int
    text_width: int
    text_bytes: int
    patch_bytes: int
    stream_bytes: int
    leaf: Literal["none", "patches", "block"]
    by_layer: bool
    ahead: bool
    reads_tokens: bool

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.shape.hidden_size // self.shape.heads

    @property
    def table_bytes(self) -> int:
        """Of a patch: its rows of the tables of cosines and sines, in fp32."""
        if self.shape.kind == "pooled":
            return 0
        return 2 * 4 * self.head_dim


def is_of_tower(name: str) -> bool:
    """Tell whether a parameter of a vision-language model, or an adapter on one, belongs to its tower or projector."""
    return name.startswith("model.") and not name.startswith(TEXTS)


def tower_settings(
    spec: ModelSpec, setup: TrainingSetup, block: BlockSettings, states: ModelStates, *, reads_tokens: bool
) -> TowerSettings | None:
    """Return what a tower's parts depend on; None for rows of text."""
    grid = image_grid(spec, setup)
    if grid is None or spec.tower is None or spec.tower.shape is None:
        return None
    shape = spec.tower.shape
    patches = next(entry for entry in states.tensors if is_of_tower(entry.tensor.name))
    attention = setup.tower_attention or setup.profile.attention
    ahead = is_embedded_ahead(spec, setup)
    casts = setup.autocast and shape.kind != "pooled" and not ahead
    stream = setup.compute_bytes if casts else patches.element_bytes
    own = replace(
        block,
        hidden_size=shape.hidden_size,
        profile=replace(
            block.profile,
            attention=attention,
            norm="composite",
            rotary="composite",
            activation="composite",
            adapters="composite",  # get_layers in axolotl/monkeypatch/lora_kernels.py (0.21.0)
        ),
        embedded_bytes=stream,
        residual_bytes=stream,
        autocast=block.autocast and not ahead,
        under_autocast=block.under_autocast and not ahead,
        dropout=0.0,
        attention_dropout=0.0,
        regime=Regime(),
    )
    return TowerSettings(
        block=own,
        shape=shape,
        grid=grid,
        per_row=setup.config.images.per_row,
        text_width=spec.hidden_size,
        text_bytes=block.residual_bytes,
        patch_bytes=patches.element_bytes,
        stream_bytes=stream,
        leaf="none"
        if patches.trainable or shape.kind == "stacked"
        else _leaf(setup, states),  # no ``_input_embed_layer``
        by_layer=setup.stack.input_gradients == "trained-layers",
        ahead=ahead,
        reads_tokens=reads_tokens,
    )


def _leaf(setup: TrainingSetup, states: ModelStates) -> Literal["none", "patches", "block"]:
    """Return what of a tower whose patches' weight is frozen is made to need a gradient."""
    # Source: ``enable_input_require_grads`` in transformers/modeling_utils.py (5.23.0);
    # ``get_custom_gradient_checkpointing_func`` in llamafactory/model/model_utils/checkpointing.py (0.9.5);
    # ``patch_frozen_module`` in swift/model/patcher.py (ms-swift 4.6.0), which lets no graph be made of a tower of
    # which nothing trains.
    rule, checkpointed = setup.stack.input_gradients, setup.checkpointing != "none"
    if asks_by_layer(setup):
        return "block" if checkpointed else "none"
    asks = rule == "always" or (rule.startswith(("checkpointed", "trained")) and checkpointed)
    if setup.stack.images == "embedded":
        names = [entry.tensor.name for entry in states.tensors if entry.trainable]
        asks = asks and any(name.startswith(("model.visual.", "model.vision_tower.")) for name in names)
    return "patches" if asks else "none"
