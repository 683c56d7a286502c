"""A plain decoder built from a :class:`ModelSpec`: what the planner's formulas are held against."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from memplan.catalog.training_config import Adapter
from memplan.errors import CannotAnswerError
from memplan.model.gated_delta_net import GatedDeltaNet
from memplan.model.parameter_tensors import norm_names
from memplan.model.short_convolution import ShortConvolution
from memplan.model.spec import LatentAttention, Layer, MixtureOfExperts, ModelSpec
from memplan.model.state_space import StateSpace
from memplan.trace.reference.low_rank_adapters import adapts
from memplan.trace.reference.mixture import MixturePart
from memplan.trace.reference.multi_head import AttentionPart, LatentPart
from memplan.trace.reference.operations import dropped
from memplan.trace.reference.parts import Linear, MlpPart, NormPart, Tables, attach
from memplan.trace.reference.run_options import ReferenceOptions, Runtime
from memplan.trace.reference.weight_storage import Weight


class Embedding(nn.Module):
    """Rows of a table, looked up by token or position."""

    def __init__(self, rows: int, width: int, run: Runtime, device: torch.device) -> None:
        super().__init__()
        self.stored = Weight((rows, width), "embedding", run, device)
        self.stored.register(self, "weight")

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows that ``ids`` name."""
        return self.stored.looked_up(ids)


class LayerPart(nn.Module):
    """One layer: attention and a feed-forward part, joined as the placement of its norms says."""

    def __init__(self, spec: ModelSpec, layer: Layer, run: Runtime, device: torch.device) -> None:
        super().__init__()
        self.layer, self.run = layer, run
        names = spec.names
        norms = norm_names(names, layer)
        made = [attach(self, name, NormPart(layer.norm, spec.hidden_size, run, device)) for name in norms]
        self._norms = tuple(made)
        self._attention = (attach(self, names.attention, attention_part(spec, layer, run, device)),)
        self._feed_forward = (_attached(self, names.mlp, feed_forward_part(spec, layer, run, device)),)

    def forward(self, x: Tensor, tables: Tables) -> Tensor:
        """Return the residual stream after the layer."""
        attend, feed, norms = self._attention[0], self._feed_forward[0], self._norms
        if self.layer.placement == "parallel":
            first = norms[0](x)
            second = norms[1](x) if len(norms) > 1 else first
            return x + self._dropped(attend(first, tables)) + self._dropped(feed(second))
        if self.layer.placement == "post":
            x = x + self._dropped(norms[0](attend(x, tables)))
            return x + self._dropped(norms[1](feed(x)))
        if self.layer.placement == "sandwich":
            x = x + self._dropped(norms[1](attend(norms[0](x), tables)))
            return x + self._dropped(norms[3](feed(norms[2](x))))
        scale = self.layer.residual_scale or None
        x = x + self._dropped(attend(norms[0](x), tables), scale)
        return x + self._dropped(feed(norms[1](x)), scale)

    def _dropped(self, x: Tensor, scale: float | None = None) -> Tensor:
        options = self.run.options
        x = dropped(x, options.dropout if self.training else 0.0, options.target)
        return x if scale is None else x * scale


def _attached(layer: nn.Module, path: str, part: nn.Module) -> nn.Module:
    """Register a part below a layer, or its modules in the layer itself where it has no name; return it."""
    if path:
        return attach(layer, path, part)
    for name, module in part.named_children():
        layer.add_module(name, module)
    return part


def attention_part(spec: ModelSpec, layer: Layer, run: Runtime, device: torch.device) -> nn.Module:
    """Return the attention of ``layer``.

    Raises:
        CannotAnswerError: It is a gated delta network, or gated as attention beside them is, or a state space layer.
    """
    if isinstance(layer.attention, LatentAttention):
        return LatentPart(spec, layer.attention, run, device)
    if isinstance(layer.attention, ShortConvolution | StateSpace) or layer.beside is not None:
        what = "short convolutions" if isinstance(layer.attention, ShortConvolution) else "state space layers"
        raise CannotAnswerError(f"{spec.name} has {what}, which transformers' models run and memplan's own do not")
    assert layer.attention is not None  # layers of one part are refused, here and below
    if isinstance(layer.attention, GatedDeltaNet) or layer.attention.output_gate:
        raise CannotAnswerError(
            f"{spec.name} has gated delta networks, which transformers' models run and memplan's own do not"
        )
    return AttentionPart(spec, layer.attention, run, device)


