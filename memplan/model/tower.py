"""What a vision-language model has beside its text model: a vision tower, and the projector behind it."""

from math import isqrt
from typing import Literal

from memplan.documents.frozen_values import dataclass
from memplan.units import ceil_div

LANGUAGE, TEXT = TEXTS = ("model.language_model.", "model.text_model.")
"""What the names of the text model's modules begin with inside the whole, as transformers names them."""


TowerKind = Literal["windows", "pooled", "stacked"]


@dataclass(frozen=True, slots=True)
class TowerTensor:
    """One parameter tensor of a tower, or one in each of ``count`` blocks; linear layers are hidden matrices.

    Convolutions, tables of positions and parameters that are no module's weight count as embeddings: what quantises
    and adapts linear layers leaves them alone.
    """

    name: str
    shape: tuple[int, ...]
    role: Literal["embedding", "hidden_matrix", "norm", "bias"]
    count: int = 1


@dataclass(frozen=True, slots=True)
class ImageGrid:
    """The patches of one image."""

    patches: int  # How many there are
    merged: int  # How many tokens of the text model they become
    windows: tuple[int, ...]  # Patches of each window that attention of most blocks keeps to


@dataclass(frozen=True, slots=True)
class TowerShape:
    """Sizes of a tower that patches of images pass through."""

    hidden_size: int  # Width of its residual stream
    intermediate_size: int  # Width inside its feed-forward parts
    blocks: int  # How many there are
    heads: int  # Heads of attention
    patch_size: int  # Pixels of a patch, each way
    patch_values: int  # Numbers that a patch is made of: channels, frames and pixels
    merge: int  # Patches, each way, that become one token
    window: int  # Tokens of a window of attention, each way
    full_blocks: tuple[int, ...]  # Blocks whose attention is over the whole image
    output_size: int  # Width of a token for the text model
    # What patches pass through: blocks with ``windows`` of attention and tables of rotation behind which patches are
    # merged, ones that attend to a whole image of one size, whose patches are ``pooled``, or ones that attend to whole
    # images, of which some hand on patches to early layers of the text model too (``stacked``).
    kind: TowerKind = "windows"
    # Pixels each way of the one size that its processor makes every image; None where it leaves them their own.
    image_size: int | None = None
    deep_blocks: tuple[int, ...] = ()  # Blocks whose patches are handed on to early layers

    @property
    def step(self) -> int:
        """Pixels that an image's height and width are multiples of."""
        return self.patch_size * self.merge

    def sides(self, height: int | None, width: int | None, pixels: int | None) -> tuple[int, int]:
        """Return an image's height and width: those that are said, or those of most tokens that ``pixels`` leave, near a square.

        Example:
            >>> TowerShape(1280, 3420, 32, 16, 14, 1176, 2, 4, (7,), 3584).sides(None, None, 1_003_520)
            (896, 1120)
        """
        if self.image_size is not None:
            return self.image_size, self.image_size
        if height is not None and width is not None:
            return height, width
        most = (pixels or 0) // self.step**2
        rows = max(range(max(1, isqrt(most) // 2), isqrt(most) + 1), key=lambda n: (most // n * n, n), default=1)
        return rows * self.step, max(1, most // rows) * self.step

    def grid(self, height: int, width: int) -> ImageGrid:
        """Return the patches of an image of so many pixels.

        Source:
            ``get_vision_window_index`` in transformers/vision_utils.py (5.23.0).

        Example:
            >>> TowerShape(1280, 3420, 32, 16, 14, 1176, 2, 4, (7,), 3584).grid(140, 84)
            ImageGrid(patches=60, merged=15, windows=(48, 12))
        """
        rows, columns, unit = height // self.step, width // self.step, self.merge**2
        if self.kind == "pooled":
            patches = (height // self.patch_size) * (width // self.patch_size)
            return ImageGrid(patches, rows * columns, (patches,))
        if self.kind == "stacked":
            return ImageGrid(unit * rows * columns, rows * columns, (unit * rows * columns,))
        sides = [
            [min(self.window, length - self.window * index) for index in range(ceil_div(length, self.window))]
            for length in (rows, columns)
        ]
        windows = tuple([unit * high * wide for high in sides[0] for wide in sides[1]])
        return ImageGrid(unit * rows * columns, rows * columns, windows)


@dataclass(frozen=True, slots=True)
class Tower:
    """The parts of a vision-language model that rows of text do not pass through."""

    tensors: tuple[TowerTensor, ...]  # Their parameters, in the order of the model, before the text model's
    text_family: str  # Family of the text model where it stands alone
    shape: TowerShape | None = None  # What rows with images pass through; None where that is not modelled
    # What the names of the projector's parameters begin with, in one place or several.
    projector: tuple[str, ...] = ()
