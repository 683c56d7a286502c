"""Parts of a reference model: projections, norms, attention and dense feed-forward parts."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memplan.catalog.training_config import Adapter
from memplan.errors import CannotAnswerError
from memplan.model.inventory import Role
from memplan.model.spec import Mlp, ModelSpec, Norm
from memplan.trace.reference.low_rank_adapters import AdapterPart
from memplan.trace.reference.operations import FusedRotary, activated, gated, rms_norm, rotated, squared_relu
from memplan.trace.reference.run_options import Runtime
from memplan.trace.reference.weight_storage import Weight


class Tables(NamedTuple):
    """What depends on positions only."""

    cos: Tensor  # Cosines (tokens, rotary width)
    sin: Tensor  # Sines, likewise
    mask: Tensor | None = None  # Where attention must not look (tokens, tokens), for attention without a kernel


def attach(root: nn.Module, path: str, module: nn.Module) -> nn.Module:
    """Register ``module`` under the dotted ``path`` below ``root`` and return it."""
    *parents, name = path.split(".")
    for parent in parents:
        if parent not in root._modules:
            root.add_module(parent, nn.Module())
        root = root.get_submodule(parent)
    root.add_module(name, module)
    return module


def parameter(shape: tuple[int, ...], role: Role, run: Runtime, device: torch.device) -> nn.Parameter:
    """Return an uninitialised parameter in the dtype that its role has."""
    tensor = torch.empty(shape, dtype=run.options.weight_dtype(role), device=device)
    return nn.Parameter(tensor, requires_grad=run.options.trains_weights)


class Linear(nn.Module):
    """A projection; ``transposed`` stores its weight (in, out), as GPT-2 does."""

    def __init__(
        self,
        rows: int,
        columns: int,
        run: Runtime,
        device: torch.device,
        *,
        bias: bool = False,
        transposed: bool = False,
        role: Role = "hidden_matrix",
        shared: Weight | None = None,
    ) -> None:
        super().__init__()
        self.run, self.transposed, self.rows = run, transposed, rows
        shape = (columns, rows) if transposed else (rows, columns)
        self.stored = shared or Weight(shape, role, run, device)
        self.stored.register(self, "weight")
        self.bias = parameter((rows,), "bias", run, device) if bias else None
        self._adapter: tuple[AdapterPart, ...] = ()

    def adapt(self, adapter: Adapter, device: torch.device) -> None:
        """Put an adapter beside the weight."""
        columns, rows = self.stored.shape if self.transposed else self.stored.shape[::-1]
        part = AdapterPart(rows, columns, adapter, self.run, device)
        part.register(self)
        self._adapter = (part,)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x @ weight.T + bias`` in the compute dtype, with the adapter's part added."""
        result = self._projected(self.run.lowered(x))
        for adapter in self._adapter:
            result = adapter(x, result, self.stored, self.bias, transposed=self.transposed, training=self.training)
        return result

    def _projected(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.run.lowered(self.bias)
        if not self.transposed or self.stored.quantized:
            return self.stored.product(x, bias, transposed=self.transposed)
        rows, weight = x.reshape(-1, x.shape[-1]), self.run.lowered(self.stored.tensor)
        product = torch.mm(rows, weight) if bias is None else torch.addmm(bias.to(weight.dtype), rows, weight)
        return product.view(*x.shape[:-1], self.rows)


class NormPart(nn.Module):
    """A norm as the profile has it: one kernel, or a chain of operations in fp32."""

    def __init__(self, norm: Norm, size: int, run: Runtime, device: torch.device) -> None:
        super().__init__()
        self.norm, self.size, self.run = norm, size, run
        self.weight = parameter((size,), "norm", run, device) if norm.weight else None
        self.bias = parameter((size,), "bias", run, device) if norm.bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` normalised over its last dimension; autocast does it in fp32."""
        x = self.run.full(x)
        weight, bias = self._like(self.weight, x), self._like(self.bias, x)
        if self.norm.kind == "layer":
            return F.layer_norm(x, (self.size,), weight, bias, self.norm.epsilon)
        if self.run.options.profile.norm == "composite":
            return self._composite(x, weight)
        if self.norm.unit_offset and weight is not None:
            weight = 1 + weight
        return rms_norm(x, weight, self.norm.epsilon, self.run.options.target)

    def _like(self, tensor: Tensor | None, x: Tensor) -> Tensor | None:
        """Return ``tensor`` in the dtype of ``x``: norms in fp32 between bf16 activations are cast."""
        if tensor is None or tensor.dtype == x.dtype:
            return tensor
        copy = tensor.to(x.dtype)
        self.run.probe.weight_copy(copy)
        return copy

    def _composite(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """Return the norm as Python code writes it, with the square in fp32."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.norm.epsilon)
        if weight is None:
            return wide.to(x.dtype)
        if self.norm.unit_offset:
            wide = wide * (1.0 + weight.float())  # what is scaled goes before the cast, as in transformers' own
            return wide.to(x.dtype)
        return weight * wide.to(x.dtype)


def rotary(x: Tensor, tables: Tables, width: int, run: Runtime) -> Tensor:
    """Return ``x`` (batch, heads, tokens, head width) with its first ``width`` dimensions rotated."""
    if not width:
        return x
    if run.options.profile.rotary == "fused":
        return FusedRotary.apply(x, tables.cos, tables.sin)  # type: ignore[no-any-return, no-untyped-call]
    if run.options.profile.rotary != "composite":
        raise CannotAnswerError(f"rotary kernel {run.options.profile.rotary} is traced in its library's own code only")
    if width == x.shape[-1]:
        return rotated(x, tables.cos, tables.sin)
    first, rest = x[..., :width], x[..., width:]
    return torch.cat((rotated(first, tables.cos, tables.sin), rest), dim=-1)


class MlpPart(nn.Module):
    """A dense feed-forward part, gated or plain."""

    def __init__(self, spec: ModelSpec, part: Mlp, run: Runtime, device: torch.device) -> None:
        super().__init__()
        self.part, self.run = part, run
        names, hidden, inner = spec.names, spec.hidden_size, part.intermediate_size

        def linear(name: str, rows: int, columns: int) -> nn.Module:
            made = Linear(rows, columns, run, device, bias=part.bias, transposed=spec.transposed_linear)
            return attach(self, name, made)

        if part.gated and part.fused_gate_up:
            self._up: tuple[nn.Module, ...] = (linear(names.gate_up, 2 * inner, hidden),)
        elif part.gated:
            self._up = (linear(names.gate, inner, hidden), linear(names.up, inner, hidden))
        else:
            self._up = (linear(names.up, inner, hidden),)
        self._down = (linear(names.down, hidden, inner),)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the feed-forward part adds to the residual stream."""
        kind, kernel = self.part.activation, self.run.options.profile.activation
        result: Tensor
        if kind == "relu-squared":
            result = self._down[0](squared_relu(self.run, self._up[0](x)))
        elif not self.part.gated:
            result = self._down[0](activated(self._up[0](x), kind))
        elif self.part.fused_gate_up:
            gate, up = self._up[0](x).chunk(2, -1)
            result = self._down[0](gated(gate, up, kind, kernel))
        elif kernel == "fused":
            result = self._down[0](gated(self._up[0](x), self._up[1](x), kind, kernel))
        else:
            result = self._down[0](activated(self._up[0](x), kind) * self._up[1](x))
        return result