def feed_forward_part(spec: ModelSpec, layer: Layer, run: Runtime, device: torch.device) -> nn.Module:
    """Return the feed-forward part of ``layer``."""
    if isinstance(layer.feed_forward, MixtureOfExperts):
        return MixturePart(spec, layer.feed_forward, run, device)
    assert layer.feed_forward is not None
    return MlpPart(spec, layer.feed_forward, run, device)


class ReferenceModel(nn.Module):
    """A decoder whose parameters have the names and shapes of the inventory of ``spec``."""

    def __init__(self, spec: ModelSpec, options: ReferenceOptions, device: str = "meta") -> None:
        super().__init__()
        where, names = torch.device(device), spec.names
        self.spec, self.run = spec, Runtime(options)
        table = Embedding(spec.vocab_size, spec.hidden_size, self.run, where)
        self._embedding = (attach(self, names.embedding, table),)
        self._positions: tuple[nn.Module, ...] = ()
        if spec.learned_positions:
            rows = spec.learned_positions + spec.reserved_positions
            positions = Embedding(rows, spec.hidden_size, self.run, where)
            self._positions = (attach(self, names.positions, positions),)
        self._layers = tuple(
            attach(self, names.layer.format(index), LayerPart(spec, run.layer, self.run, where))
            for run in spec.runs
            for index in range(run.first, run.first + run.count)
        )
        self._final_norm = (
            attach(self, names.final_norm, NormPart(spec.final_norm, spec.hidden_size, self.run, where)),
        )
        tied = table.stored if spec.tie_word_embeddings else None
        head = Linear(spec.vocab_size, spec.hidden_size, self.run, where, bias=spec.head_bias, role="head", shared=tied)
        self._head = (attach(self, names.head, head),)
        if options.adapter is not None:
            self._adapt(options.adapter, where)

    def _adapt(self, adapter: Adapter, device: torch.device) -> None:
        for name, module in list(self.named_modules()):
            if isinstance(module, Linear) and module.stored.role == "hidden_matrix" and adapts(adapter, name):
                module.adapt(adapter, device)

    def initialise(self) -> None:
        """Fill the parameters of a model on a real device with small random numbers."""
        with torch.no_grad():
            for tensor in self.parameters():
                tensor.normal_(0.0, 0.02)
        for weight in self.run.coded.values():
            if weight.matrix is not None:
                weight.matrix.initialise()

    def forward(
        self, ids: Tensor, targets: Tensor, tables: tuple[Tables, ...], positions: Tensor | None = None
    ) -> Tensor:
        """Return the loss, a scalar.

        Args:
            ids: Tokens (batch, tokens).
            targets: Tokens to predict, already shifted (batch, tokens).
            tables: Rotary tables, one pair for each base.
            positions: Positions (1, tokens) for learned position embeddings.
        """
        with self.run.autocast_region():
            x = self._hidden(ids, tables, positions)
            self.run.probe.section("head")
            return self._loss(x, targets)

    def logits(self, ids: Tensor, tables: tuple[Tables, ...], positions: Tensor | None = None) -> Tensor:
        """Return the logits (batch, tokens, vocabulary); arguments as in :meth:`forward`."""
        with self.run.autocast_region():
            return self._logits(self._final_norm[0](self._hidden(ids, tables, positions)))

    def _hidden(self, ids: Tensor, tables: tuple[Tables, ...], positions: Tensor | None) -> Tensor:
        """Return the residual stream after the last layer."""
        options, probe = self.run.options, self.run.probe
        x: Tensor = self._embedding[0](ids)
        if self._positions and positions is not None:
            x = x + self._positions[0](positions)
        if self.spec.embedding_scale:
            x = x * self.spec.embedding_scale
        x = dropped(x, options.dropout if self.training else 0.0, options.target)
        probe.backward_reaches(x, "end of backward")
        for number, layer in enumerate(self._layers, start=1):
            probe.section(f"layer {number}")
            x = self._through(layer, x, tables[0], again=options.checkpointed_layers.has(number - 1))
            probe.backward_reaches(x, f"layer {number} backward")
        return x

    def _through(self, layer: nn.Module, x: Tensor, tables: Tables, *, again: bool) -> Tensor:
        """Return ``x`` after ``layer``, which keeps what the options say."""
        kind = self.run.options.checkpointing
        if kind == "none" or not again or not torch.is_grad_enabled():
            out: Tensor = layer(x, tables)
            return out
        step = partial(self._checkpointed, layer)
        if kind == "full":
            return checkpoint(step, x, tables, use_reentrant=False)  # type: ignore[no-any-return]
        contexts = partial(create_selective_checkpoint_contexts, _selective_policy)
        return checkpoint(step, x, tables, use_reentrant=False, context_fn=contexts)  # type: ignore[no-any-return]

    def _checkpointed(self, layer: nn.Module, x: Tensor, tables: Tables) -> Tensor:
        """Run ``layer`` as checkpointing does, in forward and again in backward."""
        self.run.probe.recomputing(True)
        try:
            with self.run.autocast_region():
                out: Tensor = layer(x, tables)
                return out
        finally:
            self.run.probe.recomputing(False)

    def _loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy, as the profile computes it."""
        x = self._final_norm[0](x)
        profile = self.run.options.profile
        if profile.loss == "chunked" and torch.is_grad_enabled():
            return self._chunked_loss(x, targets, profile.loss_chunks)
        logits = self._logits(x).view(-1, self.spec.vocab_size)
        if profile.loss != "bf16":
            logits = logits.float()
        return self._cross_entropy(logits, targets.view(-1), "mean")

    def _logits(self, x: Tensor) -> Tensor:
        logits: Tensor = self._head[0](x)
        self.run.probe.backward_reaches(logits, "head backward")
        if self.spec.logit_scale:
            logits = logits * self.spec.logit_scale
        cap = self.spec.final_logit_softcap
        if cap:
            logits = torch.tanh(logits / cap) * cap
        return logits

    def _cross_entropy(self, logits: Tensor, targets: Tensor, reduction: str) -> Tensor:
        """Return the cross-entropy.

        Under autocast ``log_softmax`` is given its dtype by ``cross_entropy_loss`` and stays in the
        dtype of the logits, while ``nll_loss`` runs, and keeps its input, in fp32.
        """
        # Source: aten/src/ATen/native/LossNLL.cpp and autocast_mode.h (``AT_FORALL_FP32``).
        if self.run.options.autocast:
            return F.nll_loss(self.run.full(F.log_softmax(logits, -1)), targets, reduction=reduction)
        return F.cross_entropy(logits, targets, reduction=reduction)

    def _chunked_loss(self, x: Tensor, targets: Tensor, chunks: int) -> Tensor:
        """Return the loss over chunks of tokens, whose logits are formed again in backward."""
        parts = zip(x.flatten(0, 1).chunk(chunks), targets.flatten().chunk(chunks), strict=True)
        losses = []
        for rows, wanted in parts:
            loss = checkpoint(self._chunk_loss, rows, wanted, use_reentrant=False)
            self.run.probe.backward_reaches(loss, "loss backward")
            losses.append(loss)
        total: Tensor = sum(losses[1:], start=losses[0]) / targets.numel()
        return total

    def _chunk_loss(self, x: Tensor, targets: Tensor) -> Tensor:
        self.run.probe.recomputing(True)
        try:
            with self.run.autocast_region():
                return self._cross_entropy(self._logits(x).float(), targets, "sum")
        finally:
            self.run.probe.recomputing(False)


_MATRIX_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_scaled_mm"})


def _selective_policy(
    context: object, operation: torch._ops.OpOverload, *args: object, **kwargs: object
) -> CheckpointPolicy:
    """Save the results of matrix products and attention; everything else is computed again."""
    del context, args, kwargs
    name = operation._schema.name.removeprefix("aten::")
    if name in _MATRIX_PRODUCTS or name.startswith("_scaled_dot_product_"):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
