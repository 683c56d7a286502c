"""What a vision-language model has beside its text model: a vision tower, and the projector behind it."""

from __future__ import annotations

from typing import Literal

from memplan.values import dataclass

LANGUAGE = "model.language_model."
"""What the names of the text model's modules begin with inside the whole, as transformers names them."""


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
class Tower:
    """The parts of a vision-language model that rows of text do not pass through.

    Attributes:
        tensors: Their parameters, in the order of the model, before the text model's.
        text_family: Family of the text model where it stands alone.
    """

    tensors: tuple[TowerTensor, ...]
    text_family: str
