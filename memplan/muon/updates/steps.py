"""One update of one parameter, as free functions that read from top to bottom.

Each phase allocates what it needs at its start and works in place after that; what it allocates is
the sum of the ``..._bytes`` function beside it.
"""

from dataclasses import dataclass
from math import sqrt
from typing import Literal

import torch
from torch import Tensor

from memplan.muon.orthogonalisation.newton_schulz import Workspace, newton_schulz_, newton_schulz_workspace_bytes
from memplan.muon.orthogonalisation.products import Products
from memplan.muon.orthogonalisation.schedules import Schedule
from memplan.muon.state_codecs.codecs import Codec, Stretch, padded
from memplan.muon.stores.chunk_loops import starts
from memplan.muon.stores.gradient_stores import Gradient
from memplan.muon.stores.rounding_noise import Phases
from memplan.muon.updates.handles import Handle
from memplan.muon.updates.low_rank import accumulate_low_rank_
from memplan.muon.updates.offload import Stager

AdjustRate = Literal["original", "match_rms_adamw", "none"]
State = dict[str, Tensor]
MOMENTUM = "momentum_buffer"
FIRST, SECOND = "exp_avg", "exp_avg_sq"


@dataclass(frozen=True, slots=True)
class MuonOptions:
    """How Muon updates the parameters of a group."""

    lr: float  # Learning rate, all factors but the shape's included
    momentum: float  # Decay of the running mean of gradients
    nesterov: bool  # Whether the update looks one step ahead
    weight_decay: float  # Decoupled: weights shrink by ``lr * weight_decay``
    adjust: AdjustRate  # How the rate follows the shape: ``rate_ratio``
    codec: Codec  # How momentum is stored
    schedule: Schedule  # Coefficients of each iteration
    dtype: torch.dtype  # Precision of the orthogonalisation
    epsilon: float  # Least norm to divide by
    workspace: Workspace  # Which of Newton-Schulz' workspaces
    chunk_columns: int  # Columns that Newton-Schulz multiplies at a time
    batch: int  # Experts of one tensor that are orthogonalised together
    chunk_elements: int  # Elements that the other phases handle at a time
    reuse_gradient: bool  # Whether the update overwrites a gradient of the same dtype
    stochastic_momentum: bool  # Stochastic rounding of momentum codes
    stochastic_weights: bool  # Stochastic rounding of weights that are not fp32
    low_rank: int = 0  # Rank of the part of momentum that is kept in 8 bits; 0 for none
    products: Products | None = None  # Kernels of Newton-Schulz; None for the default
    phases: Phases | None = None  # Where that rounding takes its numbers; None draws them anew in each step


@dataclass(frozen=True, slots=True)
class AdamwOptions:
    """How AdamW updates the parameters of a group."""

    lr: float
    betas: tuple[float, float]  # Decay of the first and the second moment
    epsilon: float  # Added to the root of the second moment
    weight_decay: float
    codecs: tuple[Codec, Codec]  # How the moments are stored
    chunk_elements: int
    stochastic_weights: bool
    phases: Phases | None = None


def rate_ratio(adjust: AdjustRate, rows: int, columns: int) -> float:
    """Return the factor of the learning rate for a matrix of that shape.

    Formula:
        ``original``: ``sqrt(max(1, rows / columns))``; ``match_rms_adamw``:
        ``0.2 * sqrt(max(rows, columns))``, which gives updates the root mean square of AdamW's;
        ``none``: 1.

    Source:
        https://kellerjordan.github.io/posts/muon/; https://arxiv.org/abs/2502.16982 section 2.2.
    """
    if adjust == "original":
        return sqrt(max(1.0, rows / columns))
    return 0.2 * sqrt(max(rows, columns)) if adjust == "match_rms_adamw" else 1.0


