"""Scratch memory of updates as they are published, each told once, in the order in which its code allocates and frees.

A rule goes through the tensors as the code does, and calls what makes the states of one in the first step where its code
does. Python keeps what a variable of its loop names until the next tensor replaces it, so what is left of one tensor counts
while the next is updated. Written to a stream, a rule gives the events of an update; counted, the most that it takes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from math import prod
from typing import NamedTuple, Protocol

from memplan.catalog.entries import Form, Optimizer, UpdateScratch
from memplan.catalog.kernel_profiles import OptimizerKernel
from memplan.catalog.update_classes import UPDATE_CLASSES
from memplan.errors import CannotAnswerError
from memplan.step.tensors.tensor_states import TensorStates
from memplan.step.tensors.update_kernels import Stepper
from memplan.training.resolved import FLOAT_BYTES, TrainingSetup

Scratch = tuple[int, str]
"""Bytes, and how they come about."""

MakeStates = Callable[[int], None]
"""Makes the states of the tensor of that place, where it has none."""


class Storages(Protocol):
    """Takes what an update allocates and frees."""

    def allocate(self, size: int, /) -> int:
        """Allocate so many bytes; return the storage's name."""

    def allocate_all(self, sizes: Iterable[int], /) -> list[int]:
        """Allocate several storages, in order."""

    def free(self, storage: int, /) -> None:
        """Free a storage."""

    def free_all(self, storages: Iterable[int], /) -> None:
        """Free several storages."""

    def passing(self, *sizes: int) -> None:
        """Allocate storages one after the other, then free them."""


class _Most:
    """Counts what is allocated, and the most of it at once."""

    def __init__(self) -> None:
        self.most = self._live = 0
        self._sizes: list[int] = []

    def allocate(self, size: int) -> int:
        self._sizes.append(size)
        self._live += size
        self.most = max(self.most, self._live)
        return len(self._sizes) - 1

    def allocate_all(self, sizes: Iterable[int]) -> list[int]:
        return [self.allocate(size) for size in sizes]

    def free(self, storage: int) -> None:
        self._live -= self._sizes[storage]

    def free_all(self, storages: Iterable[int]) -> None:
        self._live -= sum(self._sizes[storage] for storage in storages)

    def passing(self, *sizes: int) -> None:
        self.most = max(self.most, self._live + sum(sizes))


class _Variables:
    """Variables of a loop: each keeps its storage until another is assigned to it."""

    def __init__(self, stream: Storages) -> None:
        self._stream = stream
        self._storages: dict[str, int] = {}

    def assign(self, name: str, storage: int) -> None:
        """Let a variable name a storage, and let go of the one that it named."""
        if name in self._storages:
            self._stream.free(self._storages[name])
        self._storages[name] = storage

    def release(self, name: str) -> None:
        """Let go of what a variable names, if it names anything."""
        if name in self._storages:
            self._stream.free(self._storages.pop(name))

    def end(self) -> None:
        """Let go of all, the first that was named first."""
        self._stream.free_all(self._storages.values())


def run_of(entry: TensorStates) -> tuple[int, int]:
    """Return what tells the run of equal layers that a tensor lies in."""
    return (entry.tensor.first, entry.tensor.count)


def _in_order(group: list[TensorStates]) -> Iterator[TensorStates]:
    """Yield tensors layer by layer; of many equal layers two show what all do one after the other."""
    for (_, count), run in groupby(group, key=run_of):
        yield from [*run] * min(count, 2)


def _bytes(entry: TensorStates) -> int:
    return entry.tensor.elements * FLOAT_BYTES[entry.format_name]


def kinds(entries: Sequence[TensorStates]) -> list[TensorStates]:
    """Return the first of the tensors that are alike."""
    return list({(entry.tensor.role, entry.tensor.shape): entry for entry in reversed(entries)}.values())[::-1]


def _made(entries: Sequence[TensorStates], make: MakeStates) -> None:
    """Make the states of all tensors, as optimizers do that gather a group before they update it."""
    for place in range(len(entries)):
        make(place)


def _in_place(stream: Storages, entries: Sequence[TensorStates], kernel: OptimizerKernel, make: MakeStates) -> None:
    """Write nothing but states: the update's kernels write where the states and the weights are."""
    # Source: torch/optim/sgd.py (v2.13.0), ``_multi_tensor_sgd`` and ``_single_tensor_sgd`` without weight decay;
    # csrc/kernels.cu of bitsandbytes 0.50.2, ``kOptimizerStatic8bit2StateBlockwise`` and ``kOptimizer32bit2State``.
    del stream, kernel
    _made(entries, make)


