"""The parameter that holds codes: its ``.grad`` is the gradient of the matrix that the codes stand for.

Codes take no gradient of their own, so that autograd leaves their ``.grad`` empty, and whatever walks over the
gradients of ``model.parameters()``, such as ``torch.nn.utils.clip_grad_norm_`` and ``GradScaler``, would pass
over them without a word. Here it meets the stored gradient itself, or a refusal where that is FP8 with a scale.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from memplan.muon.stores.optimizer_errors import OptimizerError

if TYPE_CHECKING:
    from memplan.muon.stores.gradient_stores import GradientStore


class CodedParameter(nn.Parameter):
    """Codes, uint8, with the store of their matrix's gradient."""

    store: GradientStore  # Where layers leave the gradient

    def __new__(cls, codes: Tensor, store: GradientStore) -> CodedParameter:
        """Return a parameter over the memory of ``codes``, which needs no gradient."""
        made: CodedParameter = super().__new__(cls, codes, requires_grad=False)
        made.store = store
        return made

    def __init__(self, codes: Tensor, store: GradientStore) -> None:
        """Do nothing: ``__new__`` has done it."""

    @property
    def grad(self) -> Tensor | None:
        """The stored gradient, of the matrix's shape and free to be changed in place; None where there is none."""
        codes = self.store.codes
        return codes if codes is None or self.store.scale is None else codes.as_subclass(ScaledGradient)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is None:
            self.store.clear()
        elif value is not self.store.codes:
            self.store.clear()
            self.store.add_(value)

    def __deepcopy__(self, memo: dict[int, Any]) -> CodedParameter:
        """Return a copy with a copied store, which the copy of the module shares."""
        if id(self) not in memo:
            memo[id(self)] = CodedParameter(self.data.clone(), copy.deepcopy(self.store, memo))
        copied: CodedParameter = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the codes and the store."""
        del protocol
        return CodedParameter, (self.data, self.store)


_WITHOUT_NUMBERS = frozenset({
    "__get__", "__len__", "__repr__", "data_ptr", "detach_", "dim", "element_size", "get_device", "is_contiguous", "nelement",
    "numel", "requires_grad_", "size", "storage_offset", "stride", "untyped_storage", "zero_",
})  # fmt: skip
"""What may be asked of a gradient whose numbers mean nothing: its form and place, and what ``zero_grad`` calls."""


class ScaledGradient(Tensor):
    """A gradient in FP8, which means nothing without its scale: it can be looked at and dropped, not computed with."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse whatever computes with the numbers."""
        if getattr(func, "__name__", "") in _WITHOUT_NUMBERS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise OptimizerError(
            "the gradient of this coded weight is stored in FP8 with a scale, which torch's own functions do not know; "
            "to clip gradients, call clip_grad_norm_ of the optimizer"
        )
