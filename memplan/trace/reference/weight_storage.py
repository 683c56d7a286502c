"""A weight as it is stored: a parameter, or codes that are decoded for every product."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memplan.model.inventory import Role
from memplan.trace.reference.coded_weights import CodedMatrix, library_format
from memplan.trace.reference.run_options import Runtime

Sink = Callable[[Tensor], None]
"""Takes the gradient of a weight that is no parameter."""


def _dropped(gradient: Tensor) -> None:
    """Let a gradient go."""


class Weight:
    """One weight of a module, which it registers under its own name.

    Attributes:
        shape: Its dimensions.
        role: What decides how it is stored.
        quantized: Whether ``tensor`` holds codes.
        matrix: The codes as the bundled library handles them; None where it does not have their format.
        trained: Whether backward forms a gradient.
        sink: Where the gradient of codes goes.
    """

    def __init__(self, shape: tuple[int, ...], role: Role, run: Runtime, device: torch.device) -> None:
        self.shape, self.role, self.run = shape, role, run
        self.trained = run.options.trains_weights
        self.sink: Sink = _dropped
        stored = run.options.stored_bytes(shape, role)
        self.quantized = stored is not None
        self.matrix: CodedMatrix | None = None
        self._home: tuple[nn.Module, str] | None = None
        dtype = run.options.weight_dtype(role)
        if stored is not None:
            self._tensor: Tensor | None = torch.empty(stored, dtype=torch.uint8, device=device)
            self._anchor = torch.empty(0, requires_grad=self.trained, device=device)
            name = library_format(run.options.coded[role])
            self.matrix = None if name is None else CodedMatrix(self.tensor, name, shape)
        else:
            self._tensor = nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=self.trained)

    @property
    def tensor(self) -> Tensor:
        """The codes, or the parameter that stands in the module now: sharding exchanges it."""
        if self._home is None:
            assert self._tensor is not None
            return self._tensor
        module, name = self._home
        parameter: Any = module._parameters[name]
        return parameter  # type: ignore[no-any-return]

    def register(self, module: nn.Module, name: str) -> None:
        """Register the tensor in ``module``, and this weight in the runtime."""
        if self.quantized:
            module.register_buffer(name, self.tensor)
            self.run.coded[id(self.tensor)] = self
        else:
            module.register_parameter(name, self.tensor)  # type: ignore[arg-type]
            self._home = (module, name)
            self._tensor = None  # sharding exchanges the module's own, and this one is then gone

    def decoded(self) -> Tensor:
        """Return the weight in the compute dtype, as a new tensor; of formats that the library lacks only its size."""
        if self.matrix is not None:
            return self.matrix.decoded(self.run.options.compute_dtype)
        return torch.empty(self.shape, dtype=self.run.options.compute_dtype, device=self.tensor.device)

    def product(self, x: Tensor, bias: Tensor | None, *, transposed: bool = False) -> Tensor:
        """Return ``x @ weight.T + bias`` in the compute dtype."""
        if not self.quantized:
            weight = self.run.lowered(self.tensor)
            return F.linear(x, weight, bias if bias is None else bias.to(weight.dtype))
        out: Tensor = _CodedProduct.apply(x, self._anchor, self, None, transposed)  # type: ignore[no-untyped-call]
        return out if bias is None else out + bias.to(out.dtype)

    def grouped_product(self, rows: Tensor, offsets: Tensor, *, transposed: bool) -> Tensor:
        """Return each group of ``rows`` times its matrix of the stack."""
        if self.quantized:
            return _CodedProduct.apply(rows, self._anchor, self, offsets, transposed)  # type: ignore[no-any-return, no-untyped-call]
        return _grouped(rows, self.run.lowered(self.tensor), offsets, transposed)

    def looked_up(self, ids: Tensor) -> Tensor:
        """Return the rows that ``ids`` name, decoded where they are codes."""
        if not self.quantized:
            return F.embedding(ids, self.tensor)
        return _CodedLookup.apply(ids, self._anchor, self)  # type: ignore[no-any-return, no-untyped-call]


def _grouped(rows: Tensor, weight: Tensor, offsets: Tensor, transposed: bool) -> Tensor:
    return torch._grouped_mm(rows, weight if transposed else weight.transpose(-2, -1), offs=offsets)


class _CodedProduct(torch.autograd.Function):
    """A product with a coded weight: decodes it in forward and again in backward, keeping neither.

    The input is kept where the weight is trained. Its gradient is formed after the decoded
    copy is gone, and handed to the weight's sink.

    Source:
        ``MatMul4Bit`` in bitsandbytes/autograd/_functions.py, which is the frozen case.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor, weight: Weight, offsets: Tensor | None, transposed: bool
    ) -> Tensor:
        """Return the product."""
        ctx.weight, ctx.offsets, ctx.transposed, ctx.shape = weight, offsets, transposed, x.shape
        if anchor.requires_grad:
            ctx.save_for_backward(x)
        if offsets is None:
            return x.matmul(weight.decoded() if transposed else weight.decoded().t())
        return _grouped(x, weight.decoded(), offsets, transposed)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        """Return the gradient of the input; that of the weight goes to its sink."""
        (gradient,) = gradients
        weight: Weight = ctx.weight
        of_input = None
        if ctx.needs_input_grad[0]:
            of_input = _of_input(ctx, gradient, weight.decoded())
        if ctx.needs_input_grad[1]:
            (x,) = ctx.saved_tensors
            weight.sink(_of_weight(ctx, gradient, x))
        return of_input, None, None, None, None


def _of_input(ctx: Any, gradient: Tensor, decoded: Tensor) -> Tensor:
    if ctx.offsets is None:
        return gradient.matmul(decoded.t() if ctx.transposed else decoded)
    return _grouped(gradient, decoded, ctx.offsets, not ctx.transposed)


def _of_weight(ctx: Any, gradient: Tensor, x: Tensor) -> Tensor:
    if ctx.offsets is not None:
        first, second = (x, gradient) if ctx.transposed else (gradient, x)
        return torch._grouped_mm(first.t(), second, offs=ctx.offsets)
    first, second = (x, gradient) if ctx.transposed else (gradient, x)
    return first.flatten(0, -2).t().mm(second.flatten(0, -2))


class _CodedLookup(torch.autograd.Function):
    """Rows of a coded table; only those that are used are decoded."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, anchor: Tensor, weight: Weight) -> Tensor:
        """Return the decoded rows."""
        ctx.weight = weight
        if anchor.requires_grad:
            ctx.save_for_backward(ids)
        if weight.matrix is not None:
            return weight.matrix.rows(ids, weight.run.options.compute_dtype)
        codes = weight.tensor.view(weight.shape[0], -1) if weight.tensor.numel() % weight.shape[0] == 0 else None
        if codes is not None:
            F.embedding(ids, codes)
        width = prod(weight.shape[1:])
        return torch.empty((*ids.shape, width), dtype=weight.run.options.compute_dtype, device=ids.device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        """Hand the table's gradient to its sink."""
        weight: Weight = ctx.weight
        if ctx.needs_input_grad[1]:
            (ids,) = ctx.saved_tensors
            rows = weight.shape[0]
            weight.sink(torch.ops.aten.embedding_dense_backward(gradients[0], ids, rows, -1, False))
        return None, None, None
