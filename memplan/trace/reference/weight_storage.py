"""A weight as it is stored: a parameter, or codes that are decoded for every product, as the bundled optimizer's library keeps them."""

from collections.abc import Callable
from importlib.util import find_spec
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memplan.catalog.entries import StorageFormat
from memplan.errors import CannotAnswerError
from memplan.model.inventory import Role
from memplan.muon.stores.gradient_stores import GradientStore
from memplan.muon.weights.grid_formats import GridFormat, grid_of
from memplan.muon.weights.quantised import QuantisedHandle, QuantisedWeight
from memplan.muon.weights.weight_codecs import weight_format
from memplan.trace.reference.run_options import Runtime

PATTERN_ROWS = 16
"""Rows that are coded from random numbers; all other rows of a fresh weight repeat them."""


def library_format(layout: StorageFormat) -> str | None:
    """Return the library's name of a format, or None where it has no such format.

    Raises:
        CannotAnswerError: The format's grid is in a package that is not installed.
    """
    if layout.codec is not None and isinstance(weight_format(layout.codec), GridFormat) and find_spec("gguf") is None:
        raise CannotAnswerError(
            f"weights in {layout.codec} are traced with the grid of the gguf package: pip install gguf"
        )
    return layout.codec


class CodedMatrix(QuantisedWeight):
    """A matrix, or a stack of them, over codes that a module already holds.

    Args:
        codes: All codes, flat.
        whole: Dimensions of the weight.
    """

    def __init__(self, codes: Tensor, name: str, whole: tuple[int, ...]) -> None:
        super().__init__(codes.view(prod(whole[:-1]), -1), name, whole[-1])
        self.whole = torch.Size(whole)
        self.gradient = GradientStore("bf16", self.whole)
        self.tables()  # made once in a process: not part of any step

    def decoded(self, dtype: torch.dtype) -> Tensor:
        """Return the whole weight in ``dtype``."""
        return self.dequantised(dtype).view(self.whole)

    def tables(self) -> tuple[Tensor, ...]:
        """Return the tables that the format's codes point into."""
        return grid_of(self.format.name, self.codes.device) if isinstance(self.format, GridFormat) else ()

    def as_handle(self) -> QuantisedHandle:
        """Return how the optimizer updates this weight."""
        return StackHandle(self)

    @torch.no_grad()
    def initialise(self) -> None:
        """Code small random numbers, the same for every few rows."""
        rows = min(PATTERN_ROWS, self.codes.shape[0])
        values = torch.empty(rows, self.shape[1], device=self.codes.device).normal_(0.0, 0.02)
        pattern = QuantisedWeight.of(values, self.format.name).codes
        for first in range(0, self.codes.shape[0], rows):
            part = self.codes[first : first + rows]
            part.copy_(pattern[: part.shape[0]])


class StackHandle(QuantisedHandle):
    """A coded weight as an update sees it, experts in a stack of their own."""

    weight: CodedMatrix

    @property
    def shape(self) -> torch.Size:
        """Shape of the weight, leading experts included."""
        return self.weight.whole

    def on_gradient(self, call: Callable[[], None]) -> Any:
        """Do nothing: the module whose weight this is says when a gradient is complete."""
        del call


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
