"""Momentum in a low-rank subspace of the gradient (GaLore), as an option of Muon.

With ``m <= n`` the sides of a matrix, ``P`` of shape ``(m, rank)`` spans the gradient's leading left
singular vectors (of the transpose, where the matrix is tall). Momentum and orthogonalisation
live on ``P.mT @ G``, ``(rank, n)``, and the weights get ``P`` times the update.

Source:
    https://arxiv.org/abs/2403.03507
"""

from typing import Any

import torch
from torch import Tensor

from memplan.muon.state_codecs.codecs import Codec
from memplan.muon.stores.gradient_stores import Gradient, TensorGradient
from memplan.muon.updates.handles import Handle
from memplan.muon.updates.offload import Stager
from memplan.muon.updates.steps import MOMENTUM, MuonOptions, State, accumulate_, orthogonalise_, rate_ratio

PROJECTION = "projection"
_POWER_ITERATIONS = 2


def projection_state(shape: torch.Size, group: dict[str, Any], codec: Codec, device: torch.device) -> State:
    """Return ``projection``, fp32 ``(m, rank)``, and the momentum of ``rank * n`` elements."""
    short, long, rank = min(shape), max(shape), group["projection_rank"]
    return {
        **codec.empty(MOMENTUM, rank * long, device),
        PROJECTION: torch.zeros(short, rank, dtype=torch.float32, device=device),
    }


def projected_step_(
    handle: Handle,
    gradient: Gradient,
    state: State,
    options: MuonOptions,
    generator: torch.Generator,
    stager: Stager,
    group: dict[str, Any],
) -> None:
    """Update one matrix by Muon in the projected space; refresh the projection every so many steps."""
    rows, columns = handle.shape
    length = max(options.chunk_elements // columns, 1) * columns
    basis = state[PROJECTION]
    if int(state["step"]) % group["projection_interval"] == 0:
        refresh_(basis, gradient, handle.shape, length, generator)
    low = projected(basis, gradient, handle.shape, length)
    update = torch.empty(low.numel(), dtype=options.dtype, device=low.device)
    accumulate_(TensorGradient(low), state, update, options, generator, stager)
    small = update.view(low.shape)
    orthogonalise_(small, options)
    rate = options.lr * rate_ratio(options.adjust, rows, columns)
    scratch = handle.scratch(length)
    noise = options.phases or (generator if options.stochastic_weights else None)
    small = small.float()
    for first, last in _row_chunks(handle.shape, length):
        part = basis[first:last] @ small if rows <= columns else small.mT[first:last] @ basis.mT
        keep = 1 - options.lr * options.weight_decay
        handle.apply_(first * columns, part.view(-1), keep, rate, scratch, noise)


def projected(basis: Tensor, gradient: Gradient, shape: torch.Size, length: int) -> Tensor:
    """Return ``P.mT @ G``, fp32 ``(rank, n)``; of the transpose for a tall matrix."""
    rows, columns = shape
    buffer = torch.empty(length, dtype=torch.float32, device=basis.device)
    low = torch.zeros(basis.shape[1], max(shape), dtype=torch.float32, device=basis.device)
    for first, last in _row_chunks(shape, length):
        part = _read(gradient, buffer, first, last, columns)
        if rows <= columns:
            low.addmm_(basis[first:last].mT, part)
        else:
            torch.mm(basis.mT, part.mT, out=low[:, first:last])
    return low


def refresh_(
    basis: Tensor, gradient: Gradient, shape: torch.Size, length: int, generator: torch.Generator | None
) -> None:
    """Point ``basis`` along the gradient's leading singular vectors, by subspace iteration from noise."""
    rows, columns = shape
    buffer = torch.empty(length, dtype=torch.float32, device=basis.device)
    if not basis.any():
        basis.normal_(generator=generator)
    for _ in range(_POWER_ITERATIONS):
        low = projected(basis, gradient, shape, length)
        basis.zero_()
        for first, last in _row_chunks(shape, length):
            part = _read(gradient, buffer, first, last, columns)
            if rows <= columns:
                torch.mm(part, low.mT, out=basis[first:last])
            else:
                basis.addmm_(part.mT, low[:, first:last].mT)
        basis.copy_(torch.linalg.qr(basis)[0])


def _row_chunks(shape: torch.Size, length: int) -> list[tuple[int, int]]:
    step = length // shape[1]
    return [(first, min(first + step, shape[0])) for first in range(0, shape[0], step)]


def _read(gradient: Gradient, buffer: Tensor, first: int, last: int, columns: int) -> Tensor:
    part = buffer[: (last - first) * columns]
    gradient.read_(first * columns, part)
    return part.view(last - first, columns)
