"""How a reference model runs: its kernels, its dtypes, and what it reports while it does."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from memplan.catalog.entries import StorageFormat
from memplan.catalog.kernel_profiles import KernelProfile
from memplan.catalog.training_config import Adapter, CheckpointedLayers, Checkpointing
from memplan.model.inventory import Role

BUNDLED = KernelProfile()

Target = Literal["cuda", "cpu"]

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8-e4m3": torch.float8_e4m3fn,
    "fp8-e5m2": torch.float8_e5m2,
}
"""Names of formats that are dtypes of torch."""


@dataclass(frozen=True, slots=True)
class ReferenceOptions:
    """What decides which tensors a reference model makes."""

    profile: KernelProfile = BUNDLED  # Implementation of each operation
    compute_dtype: torch.dtype = torch.bfloat16  # Dtype of matrix products
    autocast: bool = False  # Weights are wider than ``compute_dtype`` and are cast as CUDA's autocast does
    checkpointing: Checkpointing = "none"  # What a layer keeps for backward
    checkpointed_layers: CheckpointedLayers = CheckpointedLayers()  # Which layers that is said of
    dropout: float = 0.0  # Probability, after the embedding and before each residual addition
    attention_dropout: float = 0.0  # Probability on attention weights
    target: Target = "cuda"  # Whose kernels run; on ``meta`` tensors those of the target are imitated
    # Dtype of the weights by role; roles that are missing have the compute dtype.
    dtypes: Mapping[Role, torch.dtype] = field(default_factory=dict)
    # Block format of the weights by role, for roles that are stored as codes.
    coded: Mapping[Role, StorageFormat] = field(default_factory=dict)
    adapter: Adapter | None = None  # Adapters, beside which all other weights are frozen

    @property
    def trains_weights(self) -> bool:
        """Whether the model's own weights are trained."""
        return self.adapter is None

    @property
    def adapter_dtype(self) -> torch.dtype:
        """Dtype of the adapters' matrices."""
        return TORCH_DTYPES[self.adapter.dtype] if self.adapter and self.adapter.dtype else self.compute_dtype

    def weight_dtype(self, role: Role) -> torch.dtype:
        """Return the dtype of float weights of ``role``."""
        return self.dtypes.get(role, self.compute_dtype)

    def stored_bytes(self, shape: tuple[int, ...], role: Role) -> int | None:
        """Return the bytes of a weight's codes, or None for a weight that is stored as it is.

        Vectors, and rows that do not divide into blocks, are stored as they are.
        """
        layout = self.coded.get(role)
        if layout is None or len(shape) < 2 or (layout.blocking == "row" and shape[-1] % layout.block_elements):
            return None
        return layout.tensor_storage_bytes(prod(shape))


class Probe(Protocol):
    """What watches a reference model run; the model itself does nothing differently."""

    def backward_reaches(self, tensor: Tensor, instant: str) -> None:
        """Note that backward is at ``instant`` from when the gradient of ``tensor`` is known."""

    def section(self, name: str) -> None:
        """Note that forward enters the part called ``name``."""

    def recomputing(self, begins: bool) -> None:
        """Note that a checkpointed part begins or ends to run, for the first time or again."""

    def weight_copy(self, tensor: Tensor) -> None:
        """Note that ``tensor`` is a copy of a weight in the compute dtype."""


class NoProbe:
    """Watches nothing."""

    def section(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    backward_reaches = recomputing = weight_copy = section


class Runtime:
    """What the parts of one model share while it runs: options, the probe and autocast's cache.

    CUDA's autocast casts the weights of a matrix product once and keeps the copies until the
    outermost region ends; activations and frozen weights are cast at every call.

    Source:
        ``cached_cast`` in aten/src/ATen/autocast_mode.cpp: only leaves in fp32 that require
        gradients are cached. ``meta`` tensors have no autocast, hence this explicit one.
    """

    def __init__(self, options: ReferenceOptions) -> None:
        self.options = options
        self.probe: Probe = NoProbe()
        self.coded: dict[int, Any] = {}
        self._casts: dict[int, Tensor] = {}
        self._depth = 0

    @contextmanager
    def autocast_region(self) -> Iterator[None]:
        """Keep cast weights until the outermost region ends."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._casts.clear()

    def lowered(self, tensor: Tensor) -> Tensor:
        """Return ``tensor`` in the dtype of matrix products."""
        if not self.options.autocast or tensor.dtype == self.options.compute_dtype:
            return tensor
        if not (tensor.is_leaf and tensor.requires_grad and tensor.dtype == torch.float32 and self._depth):
            copy = tensor.to(self.options.compute_dtype)
            if isinstance(tensor, torch.nn.Parameter):
                self.probe.weight_copy(copy)
            return copy
        if id(tensor) not in self._casts:
            self._casts[id(tensor)] = tensor.to(self.options.compute_dtype)
            self.probe.weight_copy(self._casts[id(tensor)])
        return self._casts[id(tensor)]

    def full(self, tensor: Tensor) -> Tensor:
        """Return ``tensor`` in fp32 under autocast, for operations that autocast runs in fp32."""
        return tensor.float() if self.options.autocast else tensor
