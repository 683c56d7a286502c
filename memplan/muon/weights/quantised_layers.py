"""Linear layers and embeddings that keep only codes: a float weight exists while a product needs it.

Autograd saves the input and no weight; backward dequantises once more, and leaves the gradient of
the weight in its store (``QuantisedWeight.receive``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from memplan.muon.stores.optimizer_errors import OptimizerError
from memplan.muon.weights.quantised import QuantisedWeight
from memplan.muon.weights.weight_codecs import weight_format

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
        if ctx.needs_input_grad[1] and weight.is_wanted():
            weight.receive(grad.reshape(-1, grad.shape[-1]).mT @ x.reshape(-1, x.shape[-1]))
        return through, torch.empty(0, dtype=torch.float32, device="cpu"), None


class _Lookup(torch.autograd.Function):
    """Rows of the matrix; backward forms the dense gradient of the whole matrix, as ``nn.Embedding`` does."""

    @staticmethod
    def forward(
        ctx: Any, index: Tensor, anchor: Tensor, weight: QuantisedWeight, dtype: torch.dtype, padding: int | None
    ) -> Tensor:
        del anchor
        ctx.save_for_backward(index)
        ctx.weight, ctx.padding = weight, padding
        return weight.rows(index, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, None, None, None]:
        (index,) = ctx.saved_tensors
        weight: QuantisedWeight = ctx.weight
        if not weight.is_wanted():
            return None, None, None, None, None
        dense = grad.new_zeros(weight.shape)
        dense.index_add_(0, index.reshape(-1), grad.reshape(-1, grad.shape[-1]))
        if ctx.padding is not None:
            dense[ctx.padding].zero_()
        weight.receive(dense)
        return None, torch.empty(0, dtype=torch.float32, device="cpu"), None, None, None


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
        kind = x.device.type
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        y = cast("Tensor", _Product.apply(x, self.weight.anchor, self.weight))  # type: ignore[no-untyped-call]
        return y if self.bias is None else y + self.bias.to(y.dtype)


class QuantisedEmbedding(nn.Module):
    """An embedding over a ``QuantisedWeight``, which a head may share.

    Args:
        weight: ``(num_embeddings, embedding_dim)``.
        dtype: Of the rows that it returns.
        padding_idx: A row that takes no gradient, if any.
    """

    like: Tensor  # Empty, of the rows' dtype: what moves a model moves it too

    def __init__(
        self, weight: QuantisedWeight, dtype: torch.dtype = torch.bfloat16, padding_idx: int | None = None
    ) -> None:
        super().__init__()
        self.weight = weight
        self.register_buffer("like", torch.empty(0, dtype=dtype, device=weight.codes.device), persistent=False)
        self.padding_idx = padding_idx
        self.num_embeddings, self.embedding_dim = weight.shape

    @property
    def dtype(self) -> torch.dtype:
        """Of the rows, which follows ``half`` and its like."""
        return self.like.dtype

    def forward(self, index: Tensor) -> Tensor:
        """Return ``(*index.shape, embedding_dim)``."""
        arguments = index, self.weight.anchor, self.weight, self.dtype, self.padding_idx
        rows = _Lookup.apply(*arguments)  # type: ignore[no-untyped-call]
        return cast("Tensor", rows)


def quantise_(
    model: nn.Module, choose: str | Callable[[str, nn.Module], str | None], *, kernels: str = "torch"
) -> nn.Module:
    """Replace linear layers and embeddings of ``model`` in place, and return it; tied weights stay tied.

    Args:
        model: Any module.
        choose: The format of all of them, such as ``q4-0``; or a function that returns the format for a layer, given
            its name and itself, or None to leave it.
        kernels: ``torch``, or ``triton`` to read and write codes by a kernel each way where Triton runs, to the same bytes.

    Raises:
        UnknownNameError: If a format, or ``kernels``, is not known.
        OptimizerError: If a format has no such kernels, or a layer cannot be replaced; the message lists all such, and the model is as it was.

    Example:
        >>> model = quantise_(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8)), "q4-0")
        >>> [type(layer).__name__ for layer in model]
        ['QuantisedLinear', 'ReLU', 'QuantisedLinear']
    """
    if not isinstance(choose, str) and not callable(choose):
        raise OptimizerError(f"choose: expected a format's name or a function, got {type(choose).__name__}")
    chosen: list[tuple[str, nn.Linear | nn.Embedding, str]] = []
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.Linear | nn.Embedding):
            format = choose if isinstance(choose, str) else choose(name, module)
            if format is not None:
                chosen.append((name, module, format))
    _refuse_unfit(model, chosen)
    shared: dict[int, QuantisedWeight] = {}
    replaced: dict[int, nn.Module] = {}
    for name, module, format in chosen:
        if id(module.weight) not in shared:
            shared[id(module.weight)] = QuantisedWeight.of(module.weight, format, kernels=kernels)
        if id(module) not in replaced:
            replaced[id(module)] = _replacement(module, shared[id(module.weight)])
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, replaced[id(module)])
    return model


def _replacement(module: nn.Linear | nn.Embedding, weight: QuantisedWeight) -> nn.Module:
    if isinstance(module, nn.Linear):
        return QuantisedLinear(weight, module.bias)
    return QuantisedEmbedding(weight, module.weight.dtype, module.padding_idx)


def _refuse_unfit(model: nn.Module, chosen: list[tuple[str, nn.Linear | nn.Embedding, str]]) -> None:
    """Raise if a layer's rows are no whole blocks, or if it does more than codes can do."""
    problems = []
    for name, module, format in chosen:
        reason = _unfit(model, name, module, format)
        if reason:
            problems.append(f"{name or 'the model itself'}: {reason}")
    if problems:
        listed = "\n  ".join(problems)
        raise OptimizerError(
            f"layers that cannot be quantised; leave them by a function that returns None for them:\n  {listed}"
        )


def _unfit(model: nn.Module, name: str, module: nn.Linear | nn.Embedding, format: str) -> str | None:
    """Return why a layer cannot be replaced, or None."""
    form, columns = weight_format(format), module.weight.shape[1]
    parent = name.rpartition(".")[0]
    if not name:
        return "there is nothing to put its replacement into"
    if columns % form.block_elements:
        return f"rows of {columns} do not divide into blocks of {form.block_elements} elements of {form.name}"
    if isinstance(model.get_submodule(parent), nn.MultiheadAttention):
        return "torch's attention takes its weight, and does not call it"
    if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.scale_grad_by_freq or module.sparse):
        return "an embedding with max_norm, scale_grad_by_freq or sparse gradients"
    return None
