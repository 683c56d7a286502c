"""The optimizers of a training setup, with the implementation that its kernel profile asks for."""

from ast import literal_eval
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from inspect import signature
from typing import Any, Protocol

import torch
from torch import Tensor

from memplan.catalog import entries
from memplan.catalog.kernel_profiles import OptimizerKernel
from memplan.catalog.update_classes import BUNDLED, NO_UPDATE, UNTRACED, UPDATE_CLASSES
from memplan.errors import CannotAnswerError
from memplan.step.states.update_algorithms import depends_on_kernel
from memplan.step.tensors.update_kernels import Updated, is_exempt, slot_bytes, stepper
from memplan.trace.jobs.bundled_optimizer import BundledUpdate
from memplan.trace.jobs.gradient_lifetimes import Trained
from memplan.trace.jobs.reference_optimizers import AdamMini, BlockwiseAdamw, Lion, PagedAdamw
from memplan.trace.recording.valueless_tensors import AnyNumber
from memplan.trace.reference.run_options import TORCH_DTYPES
from memplan.training.resolved import TrainingSetup

LEARNING_RATE = 1e-3

_MODULES_THAT_ASK = ("torch.utils._foreach_utils", "torch.optim.optimizer", "torch.nn.utils.clip_grad")
_DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


class Update(Protocol):
    """What steps some of the weights."""

    note: str  # What is not traced, in a sentence
    on_host: bool  # Whether all its states are in host memory, whatever device their tensors name

    def step(self) -> None:
        """Update the weights from their gradients."""

    def states(self) -> Iterator[tuple[Tensor, str]]:
        """Yield every state tensor, with its name."""


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


class ClassUpdate:
    """The class that an entry names; tensors without memory have any number that it reads on the host."""

    note = ""
    on_host = False

    def __init__(self, name: str, entry: entries.Optimizer, optimizer: torch.optim.Optimizer) -> None:
        self.name, self.entry, self.optimizer = name, entry, optimizer

    def step(self) -> None:
        """Update the parameters from their gradients."""
        with AnyNumber():  # type: ignore[no-untyped-call]
            self.optimizer.step()
        self._refuse_unnamed_states()

    def _refuse_unnamed_states(self) -> None:
        """Refuse an optimizer of a user's own that keeps tensors which its entry does not name."""
        if self.entry.implementation in UPDATE_CLASSES:
            return
        named = {slot.name for slot in (*self.entry.slots, *self.entry.exempt_slots)}
        unnamed = sorted({key for _, key in self.states()} - named)
        if unnamed:
            raise CannotAnswerError(
                f"optimizer {self.name}: {self.entry.implementation} keeps {', '.join(unnamed)}, which its entry has no slot for"
            )

    def states(self) -> Iterator[tuple[Tensor, str]]:
        """Yield every tensor in the optimizer's state."""
        for state in self.optimizer.state.values():
            yield from ((value, key) for key, value in state.items() if isinstance(value, Tensor))


class StatesOnly:
    """States of a catalog entry, byte for byte, whose update is not traced."""

    on_host = False

    def __init__(self, name: str, entry: entries.Optimizer, tensors: Sequence[Tensor]) -> None:
        self.note = f"scratch of the {name} update is not traced"
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
        masters: Master weights, which are updated in the weights' place; empty for none.
        staged: Buffers that states in host memory pass through, stretch by stretch; 0 where they are on the device.

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
        return BundledUpdate(name, entry, weights, setup, staged)
    tensors = [weight.tensor for weight in weights]
    if kind in (UNTRACED, NO_UPDATE):
        return StatesOnly(name, entry, tensors)
    return ClassUpdate(name, entry, _optimizer(name, kind, entry, tensors, setup.profile.optimizer))


def _optimizer(
    name: str, kind: str, entry: entries.Optimizer, tensors: list[Tensor], kernel: OptimizerKernel
) -> torch.optim.Optimizer:
    """Return an optimizer of the class called ``kind``, with its kernel and the options of the entry."""
    chosen = _REFERENCES.get(kind) or _imported(name, kind)
    options: dict[str, Any] = {"lr": LEARNING_RATE}
    if kind == entry.implementation:
        options |= {key: _option(value) for key, value in entry.options.items()}
    takes = signature(chosen).parameters
    if entry.step == "torch" and "foreach" in takes:
        # Fused kernels of SGD have no meta form; like foreach it updates in place.
        fused = kernel == "fused" and "fused" in takes and depends_on_kernel(entry)
        options |= {"foreach": kernel != "for-loop" and not fused} | ({"fused": fused} if "fused" in takes else {})
    try:
        return chosen(tensors, **options)
    except (TypeError, ValueError) as error:
        raise CannotAnswerError(f"optimizer {name}: {kind} does not take its options: {error}") from None


def _option(value: bool | int | str) -> Any:
    """Return an option of a class; decimals stand as text in an entry."""
    try:
        return literal_eval(value) if isinstance(value, str) else value
    except (SyntaxError, ValueError):
        return value


def _imported(name: str, kind: str) -> type[torch.optim.Optimizer]:
    """Return the class that an entry names by its path."""
    module, _, last = kind.rpartition(".")
    try:
        chosen = getattr(import_module(module), last)
    except (ImportError, AttributeError, ValueError) as error:
        raise CannotAnswerError(f"optimizer {name}: {kind} cannot be imported, and so not traced: {error}") from None
    if not (isinstance(chosen, type) and issubclass(chosen, torch.optim.Optimizer)):
        raise CannotAnswerError(f"optimizer {name}: {kind} is no torch.optim.Optimizer")
    return chosen


_REFERENCES: dict[str, Any] = {
    "adam_mini.Adam_mini": AdamMini,
    "bitsandbytes.optim.AdamW8bit": BlockwiseAdamw,
    "bitsandbytes.optim.PagedAdamW": PagedAdamw,
    "lion_pytorch.Lion": Lion,
}
"""Classes that are told here, so that tracing them needs no such package."""


def _updated(weight: Trained, setup: TrainingSetup) -> Updated:
    """Return what an update is given of a weight, as the formula says it (:func:`memplan.step.tensors.tensor_states.updated`)."""
    coded = weight.weight is not None
    own = setup.config.compute_dtype if coded else _DTYPE_NAMES[weight.tensor.dtype]
    gradient = own if weight.keeps is None else _DTYPE_NAMES[weight.keeps]
    stored = setup.format_names[weight.role] if coded else own
    codec = setup.formats[weight.role].codec if coded else None
    return Updated(stored, gradient, len(weight.shape), coded, codec)
