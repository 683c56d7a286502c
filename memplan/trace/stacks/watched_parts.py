"""A library's model, layer by layer, told to a recorder: what it holds, and where its backward is; and the card that its code is given."""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from memplan.errors import CannotAnswerError
from memplan.trace.jobs.bundled_optimizer import state_tensors
from memplan.trace.jobs.optimizers import cuda_optimizer_paths
from memplan.trace.jobs.training_job import watch_layers
from memplan.trace.pretended_cuda.autocast_region import cuda_autocast
from memplan.trace.pretended_cuda.bitsandbytes_layers import quantised_tensors
from memplan.trace.pretended_cuda.composite_kernels import composite_kernels
from memplan.trace.recording.recorder import Recorder
from memplan.training.resolved import TrainingSetup


@contextmanager
def pretended_card(compute_capability: str) -> Iterator[None]:
    """Run autocast, kernels and optimizers on ``meta`` tensors as on a card."""
    with cuda_autocast(), composite_kernels(compute_capability), cuda_optimizer_paths():
        yield


def watch_parts(model: nn.Module, layers: Iterable[nn.Module], head: nn.Module | None, recorder: Recorder) -> None:
    """Let ``recorder`` see a model's tensors, its gradients as they are finished, and where backward is.

    Args:
        layers: Its layers in order, as its forward calls them.
    """
    watch_tensors(model, recorder)
    watch_layers(layers, head, recorder)


def watch_tensors(model: nn.Module, recorder: Recorder) -> None:
    """Let ``recorder`` see a model's tensors, codes with what they have beside them, and its gradients as they are finished."""
    beside = defaultdict[str, list[Tensor]](list)
    for name, tensor in quantised_tensors(model) if "bitsandbytes" in sys.modules else ():
        beside[name].append(tensor)
    for name, parameter in model.named_parameters():
        for tensor in (*stored_tensors(parameter), *beside[name]):
            recorder.mark(tensor, "weights", name)
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(finished_gradient(recorder, name))  # type: ignore[no-untyped-call]
    for name, tensor in model.named_buffers():
        recorder.mark(tensor, "buffers", name)


def stored_tensors(parameter: Any) -> Iterator[Tensor]:
    """Yield the tensors that a parameter is stored in: itself, or codes, scales and tables of a subclass."""
    if hasattr(parameter, "__tensor_flatten__"):
        parts = (getattr(parameter, name) for name in parameter.__tensor_flatten__()[0])
        yield from (part for part in parts if isinstance(part, Tensor))
    else:
        yield parameter


def watch_states(optimizer: torch.optim.Optimizer, recorder: Recorder) -> None:
    """Book the states of an optimizer, as far as it has made them."""
    for tensor, key in state_tensors(optimizer):
        recorder.mark(tensor, "optimizer_states", key)


def refuse_settings(
    setup: TrainingSetup, name: str, *, evaluates: bool = False, compiles: str = "none", fills: bool = False
) -> None:
    """Refuse what no loop of these libraries has; some evaluate, compile the whole model or each layer, or fill gradients.

    Raises:
        CannotAnswerError: The setup asks for it.
    """
    config = setup.config
    requested = {
        "loss_scaling": config.loss_scaling,
        "master_weights": config.master_weights != "none",
        "weight_average": config.weight_average != "none",
        "gradients.dtype": config.gradients.dtype is not None,
        "offload": setup.offloads_states,
        "evaluation": config.evaluation and not evaluates,
        f"compile: {config.compile}": config.compile not in ("none", compiles),
        "zero_gradients": config.zero_gradients == "fill" and not fills,
    }
    for key in [key for key, given in requested.items() if given]:
        raise CannotAnswerError(f"{key}: the code of {name} has no such setting that could be traced")


def finished_gradient(recorder: Recorder, name: str) -> Callable[[Tensor], None]:
    """Return a hook that books a parameter's gradient."""

    def hook(parameter: Tensor) -> None:
        if parameter.grad is not None:
            recorder.mark(parameter.grad, "gradients", name)

    return hook
