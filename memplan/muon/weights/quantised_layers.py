"""Linear layers and embeddings that keep only codes: a float weight exists while a product needs it.

Autograd saves the input and no weight; backward dequantises once more, and leaves the gradient of
the weight in its store (``QuantisedWeight.receive``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from memplan.muon.weights.quantised import QuantisedWeight

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.autograd.function import FunctionCtx


class _Product(torch.autograd.Function):
    """``x @ W.mT`` with the matrix dequantised in forward and again in backward, and never saved."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, anchor: Tensor, weight: QuantisedWeight) -> Tensor:
        del anchor
        saved: Any = ctx
        saved.save_for_backward(x)
        saved.weight = weight
        return nn.functional.linear(x, weight.dequantised(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, None]:
        (x,) = ctx.saved_tensors
        weight: QuantisedWeight = ctx.weight
        through = grad @ weight.dequantised(grad.dtype) if ctx.needs_input_grad[0] else None
        weight.receive(grad.reshape(-1, grad.shape[-1]).mT @ x.reshape(-1, x.shape[-1]))
        return through, torch.empty(0), None


class _Lookup(torch.autograd.Function):
    """Rows of the matrix; backward forms the dense gradient of the whole matrix, as ``nn.Embedding`` does."""

    @staticmethod
    def forward(ctx: Any, index: Tensor, anchor: Tensor, weight: QuantisedWeight, dtype: torch.dtype) -> Tensor:
        del anchor
        ctx.save_for_backward(index)
        ctx.weight = weight
        return weight.rows(index, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None, None]:
        (index,) = ctx.saved_tensors
        weight: QuantisedWeight = ctx.weight
        dense = grad.new_zeros(weight.shape)
        weight.receive(dense.index_add_(0, index.reshape(-1), grad.reshape(-1, grad.shape[-1])))
        return None, torch.empty(0), None, None


class QuantisedLinear(nn.Module):
    """A linear layer over a ``QuantisedWeight``, with a float bias or none."""

    bias: nn.Parameter | None

    def __init__(self, weight: QuantisedWeight, bias: Tensor | None = None) -> None:
        super().__init__()
        self.weight = weight
        self.out_features, self.in_features = weight.shape
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach().clone()))

    @classmethod
    def of(cls, layer: nn.Linear, format: str) -> QuantisedLinear:
        """Return a layer with the codes of ``layer.weight``."""
        return cls(QuantisedWeight.of(layer.weight, format), layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x @ W.mT + bias``; ``x`` is ``(..., in_features)``."""
        y = cast("Tensor", _Product.apply(x, self.weight.anchor, self.weight))  # type: ignore[no-untyped-call]
        return y if self.bias is None else y + self.bias.to(y.dtype)


class QuantisedEmbedding(nn.Module):
    """An embedding over a ``QuantisedWeight``, which a head may share.

    Args:
        weight: ``(num_embeddings, embedding_dim)``.
        dtype: Of the rows that it returns.
    """

    def __init__(self, weight: QuantisedWeight, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.weight = weight
        self.dtype = dtype
        self.num_embeddings, self.embedding_dim = weight.shape

    def forward(self, index: Tensor) -> Tensor:
        """Return ``(*index.shape, embedding_dim)``."""
        rows = _Lookup.apply(index, self.weight.anchor, self.weight, self.dtype)  # type: ignore[no-untyped-call]
        return cast("Tensor", rows)


def quantise_(model: nn.Module, choose: Callable[[str, nn.Module], str | None]) -> nn.Module:
    """Replace linear layers and embeddings of ``model`` in place, and return it; tied weights stay tied.

    Args:
        model: Any module.
        choose: Returns the format for a layer, given its name and itself, or None to leave it.
    """
    shared: dict[int, QuantisedWeight] = {}
    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.Linear | nn.Embedding):
            continue
        format = choose(name, module)
        if format is None:
            continue
        weight = shared.get(id(module.weight))
        if weight is None:
            weight = shared[id(module.weight)] = QuantisedWeight.of(module.weight, format)
        replacement: nn.Module
        if isinstance(module, nn.Linear):
            replacement = QuantisedLinear(weight, module.bias)
        else:
            replacement = QuantisedEmbedding(weight, module.weight.dtype)
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, replacement)
    return model
