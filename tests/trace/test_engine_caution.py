"""Which operators of backward a trace takes for the engine's own."""

import os
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memplan.trace.recording.engine_caution import is_in_place

SOURCE = """
class Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad(), Passing():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            turned = (x * 2) + (x * 3)
        return gradient * turned.detach()
"""
"""A function whose backward computes a sum again under a mode, as selective checkpointing does, of tensors that nobody else holds."""


class _Passing(TorchDispatchMode):
    """Runs every operator as it is."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Asking(TorchDispatchMode):
    """Asks of every sum whether the engine would have written it in place."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.add.Tensor:
            self.answers.append(is_in_place(func, args))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("package", "in_place"), [("torchtitan", False), ("torchtune", False), ("torch", True)])
def test_code_beside_torch_is_none_of_the_engine(package: str, in_place: bool) -> None:
    """Directories of torchtitan and torchtune begin with the name of torch's: sums that they compute again are new tensors."""
    names: dict[str, Any] = {"torch": torch, "Passing": _Passing}
    path = os.path.join(os.path.dirname(torch.__path__[0]), package, "functions.py")
    exec(compile(SOURCE, path, "exec"), names)  # under a file name of that package
    x = torch.ones(3, requires_grad=True)
    out = names["Again"].apply(x).sum()
    with _Asking() as asking:
        out.backward()
    assert asking.answers == [in_place]
