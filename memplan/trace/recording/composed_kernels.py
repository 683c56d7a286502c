"""Operators that torch writes as other operators below autograd: what they allocate inside, on a GPU as on the CPU.

No dispatch mode sees these, as one kernel stands for all of them.

Source:
    aten/src/ATen/native/Loss.cpp of torch (v2.13.0): ``mse_loss_out``, ``smooth_l1_loss_out``, ``huber_loss``,
    ``binary_cross_entropy_with_logits``, ``soft_margin_loss_out``, ``soft_margin_loss_backward_out``; cuda/Loss.cu,
    ``binary_cross_entropy_out_cuda``; LossCTC.cpp and cuda/LossCTC.cu, ``log_beta``; TensorAdvancedIndexing.cpp and
    IndexingUtils.h, ``expandTensors``; layer_norm.cpp and cuda/layer_norm_kernel.cu, ``expect_contiguous``; ``flex_cp_allgather`` in torch/distributed/tensor/experimental/_context_parallel/_cp_custom_ops.py,
    ``_maybe_view_chunk_cat`` and ``_chunk_or_narrow_cat`` in torch/_utils.py. The allocations of a real run on the CPU agree (tests/dryrun).
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

broadcast_shapes: Any = torch.broadcast_shapes
Arguments = tuple[Any, ...]
_MEAN = 1
"""Reduction of a loss that is given none; 0 is none."""
_REDUCTION = {
    "mse_loss.default": 2,
    "smooth_l1_loss.default": 2,
    "huber_loss.default": 2,
    "soft_margin_loss.default": 2,
    "binary_cross_entropy.default": 3,
    "binary_cross_entropy_with_logits.default": 4,
}
"""Where a loss takes its reduction."""
_KEEPS_ALL = frozenset(
    {"mse_loss.default", "smooth_l1_loss.default", "soft_margin_loss.default", "binary_cross_entropy.default"}
)
"""Losses whose result is made as wide as what they reduce, and resized to one number, which keeps the storage."""


def storage_bytes(operation: str, args: Arguments) -> int | None:
    """Return the bytes of the storage behind a result that shows less of it; nothing where it shows it all."""
    return _unreduced_bytes(args) if operation in _KEEPS_ALL and _reduces(operation, args) else None


def composed_bytes(operation: str, args: Arguments, result: Any) -> list[int]:
    """Return the bytes of each block that an operator allocates inside itself and frees again, beside its result."""
    rule = _RULES.get(operation)
    return rule(operation, args, result) if rule else []


def _reduces(operation: str, args: Arguments) -> bool:
    place = _REDUCTION[operation]
    return (args[place] if len(args) > place else _MEAN) != 0


def _unreduced_bytes(args: Arguments) -> int:
    shape: Sequence[int] = broadcast_shapes(args[0].shape, args[1].shape)
    width: int = args[0].element_size()
    return prod(shape) * width


def _unreduced(operation: str, args: Arguments, _: Any) -> list[int]:
    """The loss of each element, of which the mean or the sum is formed."""
    return [_unreduced_bytes(args)] if _reduces(operation, args) else []


def _logits(operation: str, args: Arguments, _: Any) -> list[int]:
    """The logarithm of the sigmoid, and the loss of each element."""
    return [_unreduced_bytes(args)] * (2 if _reduces(operation, args) else 1)


def _soft_margin_backward(_: str, args: Arguments, __: Any) -> list[int]:
    """The negative target, and its product with the input; both are gone when the result is formed, and the exponential is not."""
    return [_unreduced_bytes(args[1:])] * 2


def _connectionist_backward(_: str, args: Arguments, __: Any) -> list[int]:
    """The backward variables, as wide as the forward ones."""
    alpha: Tensor = args[6]
    return [alpha.numel() * alpha.element_size()]


def _chosen(_: str, args: Arguments, result: Tensor) -> list[int]:
    """The places at which a mask holds, by which a tensor is indexed."""
    mask = _only_mask(args[1])
    return [] if mask is None else _places(mask[1], result.shape[mask[0]])


def _put(_: str, args: Arguments, __: Any) -> list[int]:
    """The places at which a mask holds, where as many values are written; one value is filled in without them."""
    mask, values = _only_mask(args[1]), args[2]
    if mask is None or values.dim() != args[0].dim() - mask[1].dim() + 1:
        return []
    return _places(mask[1], values.shape[mask[0]])


def _only_mask(indices: Sequence[Tensor | None]) -> tuple[int, Tensor] | None:
    """Return the mask among indices and the dimension that it begins at, where it is the only index."""
    given = [(place, index) for place, index in enumerate(indices) if index is not None]
    return given[0] if len(given) == 1 and given[0][1].dtype in (torch.bool, torch.uint8) else None


def _places(mask: Tensor, holds: int) -> list[int]:
    """Return an index of 64 bits for each dimension, at each place where a mask holds."""
    return [8 * mask.dim() * holds]


def _joined_keys(_: str, args: Arguments, result: Sequence[Tensor]) -> list[int]:
    """Values as they arrive from every rank, before those of one sequence are put together; one sequence alone is in order."""
    return [result[1].numel() * result[1].element_size()] if args[0].shape[0] > 1 else []


def _parted_keys(_: str, args: Arguments, __: Any) -> list[int]:
    """The gradient of all values as ranks are sent it."""
    return [args[1].numel() * args[1].element_size()]


def _together(operation: str, args: Arguments, _: Any) -> list[int]:
    """Copies of what a norm reads whose rows lie apart: its input, and in backward its gradient too."""
    read = args[:2] if operation.startswith("native_layer_norm_backward") else args[:1]
    return [tensor.numel() * tensor.element_size() for tensor in read if not tensor.is_contiguous()]


Rule = Callable[[str, Arguments, Any], list[int]]
_RULES: Mapping[str, Rule] = {
    "mse_loss.default": _unreduced,
    "smooth_l1_loss.default": _unreduced,
    "huber_loss.default": _unreduced,
    "binary_cross_entropy_with_logits.default": _logits,
    "soft_margin_loss_backward.default": _soft_margin_backward,
    "_ctc_loss_backward.default": _connectionist_backward,
    "_ctc_loss_backward.Tensor": _connectionist_backward,
    "native_layer_norm.default": _together,
    "native_layer_norm_backward.default": _together,
    "flex_cp_allgather.default": _joined_keys,
    "flex_cp_allgather_backward.default": _parted_keys,
    "index.Tensor": _chosen,
    "index_put.default": _put,
    "index_put_.default": _put,
}