def _adamw(stream: Storages, entries: Sequence[TensorStates], kernel: OptimizerKernel, make: MakeStates) -> None:
    """Write the square roots of torch.optim.AdamW."""
    # Source: torch/optim/adam.py (v2.13.0): ``_multi_tensor_adam`` holds the square roots of all second moments at
    # once, ``_single_tensor_adam`` one square root and one quotient at a time, while the quotient of the tensor before
    # is still there.
    _made(entries, make)
    if kernel == "foreach":
        stream.passing(*map(_bytes, entries))
    elif kernel == "for-loop":
        variables = _Variables(stream)
        for entry in entries:
            root, quotient = stream.allocate_all([_bytes(entry)] * 2)
            stream.free(root)
            variables.assign("denom", quotient)
        variables.end()


def _torch_muon(stream: Storages, entries: Sequence[TensorStates], kernel: OptimizerKernel, make: MakeStates) -> None:
    """Write what torch.optim.Muon takes for each matrix."""
    # Source: torch/optim/_muon.py (v2.13.0), ``_zeropower_via_newtonschulz``: the update, its bf16 copy where it is not
    # bf16 itself, the next iterate, and two Gram matrices.
    del kernel
    _made(entries, make)
    for entry in kinds(entries):
        m, n = sorted(entry.tensor.shape)
        stream.passing(FLOAT_BYTES[entry.format_name] * m * n, *[2 * m * n] * 2, *[2 * m * m] * 2)


def _lion(stream: Storages, entries: Sequence[TensorStates], kernel: OptimizerKernel, make: MakeStates) -> None:
    """Write the copy of each momentum, and its sum with the gradient (lion_pytorch/lion_pytorch.py, 0.2.5, ``update_fn``)."""
    del kernel
    for place, entry in enumerate(entries):
        make(place)
        copy, total = stream.allocate_all([_bytes(entry)] * 2)
        stream.free_all([copy, total])


