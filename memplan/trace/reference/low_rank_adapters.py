"""Low-rank adapters on frozen projections, as PEFT computes them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memplan.catalog.training_config import ALL_LINEAR, Adapter
from memplan.trace.reference.operations import dropped
from memplan.trace.reference.run_options import Runtime
from memplan.trace.reference.weight_storage import Weight

SCALING = 2.0
"""alpha / rank; its value moves no memory."""


class AdapterPart:
    """Two narrow matrices beside a frozen one; DoRA adds a magnitude per row of the weight.

    Source:
        ``Linear.forward`` and ``DoraLinearLayer.forward`` in peft/tuners/lora/{layer,dora}.py.
    """

    def __init__(self, rows: int, columns: int, adapter: Adapter, run: Runtime, device: torch.device) -> None:
        dtype = run.options.adapter_dtype
        self.run, self.dropout = run, adapter.dropout or 0.0
        self.down = nn.Parameter(torch.empty((adapter.rank, columns), dtype=dtype, device=device))
        self.up = nn.Parameter(torch.empty((rows, adapter.rank), dtype=dtype, device=device))
        self.magnitude = nn.Parameter(torch.empty(rows, dtype=dtype, device=device)) if adapter.kind == "dora" else None

    def register(self, module: nn.Module) -> None:
        """Register the parameters below ``module`` under the names that PEFT gives them."""
        named = {"lora_A": self.down, "lora_B": self.up, "lora_magnitude_vector": self.magnitude}
        for name, tensor in named.items():
            if tensor is not None:
                holder = nn.Module()
                holder.register_parameter("weight", tensor)
                module.add_module(name, holder)

    def __call__(
        self,
        x: Tensor,
        result: Tensor,
        weight: Weight,
        bias: Tensor | None = None,
        *,
        transposed: bool = False,
        training: bool = True,
    ) -> Tensor:
        """Return ``result``, the frozen projection of ``x``, with the adapter's part added.

        DoRA's magnitude scales what the weight contributes, not the bias, which is taken away first.

        Args:
            bias: The bias, if there is one.
            transposed: The weight is stored (in, out), as Conv1D stores it; PEFT's ``fan_in_fan_out``.
            training: Whether what the adapter is given is dropped, where it is; DoRA then multiplies that by the weight, too.
        """
        own = x.to(self.down.dtype)
        drops = self.dropout if training else 0.0
        if self.magnitude is None:
            return result + (self._low_rank(own, drops) * SCALING).to(result.dtype)
        x = dropped(own, drops, self.run.options.target)
        norm, frozen = self._norm(own, weight, transposed)
        scale = (self.magnitude / norm).view(1, -1)
        del norm
        if drops:
            base = F.linear(self.run.lowered(x), self.run.lowered(frozen))
        else:
            base = result if bias is None else result - bias
        del frozen
        added = (scale - 1) * base + scale * self._low_rank(x) * SCALING
        del x, scale
        added = added.to(result.dtype)
        return result + added

    def _norm(self, x: Tensor, weight: Weight, transposed: bool) -> tuple[Tensor, Tensor]:
        """Return the norm of each output of the adapted weight, which DoRA treats as a constant, and the frozen weight."""
        eye = torch.eye(self.down.shape[1], dtype=x.dtype, device=x.device)
        product = self._low_rank(eye).T.detach()
        stored = weight.decoded() if weight.quantized else weight.tensor
        frozen = (stored.T if transposed else stored).to(x.dtype)
        whole = frozen + SCALING * product
        norm: Tensor = torch.linalg.vector_norm(whole, dim=1)
        return norm.detach(), frozen

    def _low_rank(self, x: Tensor, drops: float = 0.0) -> Tensor:
        lowered = self.run.lowered
        low = F.linear(lowered(dropped(x, drops, self.run.options.target)), lowered(self.down))
        return F.linear(low, lowered(self.up))


def adapts(adapter: Adapter, name: str) -> bool:
    """Tell whether the projection called ``name`` gets an adapter."""
    return adapter.targets == ALL_LINEAR or name.rpartition(".")[2] in adapter.targets