def chunk_length(elements: int, chunk_elements: int, block_elements: int = 1) -> int:
    """Return the length of the chunks in which ``elements`` are handled: whole blocks."""
    whole = max(chunk_elements // block_elements, 1) * block_elements
    return min(whole, padded(elements, block_elements))


@torch.no_grad()
def muon_step_(
    handle: Handle, gradient: Gradient, state: State, options: MuonOptions, generator: torch.Generator, stager: Stager
) -> None:
    """Update one matrix, or each of a stack of matrices, by Muon.

    Momentum is the running mean ``m += (1 - momentum) * (g - m)``, as in ``torch.optim.Muon``.
    The gradient's memory holds the update afterwards where it is bf16 and may be reused.
    """
    update = gradient.workspace(options.dtype) if options.reuse_gradient else None
    if update is None:
        update = torch.empty(handle.shape.numel(), dtype=options.dtype, device=handle.key.device)
    if options.low_rank:
        accumulate_low_rank_(gradient, state, update, handle.shape, options, generator)
    else:
        accumulate_(gradient, state, update, options, generator, stager)
    orthogonalise_(update.view(handle.shape), options)
    rows, columns = handle.shape[-2:]
    rate = options.lr * rate_ratio(options.adjust, rows, columns)
    apply_(handle, update, 1 - options.lr * options.weight_decay, rate, options, generator)


def accumulate_(
    gradient: Gradient,
    state: State,
    update: Tensor,
    options: MuonOptions,
    generator: torch.Generator | None,
    stager: Stager,
) -> None:
    """Move momentum towards the gradient, and write what is to be orthogonalised into ``update``, flat."""
    codec, elements = options.codec, update.numel()
    length = chunk_length(elements, options.chunk_elements, codec.block_elements)
    scratch = codec.scratch(length, update.device)
    gradients = torch.empty(length, dtype=torch.float32, device=update.device)
    for start in starts(elements, length):
        count = min(length, elements - start)
        staged, offset = stager.fetch(state, start, count)
        momentum = Stretch(staged, MOMENTUM, offset, count)
        mean = codec.load(momentum, scratch)
        new = _padded_gradient(gradient, gradients, start, count, mean.numel())
        mean.lerp_(new, 1 - options.momentum)
        ahead = new.lerp_(mean, options.momentum) if options.nesterov else mean
        update[start : start + count].copy_(ahead[:count])
        noise = new.uniform_(generator=generator) if options.stochastic_momentum else None
        codec.store(mean, momentum, scratch, noise, spare=new)
        stager.flush(state, start, count)
    stager.finish()


def accumulate_bytes(elements: int, chunk_elements: int, codec: Codec) -> int:
    """Return what ``accumulate_`` allocates: one fp32 chunk for gradients, and the codec's scratch."""
    length = chunk_length(elements, chunk_elements, codec.block_elements)
    return 4 * length + codec.scratch_bytes(length)


def orthogonalise_(update: Tensor, options: MuonOptions) -> None:
    """Orthogonalise ``(rows, columns)``, or ``(experts, rows, columns)`` a few experts at a time."""
    matrices = [update]
    if update.ndim == 3:
        batches = starts(update.shape[0], options.batch)
        matrices = [update[first : first + options.batch].squeeze(0) for first in batches]
    for matrix in matrices:
        newton_schulz_(
            matrix,
            options.schedule,
            workspace=options.workspace,
            chunk_columns=options.chunk_columns,
            epsilon=options.epsilon,
            products=options.products,
        )


def orthogonalise_bytes(shape: torch.Size, options: MuonOptions) -> int:
    """Return what ``orthogonalise_`` allocates, which is Newton-Schulz' workspace for one batch."""
    return newton_schulz_workspace_bytes(
        *shape[-2:],
        workspace=options.workspace,
        chunk_columns=options.chunk_columns,
        element_bytes=options.dtype.itemsize,
        batch=min(options.batch, shape[0]) if len(shape) == 3 else 1,
    )


def apply_(
    handle: Handle, update: Tensor, keep: float, rate: float, options: MuonOptions, generator: torch.Generator | None
) -> None:
    """Subtract ``rate * update`` from the decayed weights, a chunk at a time and in fp32."""
    length = chunk_length(update.numel(), options.chunk_elements, handle.block_elements)
    exact = torch.empty(length, dtype=torch.float32, device=update.device)
    scratch = handle.scratch(length)
    noise = options.phases or (generator if options.stochastic_weights else None)
    for start in starts(update.numel(), length):
        part = update[start : start + length]
        handle.apply_(start, exact[: part.numel()].copy_(part), keep, rate, scratch, noise)


def apply_bytes(handle: Handle, options: MuonOptions) -> int:
    """Return what ``apply_`` allocates: one fp32 chunk, and the handle's scratch."""
    length = chunk_length(handle.shape.numel(), options.chunk_elements, handle.block_elements)
    return 4 * length + handle.scratch_bytes(length, options.stochastic_weights)


@torch.no_grad()
def adamw_step_(
    handle: Handle,
    gradient: Gradient,
    state: State,
    options: AdamwOptions,
    generator: torch.Generator | None,
    stager: Stager,
) -> None:
    """Update one tensor by AdamW, in chunks, with moments in any codec.

    Source:
        https://arxiv.org/abs/1711.05101; block-wise states: https://arxiv.org/abs/2110.02861.
    """
    first, second = options.codecs
    elements, device = handle.shape.numel(), handle.key.device
    length = adamw_chunk_length(handle, options)
    scratches = first.scratch(length, device), second.scratch(length, device)
    gradients = torch.empty(length, dtype=torch.float32, device=device)
    weights = handle.scratch(length)
    state["step"] += 1
    step = float(state["step"])
    beta1, beta2 = options.betas
    correction = 1 / sqrt(1 - beta2**step)
    weight_noise = options.phases or (generator if options.stochastic_weights else None)
    for start in starts(elements, length):
        count = min(length, elements - start)
        staged, offset = stager.fetch(state, start, count)
        moments = Stretch(staged, FIRST, offset, count), Stretch(staged, SECOND, offset, count)
        mean, square = first.load(moments[0], scratches[0]), second.load(moments[1], scratches[1])
        new = _padded_gradient(gradient, gradients, start, count, mean.numel())
        mean.lerp_(new, 1 - beta1)
        square.mul_(beta2).addcmul_(new, new, value=1 - beta2)
        torch.sqrt(square, out=new)
        torch.div(mean, new.mul_(correction).add_(options.epsilon), out=new)
        keep = 1 - options.lr * options.weight_decay
        handle.apply_(start, new[:count], keep, options.lr / (1 - beta1**step), weights, weight_noise)
        first.store(mean, moments[0], scratches[0])
        noise = new.uniform_(generator=generator) if second.block_elements > 1 else None
        second.store(square, moments[1], scratches[1], noise)
        stager.flush(state, start, count)
    stager.finish()


def adamw_chunk_length(handle: Handle, options: AdamwOptions) -> int:
    """Return the length of AdamW's chunks: whole blocks of the moments and of the weight."""
    block = max(options.codecs[0].block_elements, handle.block_elements)
    return chunk_length(handle.shape.numel(), options.chunk_elements, block)


def adamw_bytes(handle: Handle, options: AdamwOptions) -> int:
    """Return what ``adamw_step_`` allocates: an fp32 chunk, the codecs' and the handle's scratch."""
    length = adamw_chunk_length(handle, options)
    codecs = sum(codec.scratch_bytes(length) for codec in options.codecs)
    return 4 * length + codecs + handle.scratch_bytes(length, options.stochastic_weights)


def _padded_gradient(gradient: Gradient, buffer: Tensor, start: int, count: int, length: int) -> Tensor:
    """Return ``count`` elements of the gradient in fp32, followed by zeros up to ``length``."""
    gradient.read_(start, buffer[:count])
    if count < length:
        buffer[count:length].zero_()
    return buffer[:length]
