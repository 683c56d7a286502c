"""Feed-forward parts of routed experts, computed as grouped matrix products over sorted tokens."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memplan.model.spec import MixtureOfExperts, Mlp, ModelSpec
from memplan.trace.reference.operations import gated
from memplan.trace.reference.parts import Linear, MlpPart, attach, parameter
from memplan.trace.reference.run_options import Runtime
from memplan.trace.reference.weight_storage import Weight

LEAST_SIGMOIDS = 1e-20
"""Added to the sum of sigmoids, which may vanish (``DeepseekV3TopkRouter`` in transformers 5)."""


class Router(nn.Module):
    """Scores of all experts for each token; the choice is made in fp32."""

    def __init__(self, spec: ModelSpec, part: MixtureOfExperts, run: Runtime, device: torch.device) -> None:
        super().__init__()
        self.part, self.run = part, run
        self.stored = Weight((part.num_experts, spec.hidden_size), "router", run, device)
        self.stored.register(self, "weight")
        self.bias = parameter((part.num_experts,), "bias", run, device) if part.router_bias else None
        self.offset: Tensor | None = None
        if part.score_correction:
            self.offset = torch.empty(part.num_experts, dtype=torch.float32, device=device)
            self.register_buffer("e_score_correction_bias", self.offset)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights and numbers of the chosen experts, (tokens, experts per token) each."""
        part, logits = self.part, self._logits(x)
        if part.softmax_of_chosen:
            weights, chosen = (logits.float() if part.fp32_choice else logits).topk(part.experts_per_token, -1)
            weights = weights.softmax(-1)
            return weights.type_as(x) if part.fp32_choice else weights, chosen
        weights, chosen = self._chosen(logits.float())
        if part.normalised:
            total = weights.sum(-1, keepdim=True)
            weights = weights / (total if self.offset is None else total + LEAST_SIGMOIDS)
        if part.score_scale != 1.0:
            weights = weights * part.score_scale
        return weights if part.fp32_scores else weights.to(self.run.options.compute_dtype), chosen

    def _logits(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.run.lowered(self.bias)
        if self.part.fp32_router and not self.stored.quantized and not self.run.options.autocast:
            wide = self.stored.tensor.float()
            if wide is not self.stored.tensor:
                self.run.probe.weight_copy(wide)
            return F.linear(x.float(), wide)
        return self.stored.product(self.run.lowered(x), bias)

    def _chosen(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return scores and numbers of the chosen experts; groups that take no part are masked."""
        used = self.part.experts_per_token
        if self.offset is None:
            scores = logits.softmax(-1)
            if self.part.groups > 1:
                scores = scores.masked_fill(~self._open_groups(scores, 1), 0.0)
            weights, chosen = scores.topk(used, -1)
            return weights, chosen
        scores = logits.sigmoid()
        choice = scores + self.offset
        if self.part.groups > 1:
            choice = choice.masked_fill(~self._open_groups(choice, 2), float("-inf"))
        chosen = choice.topk(used, -1).indices
        return scores.gather(1, chosen), chosen

    def _open_groups(self, scores: Tensor, best: int) -> Tensor:
        """Return where experts may be chosen: in the groups whose ``best`` highest scores have the largest sum."""
        # Source: ``DeepseekV2TopkRouter`` (the highest) and ``DeepseekV3TopkRouter`` (the two highest) in transformers
        # 5.
        part = self.part
        grouped = scores.view(len(scores), part.groups, -1)
        groups = grouped.topk(best, -1).values.sum(-1).topk(part.groups_per_token, -1).indices
        mask = torch.zeros_like(grouped[..., 0]).scatter(1, groups, 1.0)
        return mask.bool()[..., None].expand_as(grouped).reshape(scores.shape)


class Experts(nn.Module):
    """Gated MLPs whose weights are stacked, one tensor per projection.

    Source:
        ``grouped_mm_experts_forward`` in transformers 5, ``integrations/moe.py``.
    """

    def __init__(self, spec: ModelSpec, part: MixtureOfExperts, run: Runtime, device: torch.device) -> None:
        super().__init__()
        self.part, self.run = part, run
        hidden, inner, experts = spec.hidden_size, part.intermediate_size, part.num_experts
        up, down = ((hidden, 2 * inner), (inner, hidden)) if part.transposed else ((2 * inner, hidden), (hidden, inner))
        self._biases: tuple[str, ...] = ()
        projections = []
        for name, shape, width in (("gate_up_proj", up, 2 * inner), ("down_proj", down, hidden)):
            projections.append(Weight((experts, *shape), "expert_matrix", run, device))
            projections[-1].register(self, name)
            if part.expert_bias:
                self.register_parameter(f"{name}_bias", parameter((experts, width), "bias", run, device))
                self._biases += (f"{name}_bias",)
        self._up, self._down = projections

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Return the weighted sum of the chosen experts' outputs, (tokens, hidden)."""
        part = self.part
        used = part.experts_per_token
        experts, order = chosen.reshape(-1).sort()
        rows = self.run.lowered(x)[order // used]
        offsets = torch.histc(_countable(experts), bins=part.num_experts, min=0, max=part.num_experts - 1)
        offsets = offsets.cumsum(0, dtype=torch.int32)
        inner = self._product(rows, 0, offsets, experts)
        interleaved = part.activation == "clamped-swiglu"  # gpt-oss
        gate, up = (inner[..., ::2], inner[..., 1::2]) if interleaved else inner.chunk(2, -1)
        inner = gated(gate, up, part.activation, self.run.options.profile.activation)
        out = self._product(inner, 1, offsets, experts)
        out = out * weights.reshape(-1)[order, None]
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        return out[back].view(len(x), used, -1).sum(1).to(rows.dtype)

    def _product(self, rows: Tensor, which: int, offsets: Tensor, experts: Tensor) -> Tensor:
        """Return each row times the matrix of its expert, plus that expert's bias."""
        stored = (self._up, self._down)[which]
        out = stored.grouped_product(rows, offsets, transposed=self.part.transposed)
        if self._biases:
            bias = self.run.lowered(self.get_parameter(self._biases[which])).to(out.dtype)[experts]
            # Selective checkpointing keeps the product and forbids changing it in place.
            out = out + bias if self.run.options.checkpointing == "selective" else out.add_(bias)
        return out


def _countable(experts: Tensor) -> Tensor:
    """Return expert numbers in a dtype that ``histc`` of their device takes."""
    return experts.float() if experts.device.type == "cpu" else experts.int()


class MixturePart(nn.Module):
    """Router, routed experts, and shared experts where there are some."""

    def __init__(self, spec: ModelSpec, part: MixtureOfExperts, run: Runtime, device: torch.device) -> None:
        super().__init__()
        self.part = part
        names = spec.names
        self._router = (attach(self, names.router, Router(spec, part, run, device)),)
        self._experts = (attach(self, names.experts, Experts(spec, part, run, device)),)
        self._shared: tuple[nn.Module, ...] = ()
        if part.shared_intermediate_size:
            shared = Mlp(part.shared_intermediate_size, part.activation)
            self._shared = (attach(self, names.shared_experts, MlpPart(spec, shared, run, device)),)
        self._gate: tuple[nn.Module, ...] = ()
        if part.shared_gate:
            self._gate = (attach(self, names.shared_gate, Linear(1, spec.hidden_size, run, device, role="router")),)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the experts add to the residual stream."""
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = self._router[0](flat)
        out: Tensor = self._experts[0](flat, weights, chosen)
        if self._shared:
            shared = self._shared[0](flat)
            if self._gate:
                shared = torch.sigmoid(self._gate[0](flat)) * shared
            out = out + shared
        return out.view(x.shape)
