"""A loss scale for fp16, whose small gradients would be lost and whose large ones overflow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

INITIAL_SCALE = 2.0**16
GROWTH_INTERVAL = 2000


class LossScale:
    """A dynamic loss scale: halved where a gradient overflows, doubled after enough steps where none does.

    ``torch.amp.GradScaler`` does the same with fp32 gradients and refuses those in fp16, which
    weights in fp16 have.

    Attributes:
        factor: What the loss is multiplied by now.

    Source:
        https://docs.pytorch.org/docs/2.13/amp.html (initial scale, growth interval and factors).
    """

    def __init__(self) -> None:
        self.factor = INITIAL_SCALE
        self._good_steps = 0

    def divide_(self, gradients: Iterable[Tensor]) -> bool:
        """Divide gradients by the scale, in place, and return whether all are finite; adapt the scale.

        Where one is not, the step is to be left out and the gradients are of no use.
        """
        scaled = list(gradients)
        if not all(bool(gradient.isfinite().all()) for gradient in scaled):
            self.factor, self._good_steps = self.factor / 2, 0
            return False
        for gradient in scaled:
            gradient.div_(self.factor)
        self._good_steps += 1
        if self._good_steps % GROWTH_INTERVAL == 0:
            self.factor *= 2
        return True
