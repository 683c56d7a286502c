"""Coded weights as the bundled optimizer's library keeps, decodes and updates them."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from math import prod
from typing import Any

import torch
from torch import Tensor

from memplan.catalog.entries import StorageFormat
from memplan.errors import CannotAnswerError
from memplan.muon.stores.gradient_stores import GradientStore
from memplan.muon.weights.grid_formats import GridFormat, grid_of
from memplan.muon.weights.quantised import QuantisedHandle, QuantisedWeight
from memplan.muon.weights.weight_codecs import weight_format

PATTERN_ROWS = 16
"""Rows that are coded from random numbers; all other rows of a fresh weight repeat them."""


def library_format(layout: StorageFormat) -> str | None:
    """Return the library's name of a format, or None where it has no such format.

    Raises:
        CannotAnswerError: The format's grid is in a package that is not installed.
    """
    if layout.codec is not None and isinstance(weight_format(layout.codec), GridFormat) and find_spec("gguf") is None:
        raise CannotAnswerError(
            f"weights in {layout.codec} are traced with the grid of the gguf package: pip install gguf"
        )
    return layout.codec


class CodedMatrix(QuantisedWeight):
    """A matrix, or a stack of them, over codes that a module already holds.

    Args:
        codes: All codes, flat.
        whole: Dimensions of the weight.
    """

    def __init__(self, codes: Tensor, name: str, whole: tuple[int, ...]) -> None:
        super().__init__(codes.view(prod(whole[:-1]), -1), name, whole[-1])
        self.whole = torch.Size(whole)
        self.gradient = GradientStore("bf16", self.whole)
        self.tables()  # made once in a process: not part of any step

    def decoded(self, dtype: torch.dtype) -> Tensor:
        """Return the whole weight in ``dtype``."""
        return self.dequantised(dtype).view(self.whole)

    def tables(self) -> tuple[Tensor, ...]:
        """Return the tables that the format's codes point into."""
        return grid_of(self.format.name, self.codes.device) if isinstance(self.format, GridFormat) else ()

    def as_handle(self) -> QuantisedHandle:
        """Return how the optimizer updates this weight."""
        return StackHandle(self)

    @torch.no_grad()
    def initialise(self) -> None:
        """Code small random numbers, the same for every few rows."""
        rows = min(PATTERN_ROWS, self.codes.shape[0])
        values = torch.empty(rows, self.shape[1], device=self.codes.device).normal_(0.0, 0.02)
        pattern = QuantisedWeight.of(values, self.format.name).codes
        for first in range(0, self.codes.shape[0], rows):
            part = self.codes[first : first + rows]
            part.copy_(pattern[: part.shape[0]])


class StackHandle(QuantisedHandle):
    """A coded weight as an update sees it, experts in a stack of their own."""

    weight: CodedMatrix

    @property
    def shape(self) -> torch.Size:
        """Shape of the weight, leading experts included."""
        return self.weight.whole

    def on_gradient(self, call: Callable[[], None]) -> Any:
        """Do nothing: the module whose weight this is says when a gradient is complete."""
        del call
