"""Optimizers of other packages, with allocations in their order, for traces without those packages.

Each does what its package does with its default options, weight decay left out, which none of them
allocates for. A test runs the packages beside them where they are installed.
"""

from collections.abc import Callable, Iterable, Iterator
from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

BLOCK_ELEMENTS = 256
EXEMPT_BELOW = 4096
"""Of bitsandbytes' 8-bit states (``min_8bit_size``)."""
PAGED_FROM = 100_000
"""Elements of a tensor whose states bitsandbytes' paged optimizers page."""


class _Plain(Optimizer):
    """An optimizer with one set of options."""

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def _with_gradients(self) -> Iterator[tuple[Tensor, Tensor, dict[str, Any], float]]:
        """Yield each parameter that has a gradient, the gradient, its state, and the learning rate."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    yield parameter, parameter.grad, self.state[parameter], group["lr"]


class PagedAdamw(_Plain):
    """AdamW with states in fp32, those of large tensors in memory that CUDA moves between host and device.

    Source:
        ``Optimizer8bit.get_state_buffer`` in bitsandbytes/optim/optimizer.py (0.49.2).
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Make the states of every parameter that has a gradient, on the host untouched; one kernel updates all in place."""
        del closure
        for parameter, _, state, _ in self._with_gradients():
            for name in ("state1", "state2") if not state else ():
                device = parameter.device if parameter.numel() < PAGED_FROM else torch.device("cpu")
                state[name] = torch.empty_like(parameter, dtype=torch.float32, device=device)


class Lion(_Plain):
    """Lion.

    Source:
        lion_pytorch/lion_pytorch.py (0.2.5), ``update_fn`` and ``Lion.step``; https://arxiv.org/abs/2302.06675.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        del closure
        for parameter, gradient, state, rate in self._with_gradients():
            if not state:
                state["exp_avg"] = torch.zeros_like(parameter)
            lion_(parameter, gradient, state["exp_avg"], rate)


def lion_(parameter: Tensor, gradient: Tensor, average: Tensor, rate: float) -> None:
    """Update one parameter: a step by the sign of momentum and gradient."""
    beta1, beta2 = 0.9, 0.99
    update = average.clone().mul_(beta1).add(gradient, alpha=1 - beta1).sgn_()
    parameter.add_(update, alpha=-rate)
    average.mul_(beta2).add_(gradient, alpha=1 - beta2)


class AdamMini(_Plain):
    """Adam-mini with one second moment for each row of a matrix, and one for a whole vector.

    The package takes one for each head of queries and keys, and one for each element of a bias, where
    it knows them by their names; emptying its ``wqk_names`` and ``adam_block_names`` gives this.

    Source:
        adam_mini/adam_mini.py (1.1.1), ``Adam_mini.step``; https://arxiv.org/abs/2406.16793.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter; a variable's tensor lives until the next parameter's replaces it."""
        del closure
        beta1, beta2, epsilon = 0.9, 0.999, 1e-8
        for parameter, gradient, state, rate in self._with_gradients():
            if not state:
                state["m"] = torch.zeros_like(parameter)
                state["step"] = 0
                state["vmean"] = torch.zeros_like(state["m"][..., 0:1] if parameter.ndim > 1 else state["m"][0])
            if parameter.ndim > 1:
                squared = torch.mean(gradient * gradient, dim=-1, keepdim=True)
            else:
                squared = torch.sum(gradient * gradient)
                squared = squared / gradient.numel()
            state["step"] += 1
            state["m"].lerp_(gradient, 1 - beta1)
            correction1, correction2 = 1 - beta1 ** state["step"], sqrt(1 - beta2 ** state["step"])
            state["vmean"].mul_(beta2).add_(squared, alpha=1 - beta2)
            divisor = (state["vmean"].sqrt() / correction2).add_(epsilon)
            stepsize = (1 / correction1) / divisor
            update = state["m"] * stepsize
            update.mul_(rate)
            parameter.add_(-update)


class BlockwiseAdamw(_Plain):
    """The tensors of bitsandbytes' 8-bit AdamW, whose kernels write where they are: no update is computed here.

    Two lookup tables serve all parameters of an optimizer; its host copies are freed before a step.

    Source:
        bitsandbytes/optim/optimizer.py (0.50.2), ``Optimizer2State.init_state`` and ``update_step``;
        bitsandbytes/backends/cuda/ops.py, ``_optimizer_update_8bit_blockwise_impl`` allocates nothing.
    """

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        super().__init__(params, lr)
        self._tables: dict[str, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Make the states of parameters that have none."""
        del closure
        for parameter, _, state, _ in self._with_gradients():
            if not state:
                self._initialise(parameter, state)

    def _initialise(self, parameter: Tensor, state: dict[str, Any]) -> None:
        eight_bit = parameter.numel() >= EXEMPT_BELOW
        for number in ("1", "2"):
            dtype = torch.uint8 if eight_bit else torch.float32
            state[f"state{number}"] = torch.zeros_like(parameter, dtype=dtype)
            if eight_bit:
                if number not in self._tables:
                    self._tables[number] = torch.zeros(2**8, device=parameter.device)
                state[f"qmap{number}"] = self._tables[number]
        for number in ("1", "2") if eight_bit else ():
            blocks = -(-parameter.numel() // BLOCK_ELEMENTS)
            state[f"absmax{number}"] = torch.zeros(blocks, device=parameter.device)
