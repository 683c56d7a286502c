"""One update of several float matrices of one shape by Muon: a few kernels for all, instead of a few dozen for each."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from memplan.muon.orthogonalisation.newton_schulz import newton_schulz_, newton_schulz_workspace_bytes
from memplan.muon.orthogonalisation.products import HALVED_FROM
from memplan.muon.state_codecs.codecs import PlainCodec, Stretch, codec_bytes
from memplan.muon.stores.rounding_noise import random_bits_
from memplan.muon.updates.handles import Handle
from memplan.muon.updates.steps import MOMENTUM, MuonOptions, State, rate_ratio


def batch_step_bytes(handles: Sequence[Handle], options: MuonOptions) -> int:
    """Return what updating matrices of one shape together allocates.

    Formula:
        ``count * elements * ns_dtype + max(momentum, Newton-Schulz, weights)``. Momentum: the gradients in fp32, and
        beside them nothing for fp32, the values in fp32 for bf16, or the codes of all and their codec's scratch. Then
        the workspace of a batch. Then the updates in fp32, and weights that are not fp32.
    """
    first, count = handles[0], len(handles)
    elements = count * first.shape.numel()
    workspace = newton_schulz_workspace_bytes(
        *first.shape,
        workspace=options.workspace,
        chunk_columns=options.chunk_columns,
        element_bytes=options.dtype.itemsize,
        batch=count if in_one_product(first, options) else 1,
    )
    codes = 0 if isinstance(options.codec, PlainCodec) else codec_bytes(options.codec, elements)
    momentum = 4 * elements + codes + options.codec.scratch_bytes(elements)
    weights = 4 * elements * (1 if first.key.dtype == torch.float32 else 2)
    return elements * options.dtype.itemsize + max(momentum, workspace, weights)


def in_one_product(handle: Handle, options: MuonOptions) -> bool:
    """Tell whether matrices are multiplied as one batch: on a CPU small ones in bf16, where calls take as long as products.

    There that takes 0.55 of the time at 128 x 128 and 0.89 at 256 x 256, and in fp32 as long as one after the other.
    """
    small = options.dtype == torch.bfloat16 and min(handle.shape) < HALVED_FROM
    return small or handle.key.device.type != "cpu"


@torch.no_grad()
def muon_batch_step_(
    handles: Sequence[Handle],
    options: MuonOptions,
    states: Sequence[State],
    generators: Sequence[torch.Generator],
    noises: Sequence[torch.Generator],
) -> None:
    """Update matrices of one shape, and their momentum, as :func:`memplan.muon.updates.steps.muon_step_` does each.

    The arithmetic is the same but for the order of sums inside products, which batched kernels choose themselves.

    Args:
        handles: Float matrices whose momentum divides into whole blocks.
        options: Of all of them.
        states: Of each.
        generators: Of each, for stochastic rounding of momentum.
        noises: Of each, for stochastic rounding of weights.
    """
    first = handles[0]
    update = torch.empty((len(handles), *first.shape), dtype=options.dtype, device=first.key.device)
    gradients = _flat(handle.key.grad for handle in handles)
    accumulate = _accumulate if isinstance(options.codec, PlainCodec) else _accumulate_codes
    accumulate(gradients, states, update.flatten(1), options, generators)
    for matrices in [update] if in_one_product(first, options) else update:
        newton_schulz_(
            matrices,
            options.schedule,
            workspace=options.workspace,
            chunk_columns=options.chunk_columns,
            epsilon=options.epsilon,
        )
    rate = options.lr * rate_ratio(options.adjust, *first.shape)
    keep = 1 - options.lr * options.weight_decay
    drawn = noises if options.stochastic_weights and first.key.dtype == torch.bfloat16 else ()
    _apply(_flat(handle.key.detach() for handle in handles), update.flatten(1), keep, rate, drawn)
    for state in states:
        state["step"] += 1


def _flat(tensors: Iterable[Tensor | None]) -> list[Tensor]:
    return [tensor.reshape(-1) for tensor in tensors if tensor is not None]


def _accumulate(
    gradients: list[Tensor],
    states: Sequence[State],
    update: Tensor,
    options: MuonOptions,
    generators: Sequence[torch.Generator],
) -> None:
    """Move every momentum of floats towards its gradient, and write what is to be orthogonalised into ``update``."""
    momenta = _flat(state[MOMENTUM] for state in states)
    new = torch.empty(update.shape, dtype=torch.float32, device=update.device)
    torch._foreach_copy_(list(new), gradients)
    means = momenta
    if momenta[0].dtype != torch.float32:
        means = list(torch.empty(update.shape, dtype=torch.float32, device=update.device))
        torch._foreach_copy_(means, momenta)
    torch._foreach_lerp_(means, list(new), 1 - options.momentum)
    if options.nesterov:
        torch._foreach_lerp_(list(new), means, options.momentum)
        update.copy_(new)
    else:
        torch._foreach_copy_(list(update), means)
    if means is not momenta:
        torch._foreach_copy_(momenta, means)
    if options.stochastic_momentum:  # floats round to nearest, and yet the numbers are drawn, as for each alone
        _draw(new, generators)


def _accumulate_codes(
    gradients: list[Tensor],
    states: Sequence[State],
    update: Tensor,
    options: MuonOptions,
    generators: Sequence[torch.Generator],
) -> None:
    """Do the same where momentum is codes: those of all are put together, decoded, moved, and encoded again."""
    codec, elements = options.codec, update.numel()
    together = codec.empty(MOMENTUM, elements, update.device)
    rows = {name: list(tensor.view(len(states), -1)) for name, tensor in together.items()}
    for name, parts in rows.items():
        torch._foreach_copy_(parts, _flat(state[name] for state in states))
    scratch = codec.scratch(elements, update.device)
    new = torch.empty(update.shape, dtype=torch.float32, device=update.device)
    torch._foreach_copy_(list(new), gradients)
    momentum = Stretch(together, MOMENTUM, 0, elements)
    mean = codec.load(momentum, scratch)
    flat = new.view(-1)
    mean.lerp_(flat, 1 - options.momentum)
    update.view(-1).copy_(flat.lerp_(mean, options.momentum) if options.nesterov else mean)
    noise = _draw(new, generators).view(-1) if options.stochastic_momentum else None
    codec.store(mean, momentum, scratch, noise, spare=flat)
    for name, parts in rows.items():
        torch._foreach_copy_(_flat(state[name] for state in states), parts)


def _draw(rows: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
    """Fill each row with numbers of its own generator, uniform in [0, 1), and return all."""
    for row, generator in zip(rows, generators, strict=True):
        row.uniform_(generator=generator)
    return rows


def _apply(weights: list[Tensor], update: Tensor, keep: float, rate: float, noises: Sequence[torch.Generator]) -> None:
    """Subtract ``rate * update`` from the decayed weights, in fp32 and with one rounding at the end."""
    spent = update.float()
    if weights[0].dtype == torch.float32:
        torch._foreach_mul_(weights, keep)
        torch._foreach_add_(weights, list(spent), alpha=-rate)
        return
    exact = torch.empty_like(spent)
    torch._foreach_copy_(list(exact), weights)
    exact.mul_(keep).add_(spent, alpha=-rate)
    if noises:
        bits = spent.view(torch.int32)
        for part, generator in zip(bits, noises, strict=True):
            random_bits_(part, generator)
        exact.view(torch.int32).add_(bits).bitwise_and_(-(1 << 16))
    torch._foreach_copy_(weights, list(exact))
