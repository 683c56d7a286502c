"""What the parts of a vision tower on tape depend on besides their weights."""

from __future__ import annotations

from dataclasses import replace

from memplan.model.spec import ModelSpec
from memplan.model.tower import LANGUAGE, ImageGrid, TowerShape
from memplan.step.blocks.block_settings import BlockSettings, Regime
from memplan.step.kernels.image_rows import image_grid
from memplan.step.states.model_states import ModelStates
from memplan.training.resolved import TrainingSetup
from memplan.values import dataclass

ROW_AND_COLUMN_BYTES = 16
"""Of a patch: its row and its column, in 64 bits each."""

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
        leaf: Whether what patches become is made to need a gradient.
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
    leaf: bool
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
    return name.startswith("model.") and not name.startswith(LANGUAGE)


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
    casts = setup.autocast and shape.kind != "pooled"
    stream = setup.compute_bytes if casts else patches.element_bytes
    own = replace(
        block,
        hidden_size=shape.hidden_size,
        profile=replace(
            block.profile, attention=attention, norm="composite", rotary="composite", activation="composite"
        ),
        residual_bytes=stream,
        dropout=0.0,
        attention_dropout=0.0,
        regime=Regime(),
    )
    rule = setup.stack.input_gradients
    asks = rule == "always" or (rule.startswith("checkpointed") and setup.checkpointing != "none")
    return TowerSettings(
        block=own,
        shape=shape,
        grid=grid,
        per_row=setup.config.images.per_row,
        text_width=spec.hidden_size,
        text_bytes=block.residual_bytes,
        patch_bytes=patches.element_bytes,
        stream_bytes=stream,
        leaf=asks and not patches.trainable,
        reads_tokens=reads_tokens,
    )
