"""The optimizers of a training setup, with the implementation that its kernel profile asks for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import SGD, Adafactor, AdamW, Muon
from torch.utils._python_dispatch import TorchDispatchMode

from memplan.catalog import entries
from memplan.catalog.kernel_profiles import OptimizerKernel
from memplan.step.states.model_states import is_exempt, slot_bytes
from memplan.step.states.update_kernels import BUNDLED, Updated, stepper
from memplan.trace.jobs.bundled_optimizer import BundledUpdate
from memplan.trace.jobs.gradient_lifetimes import Trained
from memplan.trace.jobs.reference_optimizers import AdamMini, BlockwiseAdamw, Lion
from memplan.trace.reference.run_options import TORCH_DTYPES
from memplan.training.resolved import TrainingSetup

LEARNING_RATE = 1e-3

_MODULES_THAT_ASK = ("torch.utils._foreach_utils", "torch.optim.optimizer", "torch.nn.utils.clip_grad")
_DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


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


class AdafactorUpdate(TorchUpdate):
    """torch.optim.Adafactor, which reads norms of the weights on the host."""

    def step(self) -> None:
        """Update the parameters; tensors without memory have a norm of one."""
        with _AnyNumber():  # type: ignore[no-untyped-call]
            self.optimizer.step()


class _AnyNumber(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets ``item()`` of a tensor without memory return one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return 1.0
        return func(*args, **(kwargs or {}))


class StatesOnly:
    """States of a catalog entry, byte for byte, whose update is not traced."""

    on_host = False

    def __init__(self, name: str, entry: entries.Optimizer, tensors: Sequence[Tensor]) -> None:
        self.note = f"temporaries of the {name} update are not traced"
        self._states = [item for tensor in tensors for item in _state_tensors(entry, tensor)]
        if entry.shared_bytes and not all(is_exempt(entry, tuple(tensor.shape)) for tensor in tensors):
            shared = torch.empty(entry.shared_bytes, dtype=torch.uint8, device=tensors[0].device)
            self._states.append((shared, "shared"))

    def step(self) -> None:
        """Do nothing."""

    def states(self) -> Iterator[tuple[Tensor, str]]:
        """Yield the states."""
        yield from self._states


def _state_tensors(entry: entries.Optimizer, tensor: Tensor) -> Iterator[tuple[Tensor, str]]:
    shape = tuple(tensor.shape)
    for slot in entry.exempt_slots if is_exempt(entry, shape) else entry.slots:
        if slot.dimensions == ("more" if len(shape) < 2 else "one"):
            continue
        device = torch.device("cpu") if slot.device != "device" else tensor.device
        size = slot_bytes(slot, shape, tensor.element_size())
        yield torch.empty(size, dtype=torch.uint8, device=device), slot.name


def update_of(
    name: str,
    entry: entries.Optimizer,
    weights: Sequence[Trained],
    setup: TrainingSetup,
    masters: Sequence[Tensor],
    staged: int = 0,
) -> Update:
    """Return what steps ``weights`` under the optimizer called ``name``.

    Args:
        name: Catalog name.
        entry: Catalog entry.
        weights: The weights that it takes.
        setup: Says which of torch's implementations runs.
        masters: Master weights, which are updated in the weights' place; empty for none.
        staged: Buffers that states in host memory pass through, stretch by stretch; 0 where they lie on the device.

    Raises:
        CannotAnswerError: Nothing updates them so.
    """
    kind = stepper(setup, name, entry, {_updated(weight, setup) for weight in weights})
    if masters:
        for weight in weights:
            weight.keep_narrow_gradients()
        weights = [
            Trained(weight.name, weight.role, weight.shape, master, None, None)
            for weight, master in zip(weights, masters, strict=True)
        ]
    if kind == BUNDLED:
        return BundledUpdate(name, entry, weights, setup.profile, staged)
    tensors = [weight.tensor for weight in weights]
    if kind == "untraced":
        return StatesOnly(name, entry, tensors)
    if kind == "torch.optim.Adafactor":
        return AdafactorUpdate(Adafactor(tensors, lr=LEARNING_RATE))
    return TorchUpdate(_optimizer(kind, entry, tensors, setup.profile.optimizer))


def _optimizer(
    kind: str, entry: entries.Optimizer, tensors: list[Tensor], kernel: OptimizerKernel
) -> torch.optim.Optimizer:
    """Return an optimizer of the class called ``kind``."""
    if kind == "torch.optim.AdamW":
        return AdamW(tensors, lr=LEARNING_RATE, foreach=kernel == "foreach", fused=kernel == "fused")
    if kind == "torch.optim.SGD":
        # The fused kernel has no meta form; like foreach it updates in place.
        momentum = 0.9 if entry.slots else 0.0
        return SGD(tensors, lr=LEARNING_RATE, momentum=momentum, foreach=kernel != "for-loop")
    chosen: type[torch.optim.Optimizer] = _OTHERS[kind]
    return chosen(tensors, lr=LEARNING_RATE)  # type: ignore[call-arg]


_OTHERS: dict[str, Any] = {
    "adam_mini.Adam_mini": AdamMini,
    "bitsandbytes.optim.AdamW8bit": BlockwiseAdamw,
    "lion_pytorch.Lion": Lion,
    "torch.optim.Muon": Muon,
}


def _updated(weight: Trained, setup: TrainingSetup) -> Updated:
    """Return what an update is given of a weight, as the formula says it (:func:`memplan.step.states.model_states.updated`)."""
    coded = weight.weight is not None
    own = setup.config.compute_dtype if coded else _DTYPE_NAMES[weight.tensor.dtype]
    gradient = own if weight.keeps is None else _DTYPE_NAMES[weight.keeps]
    stored = setup.format_names[weight.role] if coded else own
    codec = setup.formats[weight.role].codec if coded else None
    return Updated(stored, gradient, len(weight.shape), coded, codec)
