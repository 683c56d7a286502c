"""Scratch memory of updates as they are published, each told in the order in which its code allocates.

A rule goes through the tensors as the code does. Python keeps what a variable of its loop names until the next
tensor replaces it, so what is left of one tensor counts while the next is updated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from math import prod

from memplan.catalog.entries import Form, Optimizer, UpdateScratch
from memplan.catalog.kernel_profiles import OptimizerKernel
from memplan.catalog.update_classes import UPDATE_CLASSES
from memplan.errors import CannotAnswerError
from memplan.step.tensors.tensor_states import TensorStates
from memplan.step.tensors.update_kernels import Stepper
from memplan.training.resolved import FLOAT_BYTES

Scratch = tuple[int, str]
"""Bytes, and how they come about."""

Rule = Callable[[list[TensorStates], OptimizerKernel], Scratch]
"""Takes tensors of torch's own dtypes that are updated together, and the kernel that a config asks for."""


def run_of(entry: TensorStates) -> tuple[int, int]:
    """Return what tells the run of equal layers that a tensor lies in."""
    return (entry.tensor.first, entry.tensor.count)


def _in_order(group: list[TensorStates]) -> Iterator[TensorStates]:
    """Yield tensors layer by layer; of many equal layers two show what all do."""
    for (_, count), run in groupby(group, key=run_of):
        yield from [*run] * min(count, 2)


def _bytes(entry: TensorStates) -> int:
    return entry.tensor.elements * FLOAT_BYTES[entry.format_name]


def in_place(group: list[TensorStates], kernel: OptimizerKernel) -> Scratch:
    """Return nothing: the update's kernels write where the states and the weights are.

    Source:
        torch/optim/sgd.py (v2.13.0), ``_multi_tensor_sgd`` and ``_single_tensor_sgd`` without weight decay;
        csrc/kernels.cu of bitsandbytes 0.50.2, ``kOptimizerStatic8bit2StateBlockwise`` and ``kOptimizer32bit2State``.
    """
    del group, kernel
    return 0, "0: in place"


def untraced(group: list[TensorStates], kernel: OptimizerKernel) -> Scratch:
    """Return nothing, as the optimizer's entry says that its update is not modelled."""
    del group, kernel
    return 0, "not counted: the update is not traced"


def adamw(group: list[TensorStates], kernel: OptimizerKernel) -> Scratch:
    """Return torch.optim.AdamW's scratch memory.

    Source:
        torch/optim/adam.py (v2.13.0): ``_multi_tensor_adam`` holds the square roots of all second
        moments at once, ``_single_tensor_adam`` one square root and one quotient at a time, while
        the quotient of the tensor before is still there.
    """
    if kernel == "fused":
        return in_place(group, kernel)
    if kernel == "foreach":
        total = sum(_bytes(entry) * entry.tensor.count for entry in group)
        return total, "one square root of every second moment (foreach)"
    most = before = 0
    for entry in _in_order(group):
        most, before = max(most, before + 2 * _bytes(entry)), _bytes(entry)
    return most, "square root and quotient of a tensor, and the quotient of the one before"


def adafactor(group: list[TensorStates], kernel: OptimizerKernel) -> Scratch:
    """Return torch.optim.Adafactor's scratch memory; unless told otherwise it goes tensor by tensor.

    Source:
        torch/optim/_adafactor.py (v2.13.0), ``_single_tensor_adafactor``.
    """
    del kernel
    most = update = means = squared = 0
    for entry in _in_order(group):
        size, shape, one = _bytes(entry), entry.tensor.shape, FLOAT_BYTES[entry.format_name]
        if len(shape) > 1:
            own = size // shape[-1] + size // shape[-2]  # row_mean, col_mean
            most = max(most, update + means + squared + size // shape[-1])
            means, estimate = own, size + one * prod(shape[:-2])  # var_estimate, and the mean of row_var
        else:
            most = max(most, update + means + squared + size)
            squared, estimate = size, size
        most = max(most, update + means + squared + estimate, means + squared + size + one)
        update = size
    return most, "update and variance estimate of a tensor, with what is left of the one before"


def lion(group: list[TensorStates], kernel: OptimizerKernel) -> Scratch:
    """Return the scratch memory of Lion: a copy of the momentum, and its sum with the gradient.

    Source:
        lion_pytorch/lion_pytorch.py (0.2.5), ``update_fn``.
    """
    del kernel
    return 2 * max(map(_bytes, group)), "2 x largest tensor (scaled momentum and update)"


def adam_mini(group: list[TensorStates], kernel: OptimizerKernel) -> Scratch:
    """Return Adam-mini's scratch memory.

    Source:
        adam_mini/adam_mini.py (1.1.1), ``Adam_mini.step``: the squared gradient, later the update and its
        negative, beside one number per row in ``tmp_lr``, ``h`` and ``stepsize``.
    """
    del kernel
    most = before = before_rows = 0
    for entry in _in_order(group):
        size = _bytes(entry)
        rows = size // entry.tensor.shape[-1]
        squared, product, negative = (
            before + 3 * before_rows + rows + size,
            before + 3 * rows + size,
            2 * size + 3 * rows,
        )
        most = max(most, squared, product, negative)
        before, before_rows = size, rows
    return most, "2 x largest tensor (update and its negative), 3 numbers per row"


def torch_muon(group: list[TensorStates], kernel: OptimizerKernel) -> Scratch:
    """Return torch.optim.Muon's scratch memory, the larger side of a matrix being ``n`` and the smaller ``m``.

    Source:
        torch/optim/_muon.py (v2.13.0), ``_zeropower_via_newtonschulz``: the update, its bf16 copy where it is not
        bf16 itself, the next iterate, and two Gram matrices.
    """
    del kernel
    most: Scratch = (0, "0")
    for entry in group:
        m, n = sorted(entry.tensor.shape)
        width = 4 + FLOAT_BYTES[entry.format_name]
        most = max(most, (width * m * n + 4 * m * m, f"{width} m n + 4 m^2, m = {m}, n = {n}"))
    return most


RULES: Mapping[Form, Rule] = {
    "adafactor": adafactor,
    "adam-mini": adam_mini,
    "adamw": adamw,
    "in-place": in_place,
    "lion": lion,
    "torch-muon": torch_muon,
    "untraced": untraced,
}
"""Every form but ``copies``, and the bundled optimizer's ``chunks`` in :mod:`memplan.step.states.optimizer_scratch`."""


def scratch_of(entry: Optimizer, kind: Stepper, group: list[TensorStates], kernel: OptimizerKernel) -> Scratch:
    """Return the scratch memory of the class that updates a group of tensors.

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
    return RULES[form](group, kernel)


def copies(scratch: UpdateScratch, group: list[TensorStates]) -> Scratch:
    """Return copies of tensors in their own dtype, as many as an entry states."""
    total = sum(_bytes(entry) * entry.tensor.count for entry in group)
    size = scratch.all_tensors * total + scratch.largest_tensor * max(map(_bytes, group))
    return size, f"{scratch.all_tensors} x all tensors + {scratch.largest_tensor} x largest tensor, as its entry states"


def depends_on_kernel(entry: Optimizer) -> bool:
    """Tell whether an update's passes and scratch memory are another thing fused, foreach and tensor by tensor."""
    return entry.step == "torch" and entry.scratch.form == "adamw"
