"""One update of several float matrices of one shape by Muon: a few kernels for all, instead of a few dozen for each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from memplan.muon.orthogonalisation.newton_schulz import newton_schulz_, newton_schulz_workspace_bytes
from memplan.muon.updates.steps import MOMENTUM, rate_ratio

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memplan.muon.updates.handles import Handle
    from memplan.muon.updates.steps import MuonOptions, State


def batch_step_bytes(handles: Sequence[Handle], options: MuonOptions) -> int:
    """Return what updating matrices of one shape together allocates.

    Formula:
        ``count * elements * ns_dtype + max(momentum, Newton-Schulz, weights)``: in fp32 the gradients, and momentum where
        it is not fp32; then the workspace of a batch; then in fp32 the updates, and weights that are not fp32.
    """
    first, count = handles[0], len(handles)
    elements = first.shape.numel()
    momentum = 4 * elements * (1 if options.codec.scratch_bytes(1) == 0 else 2)
    weights = 4 * elements * (1 if first.key.dtype == torch.float32 else 2)
    workspace = newton_schulz_workspace_bytes(
        *first.shape,
        workspace=options.workspace,
        chunk_columns=options.chunk_columns,
        element_bytes=options.dtype.itemsize,
        batch=count if _in_one_product(first) else 1,
    )
    return count * elements * options.dtype.itemsize + max(count * momentum, workspace, count * weights)


def _in_one_product(handle: Handle) -> bool:
    """Tell whether matrices are multiplied as one batch: a CPU takes longer for 16-bit batches than for one after the other."""
    return handle.key.device.type != "cpu"


@torch.no_grad()
def muon_batch_step_(handles: Sequence[Handle], options: MuonOptions, states: Sequence[State]) -> None:
    """Update matrices of one shape, and their momentum, as :func:`memplan.muon.updates.steps.muon_step_` does each.

    The arithmetic is the same but for the order of sums inside products, which batched kernels choose themselves.
    """
    first = handles[0]
    gradients = [handle.key.grad for handle in handles]
    update = torch.empty((len(handles), *first.shape), dtype=options.dtype, device=first.key.device)
    _accumulate(_flat(gradients), _flat([state[MOMENTUM] for state in states]), update.flatten(1), options)
    for matrices in [update] if _in_one_product(first) else update:
        newton_schulz_(
            matrices,
            options.schedule,
            workspace=options.workspace,
            chunk_columns=options.chunk_columns,
            epsilon=options.epsilon,
        )
    rate = options.lr * rate_ratio(options.adjust, *first.shape)
    keep = 1 - options.lr * options.weight_decay
    _apply(_flat([handle.key.detach() for handle in handles]), update.flatten(1), keep, rate)
    for state in states:
        state["step"] += 1


def _flat(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    return [tensor.reshape(-1) for tensor in tensors if tensor is not None]


def _accumulate(gradients: list[Tensor], momenta: list[Tensor], update: Tensor, options: MuonOptions) -> None:
    """Move every momentum towards its gradient, and write what is to be orthogonalised into ``update``."""
    new = torch.empty(update.shape, device=update.device)
    torch._foreach_copy_(list(new), gradients)
    means = momenta
    if momenta[0].dtype != torch.float32:
        means = list(torch.empty(update.shape, device=update.device))
        torch._foreach_copy_(means, momenta)
    torch._foreach_lerp_(means, list(new), 1 - options.momentum)
    if options.nesterov:
        torch._foreach_lerp_(list(new), means, options.momentum)
        update.copy_(new)
    else:
        torch._foreach_copy_(list(update), means)
    if means is not momenta:
        torch._foreach_copy_(momenta, means)


def _apply(weights: list[Tensor], update: Tensor, keep: float, rate: float) -> None:
    """Subtract ``rate * update`` from the decayed weights, in fp32 and with one rounding at the end."""
    spent = update.float()
    if weights[0].dtype == torch.float32:
        torch._foreach_mul_(weights, keep)
        torch._foreach_add_(weights, list(spent), alpha=-rate)
        return
    exact = torch.empty_like(spent)
    torch._foreach_copy_(list(exact), weights)
    exact.mul_(keep).add_(spent, alpha=-rate)
    torch._foreach_copy_(weights, list(exact))
