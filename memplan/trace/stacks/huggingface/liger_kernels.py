"""Liger's kernels on a model of transformers: its own Python code, whose Triton kernels write into what that code allocates.

A kernel that is not launched has done all that matters here. Where the code asks whether a tensor is on CUDA, ``meta`` is.
"""

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch

from memplan.errors import CannotAnswerError
from memplan.trace.pretended_cuda.idle_kernels import idle_launches
from memplan.training.resolved import TrainingSetup

OPTIONS = {
    "norm": ("in-place", "rms_norm"),
    "rotary": ("in-place", "rope"),
    "activation": ("in-place", "swiglu"),
    "loss": ("fused-linear", "fused_linear_cross_entropy"),
}
"""Key of a kernel profile -> its value that stands for Liger's kernel, and what ``liger_kernel_config`` calls that."""

LOSS = "liger_kernel.ops.fused_linear_cross_entropy"
PATCHED: list[tuple[str, dict[str, Any]]] = []
"""Modules that :func:`with_liger` has changed, with what they were."""

ON_CUDA = ("_can_use_mm_out", "fused_linear_cross_entropy_forward")


def liger_options(setup: TrainingSetup) -> dict[str, bool]:
    """Return which of Liger's kernels a setup asks for; a model that scores has no head for its loss."""
    return {
        option: getattr(setup.profile, key) == value and not (setup.scores and key == "loss")
        for key, (value, option) in OPTIONS.items()
    }


def with_liger(model: Any, setup: TrainingSetup) -> None:
    """Put Liger's kernels into a model, as ``apply_liger_kernel`` of transformers does.

    Raises:
        CannotAnswerError: Liger is not installed, or has no kernels for the model.
    """
    options = liger_options(setup)
    if not any(options.values()):
        return
    try:
        patches = import_module("liger_kernel.transformers.monkey_patch")
    except ImportError:
        raise CannotAnswerError("tracing Liger's kernels needs liger-kernel and triton") from None
    kind = model.config.model_type
    apply = patches.MODEL_TYPE_TO_APPLY_LIGER_FN.get(kind)
    if apply is None:
        raise CannotAnswerError(f"Liger has no kernels for {kind}")
    known = inspect.signature(apply).parameters
    named = {"geglu" if name == "swiglu" and name not in known else name: on for name, on in options.items()}
    module = type(model).__module__
    PATCHED.append((module, dict(vars(sys.modules[module]))))
    apply(model=model, **{name: on for name, on in named.items() if name in known})


@contextmanager
def liger_backend(compute_capability: str) -> Iterator[None]:
    """Launch no Triton kernel, take the branches of CUDA, and put modules back as they were."""
    try:
        loss: Any = import_module(LOSS)
    except ImportError:
        yield
        return
    capability = torch.cuda.get_device_capability
    functions = {name: getattr(loss, name) for name in ON_CUDA}
    major, _, minor = compute_capability.partition(".")
    torch.cuda.get_device_capability = lambda _=None: (int(major), int(minor))  # type: ignore[assignment]
    for function in functions.values():
        text = inspect.getsource(function).replace('"cuda"', '"meta"').replace('dtype("meta")', 'dtype("cuda")')
        exec(compile(text, loss.__file__, "exec"), vars(loss))
    try:
        with idle_launches():
            yield
    finally:
        torch.cuda.get_device_capability = capability
        vars(loss).update(functions)
        while PATCHED:
            name, values = PATCHED.pop()
            vars(sys.modules[name]).update(values)
