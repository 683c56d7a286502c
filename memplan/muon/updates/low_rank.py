"""Momentum as a low-rank part in 8 bits and a residual in few bits, after 4-bit-Muon-GRASP.

``M = L @ R.mT + residual``, with ``L`` ``(rows, rank)`` and ``R`` ``(columns, rank)``, whose columns are
orthonormal, in linear int8, and the residual in the group's own momentum format. Orthogonalisation
amplifies errors along the leading singular vectors most, and those are what the 8 bits hold. One
power iteration, started from the last ``L``, follows them from step to step.

Source:
    Wu et al., 4-bit Muon with GRASP (ICLR 2026).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from memplan.muon.state_codecs.block_codecs import LinearCodec
from memplan.muon.state_codecs.codecs import Codec, Scratch, Stretch, padded

if TYPE_CHECKING:
    from memplan.muon.stores.gradient_stores import Gradient
    from memplan.muon.updates.steps import MuonOptions, State

FACTOR = LinearCodec(8, 128)
"""How both factors are stored."""
LEFT, RIGHT, RESIDUAL = "left", "right", "momentum_buffer"


def low_rank_state(shape: torch.Size, rank: int, codec: Codec, device: torch.device) -> State:
    """Return the state of zero momentum: the residual, and codes and scales of both factors."""
    rows, columns = shape
    return {
        **codec.empty(RESIDUAL, rows * columns, device),
        **FACTOR.empty(LEFT, rows * rank, device),
        **FACTOR.empty(RIGHT, columns * rank, device),
    }


@dataclass(slots=True)
class _Pass:
    """What every pass over the rows needs: the old momentum's parts, and buffers for one stretch."""

    gradient: Gradient
    state: State
    options: MuonOptions
    left: Tensor
    right: Tensor
    rows_at_a_time: int
    scratch: Scratch
    gradients: Tensor

    def stretches(self) -> list[tuple[int, int]]:
        """Return first and last row of each stretch."""
        step, rows = self.rows_at_a_time, self.left.shape[0]
        return [(first, min(first + step, rows)) for first in range(0, rows, step)]

    def momentum(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Return the new momentum and the gradient of some rows, fp32, padded to whole blocks."""
        columns = self.right.shape[0]
        start, count = first * columns, (last - first) * columns
        mean = self.options.codec.load(Stretch(self.state, RESIDUAL, start, count), self.scratch)
        new = self.gradients[: mean.numel()]
        new[count:].zero_()
        self.gradient.read_(start, new[:count])
        mean[:count].view(-1, columns).addmm_(self.left[first:last], self.right.mT)
        mean.lerp_(new, 1 - self.options.momentum)
        return mean, new


def accumulate_low_rank_(
    gradient: Gradient,
    state: State,
    update: Tensor,
    shape: torch.Size,
    options: MuonOptions,
    generator: torch.Generator,
) -> None:
    """Move momentum towards the gradient, and write what is to be orthogonalised into ``update``, flat.

    Three passes over the rows: one to find the new ``R``, one for the new ``L``, one for the residual.
    """
    columns = shape[1]
    left, right = _factors(state, shape, options.low_rank)
    if not left.any():
        left.normal_(generator=generator)
        right.zero_()
    work = _Pass(gradient, state, options, left, right, *_buffers(shape, options, update.device))
    sketch = torch.zeros_like(right)
    for first, last in work.stretches():
        mean, _ = work.momentum(first, last)
        sketch.addmm_(mean[: (last - first) * columns].view(-1, columns).mT, left[first:last])
    basis = _stored(torch.linalg.qr(sketch)[0], state, RIGHT)
    del sketch
    fresh = torch.empty_like(left)
    for first, last in work.stretches():
        mean, _ = work.momentum(first, last)
        torch.mm(mean[: (last - first) * columns].view(-1, columns), basis, out=fresh[first:last])
    fresh = _stored(fresh, state, LEFT)
    for first, last in work.stretches():
        start, count = first * columns, (last - first) * columns
        mean, new = work.momentum(first, last)
        ahead = new.lerp_(mean, options.momentum) if options.nesterov else mean
        update[start : start + count].copy_(ahead[:count])
        mean[:count].view(-1, columns).addmm_(fresh[first:last], basis.mT, alpha=-1)
        options.codec.store(mean, Stretch(state, RESIDUAL, start, count), work.scratch, spare=new)


def _buffers(shape: torch.Size, options: MuonOptions, device: torch.device) -> tuple[int, Scratch, Tensor]:
    """Return how many rows make whole blocks of the residual, and buffers for as many."""
    rows, columns = shape
    block = options.codec.block_elements
    unit = block // gcd(columns, block)
    count = min(max(options.chunk_elements // columns // unit, 1) * unit, rows)
    length = padded(count * columns, block)
    return count, options.codec.scratch(length, device), torch.empty(length, dtype=torch.float32, device=device)


def _factors(state: State, shape: torch.Size, rank: int) -> tuple[Tensor, Tensor]:
    """Return both factors, fp32."""
    factors = []
    for slot, size in ((LEFT, shape[0]), (RIGHT, shape[1])):
        scratch = FACTOR.scratch(padded(size * rank, FACTOR.block_elements), state["left_codes"].device)
        values = FACTOR.load(Stretch(state, slot, 0, size * rank), scratch)
        factors.append(values[: size * rank].view(size, rank))
    return factors[0], factors[1]


def _stored(factor: Tensor, state: State, slot: str) -> Tensor:
    """Store a factor, and return what was stored."""
    count = factor.numel()
    length = padded(count, FACTOR.block_elements)
    scratch = FACTOR.scratch(length, factor.device)
    values = torch.zeros(length, dtype=torch.float32, device=factor.device)
    values[:count].copy_(factor.reshape(-1))
    whole = Stretch(state, slot, 0, count)
    FACTOR.store(values, whole, scratch)
    return FACTOR.load(whole, scratch)[:count].view(factor.shape)
