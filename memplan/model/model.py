"""A model as a reader hands it over: its shapes, its tensors, and how a file stores them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from memplan.documents.frozen_values import dataclass
from memplan.model.inventory import Inventory
from memplan.model.parameter_tensors import inventory_of
from memplan.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Storage:
    """What a file holds of a model, exact to the byte."""

    bytes_by_format: Mapping[str, int]  # Bytes of tensor data by format name (``q4-0``, ``bf16``, ...)
    tensors: int  # Number of tensors in the file or files

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors, without headers and padding."""
        return sum(self.bytes_by_format.values())


@dataclass(frozen=True, slots=True)
class Model:
    """A model and where it came from."""

    spec: ModelSpec  # Its shapes
    inventory: Inventory  # Its parameter tensors
    source: str  # File, directory or catalog entry that it was read from
    quantization: str | None = None  # Format that the released weights are quantised in, or None
    storage: Storage | None = None  # What the file holds, where a file was read; else None
    notes: tuple[str, ...] = field(default=())  # What a reader assumed or left out, one sentence each

    @property
    def has_experts(self) -> bool:
        """Whether it has routed experts."""
        return any(tensor.role == "expert_matrix" for tensor in self.inventory)

    @classmethod
    def from_spec(cls, spec: ModelSpec, source: str) -> Model:
        """Return the model whose inventory follows from ``spec`` alone."""
        return cls(spec, inventory_of(spec), source)
