"""The optimizers of a training setup, with the implementation that its kernel profile asks for."""

from ast import literal_eval
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from inspect import signature
from math import sqrt
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from memplan.catalog import entries
from memplan.catalog.kernel_profiles import OptimizerKernel
from memplan.catalog.update_classes import BUNDLED, NO_UPDATE, UNTRACED, UPDATE_CLASSES
from memplan.errors import CannotAnswerError
from memplan.step.states.update_algorithms import depends_on_kernel
from memplan.step.tensors.update_kernels import PAGED_FROM, Updated, is_exempt, slot_bytes, stepper
from memplan.trace.jobs.bundled_optimizer import BundledUpdate, state_tensors
from memplan.trace.jobs.gradient_lifetimes import Trained
from memplan.trace.recording.valueless_tensors import AnyNumber
from memplan.trace.reference.run_options import TORCH_DTYPES
from memplan.training.resolved import TrainingSetup

BLOCK_ELEMENTS = 256
EXEMPT_BELOW = 4096
"""Of bitsandbytes' 8-bit states (``min_8bit_size``)."""


class _Plain(Optimizer):
    """An optimizer with one set of options."""

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def _with_gradients(self) -> Iterator[tuple[Tensor, Tensor, dict[str, Any], float]]:
        """Yield each parameter that has a gradient, the gradient, its state, and the learning rate."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    yield parameter, parameter.grad, self.state[parameter], group["lr"]


class Lion(_Plain):
    """Lion.

    Source:
        lion_pytorch/lion_pytorch.py (0.2.5), ``update_fn`` and ``Lion.step``; https://arxiv.org/abs/2302.06675.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        del closure
        for parameter, gradient, state, rate in self._with_gradients():
            if not state:
                state["exp_avg"] = torch.zeros_like(parameter)
            lion_(parameter, gradient, state["exp_avg"], rate)


def lion_(parameter: Tensor, gradient: Tensor, average: Tensor, rate: float) -> None:
    """Update one parameter: a step by the sign of momentum and gradient."""
    beta1, beta2 = 0.9, 0.99
    update = average.clone().mul_(beta1).add(gradient, alpha=1 - beta1).sgn_()
    parameter.add_(update, alpha=-rate)
    average.mul_(beta2).add_(gradient, alpha=1 - beta2)


class AdamMini(_Plain):
    """Adam-mini with one second moment for each row of a matrix, and one for a whole vector.

    The package takes one for each head of queries and keys, and one for each element of a bias, where
    it knows them by their names; emptying its ``wqk_names`` and ``adam_block_names`` gives this.

    Source:
        adam_mini/adam_mini.py (1.1.1), ``Adam_mini.step``; https://arxiv.org/abs/2406.16793.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter; a variable's tensor lives until the next parameter's replaces it."""
        del closure
        beta1, beta2, epsilon = 0.9, 0.999, 1e-8
        for parameter, gradient, state, rate in self._with_gradients():
            if not state:
                state["m"] = torch.zeros_like(parameter)
                state["step"] = 0
                state["vmean"] = torch.zeros_like(state["m"][..., 0:1] if parameter.ndim > 1 else state["m"][0])
            if parameter.ndim > 1:
                squared = torch.mean(gradient * gradient, dim=-1, keepdim=True)
            else:
                squared = torch.sum(gradient * gradient)
                squared = squared / gradient.numel()
            state["step"] += 1
            state["m"].lerp_(gradient, 1 - beta1)
            correction1, correction2 = 1 - beta1 ** state["step"], sqrt(1 - beta2 ** state["step"])
            state["vmean"].mul_(beta2).add_(squared, alpha=1 - beta2)
            divisor = (state["vmean"].sqrt() / correction2).add_(epsilon)
            stepsize = (1 / correction1) / divisor
            update = state["m"] * stepsize
            update.mul_(rate)
            parameter.add_(-update)


class Bitsandbytes(_Plain):
    """The tensors of bitsandbytes' optimizers, whose kernels write where they are: no update is computed here.

    Two lookup tables serve all parameters of an optimizer; its host copies are freed before a step.

    Source:
        bitsandbytes/optim/optimizer.py (0.50.2), ``Optimizer2State.init_state``, ``get_state_buffer`` and ``update_step``;
        bitsandbytes/backends/cuda/ops.py, ``_optimizer_update_8bit_blockwise_impl`` allocates nothing.
    """

    def __init__(
        self, params: Iterable[Tensor], lr: float, moments: str = "12", bits: int = 32, paged: bool = False
    ) -> None:
        super().__init__(params, lr)
        self._moments, self._bits, self._paged = moments, bits, paged
        self._tables: dict[str, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Make the states of parameters that have none."""
        del closure
        for parameter, _, state, _ in self._with_gradients():
            if not state:
                self._initialise(parameter, state)

    def _initialise(self, parameter: Tensor, state: dict[str, Any]) -> None:
        eight_bit = self._bits == 8 and parameter.numel() >= EXEMPT_BELOW
        dtype = torch.uint8 if eight_bit else torch.float32
        paged = self._paged and parameter.numel() >= PAGED_FROM
        for number in self._moments:
            made = _on_host(parameter, parameter.shape, dtype) if paged else torch.empty_like(parameter, dtype=dtype)
            state[f"state{number}"] = made
            if eight_bit:
                if number not in self._tables:
                    self._tables[number] = torch.zeros(2**8, device=parameter.device)
                state[f"qmap{number}"] = self._tables[number]
        for number in self._moments if eight_bit else ():
            blocks = -(-parameter.numel() // BLOCK_ELEMENTS)
            state[f"absmax{number}"] = torch.zeros(blocks, device=parameter.device)


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
        return state_tensors(self.optimizer)


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
        size = (slot_bytes(slot, shape, tensor.element_size()),)
        here = slot.device == "device"
        made = (
            torch.empty(size, dtype=torch.uint8, device=tensor.device) if here else _on_host(tensor, size, torch.uint8)
        )
        yield made, slot.name


def _on_host(weight: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a state in host memory; in a trace one number stands for all, as this machine may have less than they take."""
    if not weight.is_meta:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.zeros((), dtype=dtype, device="cpu").expand(shape)


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
    "bitsandbytes.optim.AdamW8bit": partial(Bitsandbytes, bits=8),
    "bitsandbytes.optim.Lion": partial(Bitsandbytes, moments="1"),
    "bitsandbytes.optim.PagedAdamW": partial(Bitsandbytes, paged=True),
    "bitsandbytes.optim.PagedAdamW8bit": partial(Bitsandbytes, bits=8, paged=True),
    "bitsandbytes.optim.PagedLion": partial(Bitsandbytes, moments="1", paged=True),
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