def _adafactor(stream: Storages, entries: Sequence[TensorStates], kernel: OptimizerKernel, make: MakeStates) -> None:
    """Write what torch.optim.Adafactor takes; unless told otherwise it goes tensor by tensor."""
    # Source: torch/optim/_adafactor.py (v2.13.0), ``_single_tensor_adafactor``.
    del kernel
    _made(entries, make)
    variables = _Variables(stream)
    for entry in entries:
        size, shape, one = _bytes(entry), entry.tensor.shape, FLOAT_BYTES[entry.format_name]
        stream.passing(one)  # the weight's norm
        if len(shape) > 1:
            variables.assign("row_mean", stream.allocate(size // shape[-1]))
            variables.assign("col_mean", stream.allocate(size // shape[-2]))
            estimate = stream.allocate(size)
            stream.passing(one * prod(shape[:-2]))  # the mean of row_var
        else:
            variables.assign("grad_squared", stream.allocate(size))
            estimate = stream.allocate(size)
        variables.assign("update", estimate)  # which is the estimate itself
        stream.passing(one)  # its norm
    variables.end()


def _adafactor_fp32(stream: Storages, entries: Sequence[TensorStates], _: OptimizerKernel, make: MakeStates) -> None:
    """Write what transformers' Adafactor takes, which copies gradient and weight in fp32 where they have 16 bits."""
    # Source: transformers/optimization.py (5.24.0), ``Adafactor.step`` without first moment and weight decay.
    variables = _Variables(stream)
    for place, entry in enumerate(entries):
        size, shape, narrow = 4 * entry.tensor.elements, entry.tensor.shape, FLOAT_BYTES[entry.format_name] < 4
        for name in ("grad", "p_data_fp32"):
            variables.release(name)
            if narrow:
                variables.assign(name, stream.allocate(size))
            if name == "grad":
                make(place)
        square, total = stream.allocate_all([size] * 2)
        stream.free(square)
        variables.assign("update", total)
        rows, columns = [size // shape[-1], size // shape[-2]] if len(shape) > 1 else [0, 0]
        factors = stream.allocate_all([rows, columns] if rows else [])
        estimate = stream.allocate(size)
        stream.free_all(factors)
        variables.assign("update", estimate)
        stream.passing(size)  # its negative
    variables.end()


def _adam_mini(stream: Storages, entries: Sequence[TensorStates], kernel: OptimizerKernel, make: MakeStates) -> None:
    """Write what Adam-mini takes."""
    # Source: adam_mini/adam_mini.py (1.1.1), ``Adam_mini.step``: the squared gradient, later the update and its
    # negative, beside one number per row in ``tmp_lr``, ``h`` and ``stepsize``.
    del kernel
    variables = _Variables(stream)
    for place, entry in enumerate(entries):
        make(place)
        size, shape = _bytes(entry), entry.tensor.shape
        rows = size // shape[-1]
        square, squared = stream.allocate_all([size, rows])
        stream.free(square)
        variables.assign("squared", squared)
        if len(shape) == 1:
            variables.assign("squared", stream.allocate(rows))
        for name in ("divisor", "stepsize"):
            passing, result = stream.allocate_all([rows] * 2)
            stream.free(passing)
            variables.assign(name, result)
        variables.assign("update", stream.allocate(size))
        stream.passing(size)
    variables.end()


class Rule(NamedTuple):
    """How an update takes scratch memory: its events, and what formulas say of the most of it."""

    write: Callable[[Storages, Sequence[TensorStates], OptimizerKernel, MakeStates], None]
    text: Callable[[list[TensorStates], OptimizerKernel], str]


def _adamw_text(_: list[TensorStates], kernel: OptimizerKernel) -> str:
    if kernel == "fused":
        return IN_PLACE
    if kernel == "foreach":
        return "one square root of every second moment (foreach)"
    return "square root and quotient of a tensor, and the quotient of the one before"


def _muon_text(group: list[TensorStates], _: OptimizerKernel) -> str:
    """Return the formula of the largest matrix, whose larger side is ``n`` and the smaller ``m``."""
    shapes = [(4 + FLOAT_BYTES[entry.format_name], *sorted(entry.tensor.shape)) for entry in group]
    width, m, n = max(shapes, key=lambda shape: shape[0] * shape[1] * shape[2] + 4 * shape[1] ** 2)
    return f"{width} m n + 4 m^2, m = {m}, n = {n}"


IN_PLACE = "0: in place"

RULES: Mapping[Form, Rule] = {
    "adafactor": Rule(
        _adafactor, lambda *_: "update and variance estimate of a tensor, with what is left of the one before"
    ),
    "adafactor-fp32": Rule(
        _adafactor_fp32,
        lambda *_: (
            "fp32 copies of a tensor and its gradient where they are narrow, 2 of its update, 1 of the one before"
        ),
    ),
    "adam-mini": Rule(_adam_mini, lambda *_: "2 x largest tensor (update and its negative), 3 numbers per row"),
    "adamw": Rule(_adamw, _adamw_text),
    "in-place": Rule(_in_place, lambda *_: IN_PLACE),
    "lion": Rule(_lion, lambda *_: "2 x largest tensor (scaled momentum and update)"),
    "torch-muon": Rule(_torch_muon, _muon_text),
    "untraced": Rule(_in_place, lambda *_: "not counted: the update is not traced"),
}
"""Every form but ``copies``, ``stacked`` of all tensors together (:mod:`memplan.step.states.stacked_updates`), and the bundled optimizer's ``chunks`` in :mod:`memplan.step.states.optimizer_scratch`."""


def scratch_of(entry: Optimizer, kind: Stepper, group: list[TensorStates], kernel: OptimizerKernel) -> Scratch:
    """Return the scratch memory of the class that updates a group of tensors of torch's own dtypes together.

    Args:
        entry: What the tensors' optimizer is in the catalog.
        kind: The class, which is another than the entry's where that cannot step.
        kernel: Which of its kernels a config asks for.

    Raises:
        CannotAnswerError: No rule tells it.
    """
    form = entry.scratch.form if kind == entry.implementation else UPDATE_CLASSES[kind].form
    if form == "copies":
        return copies(entry.scratch, group)
    if form not in RULES:
        raise CannotAnswerError(f"the scratch memory of {kind} is of form {form}, which nothing here tells")
    rule, stream = RULES[form], _Most()
    if form == "adamw" and kernel == "foreach":  # of all tensors at once
        stream.passing(sum(_bytes(entry) * entry.tensor.count for entry in group))
    else:
        rule.write(stream, [*_in_order(group)], kernel, makes_nothing)
    return stream.most, rule.text(group, kernel)


def is_in_second_group(setup: TrainingSetup) -> Callable[[TensorStates], bool]:
    """Return what tells whether a tensor is stepped behind all others: norms and biases, where a stack has its own optimizer.

    That is transformers' Trainer, which has what does not decay in a second group; other loops have all in one.
    """
    own = setup.stack.own_formats.values()
    return lambda entry: entry.optimizer_name in own and entry.tensor.role in ("norm", "bias")


def makes_nothing(_: int) -> None:
    """Make no states."""


def copies(scratch: UpdateScratch, group: list[TensorStates]) -> Scratch:
    """Return copies of tensors in their own dtype, as many as an entry states."""
    total = sum(_bytes(entry) * entry.tensor.count for entry in group)
    size = scratch.all_tensors * total + scratch.largest_tensor * max(map(_bytes, group))
    return size, f"{scratch.all_tensors} x all tensors + {scratch.largest_tensor} x largest tensor, as its entry states"


def depends_on_kernel(entry: Optimizer) -> bool:
    """Tell whether an update's passes and scratch memory are another thing fused, foreach and tensor by tensor."""
    return entry.step == "torch" and entry.scratch.form == "adamw"
