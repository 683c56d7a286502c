"""What autograd's engine and its formulas do in place, but for their caution while a dispatch mode is on.

They take every tensor for a subclass then, which could not be written over, and form a new one.
"""

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
broadcast_shapes: Any = torch.broadcast_shapes
_TORCH = os.path.join(torch.__path__[0], "")  # torchtitan's and torchtune's code is none of torch's
_CHOOSES = frozenset({"Max", "Min", "Median", "Nanmedian", "Mode", "Kthvalue", "Sort", "Topk", "Cummax", "Cummin"})
_INTO_ZEROS: Mapping[Any, frozenset[str]] = {
    aten.index_put.default: frozenset({"Index", "UnsafeIndex"}),
    aten.scatter.src: _CHOOSES,
    aten.scatter_add.default: _CHOOSES | {"Gather"},
    aten.index_add.default: frozenset({"IndexSelect"}),
    aten.masked_scatter.default: frozenset({"MaskedSelect"}),
    aten.put.default: frozenset({"Take"}),
}
"""Operator -> the functions whose formulas write into new zeros by it; of others, such as index_put's own, the first
argument is somebody else's (``index_backward``, ``gather_backward``, ``value_selecting_reduction_backward``,
``cummaxmin_backward``, ``index_select_backward``, ``masked_select_backward`` and ``take_backward`` of v2.13.0, in
aten/src/ATen/native/TensorAdvancedIndexing.cpp, ReduceOps.cpp and torch/csrc/autograd/FunctionsManual.cpp)."""
_INTO_ITS_OWN: Mapping[Any, frozenset[str]] = {
    operator: frozenset({"BinaryCrossEntropyWithLogits"})
    for operator in (aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)
}
"""Operator -> the functions whose formulas write over what they have just made by it (``binary_cross_entropy_with_logits_backward``
in torch/csrc/autograd/FunctionsManual.cpp, v2.13.0)."""
_ADD = aten.add.Tensor


def is_in_place(func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Tell whether an operator called in backward would have written into its first argument and made nothing new."""
    if func is _ADD:
        first, second = args[0], args[1]
        alike = isinstance(second, Tensor) and first.shape == second.shape and first.dtype == second.dtype
        return alike and _called_by_engine() and _is_nobodys(args[0])
    if func in _INTO_ZEROS:
        return _function() in _INTO_ZEROS[func] and _called_by_engine()
    if func in _INTO_ITS_OWN:
        return _function() in _INTO_ITS_OWN[func] and _called_by_engine() and _is_wide(args) and _is_nobodys(args[0], 2)
    return False


def _is_wide(args: tuple[Any, ...]) -> bool:
    """Tell whether the first argument can hold the result."""
    first, second = args[0], args[1]
    return bool(first.shape == broadcast_shapes(first.shape, second.shape))


def _is_nobodys(tensor: Any, links: int = 0) -> bool:
    """Tell whether only the engine, or the formula that it runs, holds a tensor, and no other shares its storage.

    Args:
        links: Earlier calls of the same expression that may hold it too.

    The counts are those of a tensor that only the engine holds, seen from here (four for the call itself), and of a
    storage with one tensor and one Python object; a view of a gradient shares its storage and is never added into.
    """
    # Source: ``can_accumulate_inplace`` in torch/csrc/autograd/input_buffer.cpp (v2.13.0); the profiler's allocation
    # events of a real run agree (tests/trace).
    shared = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return bool(4 <= tensor._use_count() <= 4 + links and shared == 2)


def _function() -> str:
    """Return the function whose backward the engine runs, as autograd names it: ``Gather``."""
    node = torch._C._current_autograd_node()
    return "" if node is None else node.name().partition("Backward")[0]


def _called_by_engine() -> bool:
    """Tell whether the operator being dispatched was called by autograd's engine itself."""
    frame: Any = sys._getframe(3)
    while frame is not None and (
        frame.f_code.co_filename.startswith(_TORCH)
        or frame.f_code.co_name == "__torch_dispatch__"  # of a recorder that extends this one
    ):
        if frame.f_code.co_name == "_engine_run_backward":
            return True
        frame = frame.f_back
    return frame is None  # in a thread of the engine
