"""Metadata and tensors of a whole GGUF file, as checked values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memplan.documents.frozen_values import dataclass
from memplan.errors import CannotAnswerError, InvalidFileError
from memplan.model.readers.gguf_types import TensorInfo


@dataclass(frozen=True, slots=True)
class GgufValues:
    """Metadata and tensors of a whole file, all its parts joined."""

    where: str  # How messages call the file
    architecture: str  # ``general.architecture``, which begins the names of the model's keys
    metadata: Mapping[str, Any]  # Values by key
    tensors: Mapping[str, TensorInfo]  # Tensors by name

    def optional(self, key: str, minimum: int = 1) -> int | None:
        """Return the integer under ``key``, or None where it is absent; a list of equal ones counts as one.

        Raises:
            CannotAnswerError: The value differs from layer to layer.
            InvalidFileError: It is no integer, or out of range.
        """
        full = f"{self.architecture}.{key}"
        value = self.metadata.get(full)
        if value is None:
            return None
        if isinstance(value, tuple) and value:
            if any(item != value[0] for item in value):
                raise CannotAnswerError(f"{self.where}: {full} differs from layer to layer, which is not modelled")
            value = value[0]
        if type(value) is not int or not minimum <= value < 2**31:
            wanted = f"expected an integer from {minimum} to 2**31"
            raise InvalidFileError([f"{self.where}: {full}: {wanted}, got {value!r:.60}"])
        return value

    def required(self, key: str) -> int:
        """Return the integer under ``key``."""
        value = self.optional(key)
        if value is None:
            raise InvalidFileError([f"{self.where}: metadata key {self.architecture}.{key} is missing"])
        return value

    def number(self, key: str) -> float | None:
        """Return the number under ``key``, or None where it is absent or none."""
        value = self.metadata.get(f"{self.architecture}.{key}")
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None

    def has(self, tensor: str) -> bool:
        """Tell whether the file holds a tensor of this name in any layer (``{}`` stands for the index)."""
        if "{}" not in tensor:
            return tensor in self.tensors
        return any(tensor.replace("{}", str(index)) in self.tensors for index in range(self.required("block_count")))

    def width(self, tensor: str) -> int | None:
        """Return the second dimension of the first layer's tensor of this name, or None."""
        for index in range(self.required("block_count")):
            info = self.tensors.get(tensor.replace("{}", str(index)))
            if info is not None and len(info.dimensions) > 1:
                return info.dimensions[1]
        return None

    @property
    def layers(self) -> int:
        """Layers without the modules for multi-token prediction, which some files count among them."""
        return self.required("block_count") - (self.optional("nextn_predict_layers", minimum=0) or 0)

    @property
    def key_length(self) -> int:
        """Width of one head."""
        return self.optional("attention.key_length") or max(
            self.required("embedding_length") // self.required("attention.head_count"), 1
        )


def text(value: Any) -> str:
    """Return a metadata text fit to print: one line without control characters; empty for anything else."""
    if not isinstance(value, str):
        return ""
    return "".join(character if character.isprintable() else " " for character in value).strip()
