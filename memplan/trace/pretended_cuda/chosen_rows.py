"""Rows chosen by a boolean mask, of which every one is taken to be chosen."""

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from memplan.units import ceil_div

aten = torch.ops.aten


class ChosenRows(TorchDispatchMode):
    """Lets indexing by a mask without memory return all rows, with the indices that CUDA forms for it.

    Args:
        answer_length: Rows that a mask over tokens of sequences chooses of each sequence; 0 for all.

    Source:
        aten/src/ATen/native/IndexingUtils.h, ``expandTensors``: a mask becomes its ``nonzero`` (v2.13.0).
    """

    counted: ClassVar[dict[int, int]] = {}
    """Storage of a mask -> how many it chooses, where that is known."""

    def __init__(self, answer_length: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.answer_length = answer_length

    def _chosen(self, mask: Tensor) -> int:
        """Return how many elements of a mask are taken to be true."""
        several = self.answer_length and mask.dim() == 2 and mask.shape[1] > self.answer_length
        return mask.shape[0] * self.answer_length if several else mask.numel()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        options = kwargs or {}
        if func in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default) and _masks(args[1]):
            indices = [item for mask in args[1] for item in self._indices(mask)]
            return func(args[0], indices, *args[2:], **options)
        if func is aten.masked_select.default and args[0].is_meta:
            return args[0].new_empty(self._chosen(args[1]))
        if func is aten.nonzero.default and args[0].is_meta:
            return torch.empty((self._chosen(args[0]), args[0].dim()), dtype=torch.long, device="meta")
        return func(*args, **options)

    def _indices(self, mask: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the positions of a mask's true elements, one tensor for each dimension, which share a storage."""
        if mask is None or mask.dtype != torch.bool:
            return (mask,)
        count = self.counted.get(mask.untyped_storage()._cdata) or self._chosen(mask)
        result = torch.empty((count, mask.dim()), dtype=torch.long, device=mask.device)
        return tuple(result.unbind(1))


class AllDesirable(ChosenRows):  # type: ignore[no-untyped-call]
    """Takes all answers for desirable, which a mask says, so that the opposite of a mask chooses none."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.bitwise_not.default and args[0].dtype == torch.bool and args[0].dim() == 1:
            return torch.empty(0, dtype=torch.long, device=args[0].device)
        return super().__torch_dispatch__(func, types, args, kwargs)


class EvenlyRouted(TorchDispatchMode):
    """Gives each expert of a loop as many rows as any other, and all of them some: what asks a mask's values is told so.

    Experts are counted by what asks which of them have rows, or as often as a mask of one is in the storage of all.

    Source:
        ``MixtralSparseMoeBlock.forward`` in transformers/models/mixtral/modeling_mixtral.py (4.57.6); ``nonzero_cuda_out_impl`` in
        aten/src/ATen/native/cuda/Nonzero.cu (v2.13.0), whose indices of one dimension lie together.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.experts = 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func is aten.nonzero.default and args[0].is_meta and args[0].dtype in (torch.bool, torch.long):
            return self._places(args[0])
        if func is aten._local_scalar_dense.default and _is_one_of(args[0], self.experts):
            return args[0].storage_offset()
        return func(*args, **(kwargs or {}))

    def _places(self, mask: Tensor) -> Tensor:
        """Return the indices of one dimension at which experts have rows, or of two at which an expert's are."""
        rows = self.experts = mask.numel() if mask.dim() == 1 else self.experts
        if mask.dim() > 1:
            shared = mask.untyped_storage().nbytes() // (mask.numel() * mask.element_size())
            self.experts = shared if shared > 1 else self.experts
            rows = ceil_div(mask.numel(), self.experts)
        return torch.empty((mask.dim(), rows), dtype=torch.long, device="meta").t()


def _is_one_of(tensor: Tensor, experts: int) -> bool:
    """Tell whether a tensor without memory is a number among those of experts."""
    alone = tensor.is_meta and tensor.dtype == torch.long and tensor.numel() == 1
    return alone and tensor.untyped_storage().nbytes() == tensor.element_size() * experts > tensor.element_size()


def _masks(indices: Any) -> bool:
    return any(isinstance(item, Tensor) and item.is_meta and item.dtype == torch.bool for item in indices)
