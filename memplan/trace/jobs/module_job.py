"""The training job of a user's module."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from memplan.errors import CannotAnswerError
from memplan.model.inventory import Role
from memplan.trace.jobs.gradient_lifetimes import Trained
from memplan.trace.jobs.training_job import Job, Watcher, watch_layers
from memplan.trace.recording.trace_result import Component
from memplan.trace.reference.run_options import TORCH_DTYPES
from memplan.training.resolved import TrainingSetup


class ModuleJob(Job):
    """A module in training, whose loss is its scalar output or the cross-entropy of its logits.

    Args:
        module: On ``meta``.
        targets: Tokens to predict, for modules that return logits.
        vocab_size: Width of tensors that count as logits; 0 to learn it from the output.
    """

    def __init__(
        self, module: nn.Module, setup: TrainingSetup, inputs: Mapping[str, Any], targets: Tensor, vocab_size: int = 0
    ) -> None:
        self.inputs, self.targets, self.vocab_size = dict(inputs), targets, vocab_size
        roles: dict[int, Role] = {}
        head = getattr(module, "get_output_embeddings", lambda: None)()
        for part in module.modules():
            for name, tensor in part.named_parameters(recurse=False):
                if id(tensor) in roles:
                    continue
                roles[id(tensor)] = _role(part, name, tensor, part is head)
        gradient = setup.config.gradients.dtype
        keeps = None if gradient is None else TORCH_DTYPES[gradient]
        trained = [
            Trained(name, roles[id(tensor)], tuple(tensor.shape), tensor, None, keeps)
            for name, tensor in module.named_parameters()
            if tensor.requires_grad
        ]
        super().__init__(module, setup, trained, "meta")
        if self.config.evaluation_batch_size not in (None, self.config.micro_batch_size):
            raise CannotAnswerError("evaluation_batch_size: a module is evaluated on the inputs that it is trained on")

    def loss(self) -> Tensor:
        """Return the loss of one micro-batch."""
        output = _loss_or_logits(self.model(**self.inputs))
        if output.dim() == 0:
            return output
        self.vocab_size = output.shape[-1]
        logits = output.flatten(0, -2)
        if self.setup.profile.loss != "bf16":
            logits = logits.float()
        return F.cross_entropy(logits, self.targets.flatten())

    def tensors(self) -> Iterator[tuple[str, Tensor, Component]]:
        """Yield weights, buffers and data."""
        yield from ((name, tensor, "weights") for name, tensor in self.model.named_parameters())
        yield from ((name, tensor, "buffers") for name, tensor in self.model.named_buffers())
        for tensor in (*self.inputs.values(), self.targets):
            if isinstance(tensor, Tensor):
                yield "", tensor, "buffers"

    def watch(self, watcher: Watcher) -> None:
        """Let ``watcher`` see what there is, and where backward is."""
        super().watch(watcher)
        lists = [list(part) for part in self.model.modules() if isinstance(part, nn.ModuleList)]
        alike = [layers for layers in lists if len({type(layer) for layer in layers}) == 1]
        layers = max(alike, key=len, default=[])
        head = getattr(self.model, "get_output_embeddings", lambda: None)()
        watch_layers(layers, head if isinstance(head, nn.Module) else None, watcher)


def _loss_or_logits(output: Any) -> Tensor:
    """Return the loss, or logits, that a module's forward returned."""
    for candidate in (getattr(output, "loss", None), getattr(output, "logits", None), output):
        if isinstance(candidate, tuple | list) and candidate:
            candidate = candidate[0]
        if isinstance(candidate, Tensor) and candidate.requires_grad and candidate.dim() != 1:
            return candidate
    kind = type(output).__name__
    raise CannotAnswerError(
        f"the module's forward returned {kind}, not a scalar loss or logits (batch, tokens, vocabulary) that depend on "
        "its parameters; wrap it in a module that does"
    )


def _role(part: nn.Module, name: str, tensor: Tensor, is_head: bool) -> Role:
    if isinstance(part, nn.Embedding):
        return "embedding"
    if tensor.dim() < 2:
        return "bias" if name.endswith("bias") else "norm"
    if is_head:
        return "head"
    return "expert_matrix" if tensor.dim() == 3 else "hidden_matrix"
