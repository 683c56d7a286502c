"""The optimizers of a training setup, with the implementation that its kernel profile asks for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Muon

from memplan.catalog.entries import Optimizer as OptimizerEntry
from memplan.catalog.entries import StateSlot
from memplan.lab.bundled import BundledUpdate, is_bundled
from memplan.lab.gradients import Trained
from memplan.training.kernels import KernelProfile
from memplan.units import ceil_div

LEARNING_RATE = 1e-3

_MODULES_THAT_ASK = ("torch.utils._foreach_utils", "torch.optim.optimizer", "torch.nn.utils.clip_grad")
_FLOAT_BYTES = {torch.float32: 4, torch.bfloat16: 2, torch.float16: 2}


class Update(Protocol):
    """What steps some of the weights.

    Attributes:
        note: What of it is not traced.
        on_host: Whether all its states lie in host memory, whatever device their tensors name.
    """

    note: str
    on_host: bool

    def step(self) -> None:
        """Update the weights from their gradients."""

    def states(self) -> Iterator[tuple[Tensor, str]]:
        """Yield every tensor that is kept, with its name."""


@contextmanager
def cuda_optimizer_paths() -> Iterator[None]:
    """Let ``foreach`` and ``fused`` optimizers run on ``meta`` tensors, as they do on CUDA's."""
    modules: list[Any] = [import_module(name) for name in _MODULES_THAT_ASK]
    names = ("_get_fused_kernels_supported_devices", "_get_foreach_kernels_supported_devices")
    saved = [(module, name, getattr(module, name)) for module in modules for name in names if hasattr(module, name)]
    for module, name, original in saved:
        setattr(module, name, lambda original=original: [*original(), "meta"])
    try:
        yield
    finally:
        for module, name, original in saved:
            setattr(module, name, original)


class TorchUpdate:
    """One of torch's own optimizers."""

    note = ""
    on_host = False

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        """Update the parameters from their gradients."""
        self.optimizer.step()

    def states(self) -> Iterator[tuple[Tensor, str]]:
        """Yield every tensor in the optimizer's state."""
        for state in self.optimizer.state.values():
            yield from ((value, key) for key, value in state.items() if isinstance(value, Tensor))


class StatesOnly:
    """States of a catalog entry, byte for byte, whose update allocates nothing here."""

    def __init__(
        self, name: str, entry: OptimizerEntry, weights: Sequence[Trained], *, fused: bool, on_host: bool = False
    ) -> None:
        self.on_host = on_host
        self.note = "" if entry.step == "in-place" else f"temporaries of the {name} update are not traced"
        self._states = [item for weight in weights for item in _state_tensors(entry, weight, fused)]
        if entry.shared_bytes:
            shared = torch.empty(entry.shared_bytes, dtype=torch.uint8, device=weights[0].tensor.device)
            self._states.append((shared, "shared"))

    def step(self) -> None:
        """Do nothing."""

    def states(self) -> Iterator[tuple[Tensor, str]]:
        """Yield the states."""
        yield from self._states


def _state_tensors(entry: OptimizerEntry, weight: Trained, fused: bool) -> Iterator[tuple[Tensor, str]]:
    elements = torch.Size(weight.shape).numel()
    exempt = elements < entry.exempt_below or elements % entry.exempt_unless_multiple
    for slot in entry.exempt_slots if exempt else entry.slots:
        if slot.dimensions == ("more" if len(weight.shape) < 2 else "one"):
            continue
        aside = slot.device == "host" or (slot.device == "device-if-fused" and not fused)
        device = torch.device("cpu") if aside else weight.tensor.device
        yield torch.empty(_slot_bytes(slot, weight), dtype=torch.uint8, device=device), slot.name


def _slot_bytes(slot: StateSlot, weight: Trained) -> int:
    elements = torch.Size(weight.shape).numel()
    if slot.layout == "rows":
        elements //= weight.shape[-1]
    elif slot.layout == "columns":
        elements //= weight.shape[-2] if len(weight.shape) > 1 else 1
    elif slot.layout == "scalar":
        elements = 1
    if slot.as_parameter:
        return elements * weight.tensor.element_size()
    return ceil_div(elements, slot.block_elements) * slot.block_bytes + slot.tensor_bytes


def update_of(
    name: str,
    entry: OptimizerEntry,
    weights: Sequence[Trained],
    profile: KernelProfile,
    masters: Sequence[Tensor],
    staged: int = 0,
) -> Update:
    """Return what steps ``weights`` under the optimizer called ``name``.

    Args:
        name: Catalog name.
        entry: Catalog entry.
        weights: The weights that it takes.
        profile: Says which of torch's implementations runs.
        masters: Master weights, which are updated in the weights' place; empty for none.
        staged: Buffers that states in host memory pass through, stretch by stretch; 0 where they lie on the device.
    """
    tensors = list(masters) or [weight.tensor for weight in weights]
    ways: dict[str, Any] = {"foreach": profile.optimizer == "foreach", "fused": profile.optimizer == "fused"}
    if (
        not staged
        and all(tensor.dtype in _FLOAT_BYTES for tensor in tensors)
        and (masters or all(map(_plain, weights)))
    ):
        same_width = _state_width(entry) == {tensor.element_size() for tensor in tensors}
        if entry.algorithm == "adamw" and entry.step == "torch" and same_width:
            return TorchUpdate(AdamW(tensors, lr=LEARNING_RATE, **ways))
        if entry.algorithm == "sgd":
            momentum = 0.9 if entry.slots else 0.0
            # The fused kernel has no meta form; like foreach it updates in place.
            foreach = profile.optimizer != "for-loop"
            return TorchUpdate(SGD(tensors, lr=LEARNING_RATE, momentum=momentum, foreach=foreach))
        if entry.algorithm == "muon" and profile.newton_schulz == "torch" and all(t.ndim == 2 for t in tensors):
            return TorchUpdate(Muon(tensors, lr=LEARNING_RATE))
    if not masters and is_bundled(name, entry, weights, profile):
        return BundledUpdate(name, entry, weights, profile, staged)
    return StatesOnly(name, entry, weights, fused=profile.optimizer == "fused", on_host=staged > 0)


def _plain(weight: Trained) -> bool:
    """Tell whether torch's optimizers can take a weight: a parameter with a gradient of its own dtype."""
    return weight.weight is None and weight.keeps in (None, weight.tensor.dtype)


def _state_width(entry: OptimizerEntry) -> set[int]:
    return {slot.block_bytes for slot in entry.slots if slot.layout == "elementwise" and slot.block_elements == 1}
