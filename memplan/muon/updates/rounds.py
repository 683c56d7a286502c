"""Muon's update of matrices that ranks divide or share: momentum where it lies, Newton-Schulz where a matrix is whole.

A round takes as many matrices of one shape as there are ranks, or a multiple where ``batch_bytes`` holds it. Each rank moves
the momentum of its shards, sends the pieces of what is to be orthogonalised to the matrices' owners, orthogonalises the
matrices that it owns, sends the pieces back, and updates its shards: two exchanges a round, and no matrix is orthogonalised
twice, but by replicas, which all do the same.

Replicas of whole matrices can share that work (``share_replicas``): each rank moves the momentum of all matrices of a round,
orthogonalises those that it owns, and sends them to the others, one after another.

Source:
    Distributed Muon: https://arxiv.org/abs/2502.16982, algorithm 1, which gathers; whole matrices to their owners:
    https://arxiv.org/abs/2505.02222, section on infrastructure.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from memplan.muon.sharded.divisions import (
    from_owners,
    in_pieces,
    matrix_divisions,
    owned_counts,
    put_together,
    to_owners,
    world_size,
)
from memplan.muon.stores.rounding_noise import Phases
from memplan.muon.updates.handles import Handle
from memplan.muon.updates.offload import stager_of
from memplan.muon.updates.steps import (
    MuonOptions,
    State,
    accumulate_,
    accumulate_bytes,
    apply_,
    apply_bytes,
    chunk_length,
    orthogonalise_,
    orthogonalise_bytes,
    rate_ratio,
)


@dataclass(frozen=True, slots=True)
class Shard:
    """One matrix of a round, as this rank has it."""

    handle: Handle
    state: State
    generator: torch.Generator  # Of stochastic rounding
    phases: Phases | None  # Of the weight's rounding, where its group asks for them


@torch.no_grad()
def update_round_(shards: Sequence[Shard], options: MuonOptions, buffers: int) -> None:
    """Update the shards of a round of matrices, which have gradients, and their states.

    Args:
        shards: Of each matrix, in one order on all ranks.
        options: Of all of them.
        buffers: How many stretches of offloaded state pass through at a time; 0 where states are on the device.
    """
    first = shards[0].handle
    divisions = matrix_divisions(first.key)
    if not divisions:
        _update_replicas_(shards, options, buffers)
        return
    data, counts = _momenta(shards, options, buffers), [len(shards)]
    for division in divisions:
        owned = division.owned(counts[-1])[division.own]
        data = to_owners(data, division, counts[-1])
        data = put_together(data, division, owned)
        counts.append(owned)
    if counts[-1]:
        _orthogonalise(data, options)
    for division, matrices, owned in zip(reversed(divisions), counts[-2::-1], counts[:0:-1], strict=True):
        data = in_pieces(data, division, owned)
        data = from_owners(data, division, matrices)
    for piece, shard in zip(data, shards, strict=True):
        _apply(piece, shard, options)


def _update_replicas_(shards: Sequence[Shard], options: MuonOptions, buffers: int) -> None:
    """Update a round of matrices that every rank has whole, each orthogonalised by the rank that owns it."""
    import torch.distributed as dist

    first = shards[0].handle
    owners = [rank for rank, count in enumerate(owned_counts(len(shards), world_size())) for _ in range(count)]
    rank, device = dist.get_rank(), first.key.device
    passing = torch.empty(first.shape, dtype=options.dtype, device=device)  # what others own, one matrix at a time
    own = torch.empty((owners.count(rank), *first.shape), dtype=options.dtype, device=device)
    begin = owners.index(rank) if rank in owners else 0
    pieces = [own[number - begin] if owner == rank else passing for number, owner in enumerate(owners)]
    for piece, shard in zip(pieces, shards, strict=True):
        _accumulate(piece.view(-1), shard, options, buffers)
    if len(own):
        _orthogonalise(own, options)
    for piece, shard, owner in zip(pieces, shards, owners, strict=True):
        dist.broadcast(piece.view(torch.uint8), owner)
        _apply(piece, shard, options)


def replicas_bytes(handle: Handle, options: MuonOptions, matrices: int, staged: int = 0) -> int:
    """Return the most that a round of so many whole matrices like that one allocates on this rank.

    Formula:
        ``(owned + 1) f + max(accumulate, workspace, apply)``, with ``f`` the bytes of a matrix in ``ns_dtype``.
    """
    import torch.distributed as dist

    owned, shape = owned_counts(matrices, world_size())[dist.get_rank()], torch.Size(handle.shape)
    workspace = orthogonalise_bytes(_stacked(shape, owned), _together(options, handle.key, owned)) if owned else 0
    accumulate = accumulate_bytes(shape.numel(), options.chunk_elements, options.codec) + staged
    whole = shape.numel() * options.dtype.itemsize
    return (owned + 1) * whole + max(accumulate, workspace, apply_bytes(handle, options))


def round_bytes(handle: Handle, options: MuonOptions, matrices: int, staged: int = 0) -> int:
    """Return the most that a round of so many matrices like that one allocates on this rank.

    Formula:
        With ``p`` the bytes of a piece of each matrix and ``f`` those of the matrices that this rank owns, in ``ns_dtype``:
        ``max(p + accumulate, p + f, 2 f where pieces have to be put together, f + workspace, p + apply)``; over two
        mesh dimensions the same for each in turn.

    Args:
        handle: One of the matrices.
        options: Of all of them.
        matrices: How many there are.
        staged: What stretches of offloaded state pass through, in bytes.
    """
    size, shape = options.dtype.itemsize, torch.Size(handle.shape)
    before = matrices * shape.numel() * size
    phases = [0]
    if shape.numel():
        phases += [
            before + accumulate_bytes(shape.numel(), options.chunk_elements, options.codec) + staged,
            before + apply_bytes(handle, options),
        ]
    for division in matrix_divisions(handle.key):
        matrices = division.owned(matrices)[division.own]
        whole = matrices * prod(division.whole) * size
        lies_whole = matrices * prod(division.whole[: division.dim]) <= 1
        phases += [before + whole, whole if lies_whole else 2 * whole]
        before, shape = whole, torch.Size(division.whole)
    workspace = (
        orthogonalise_bytes(_stacked(shape, matrices), _together(options, handle.key, matrices)) if matrices else 0
    )
    return max(*phases, before + workspace)


def whole_bytes(handle: Handle, options: MuonOptions) -> int:
    """Return what one whole matrix takes while it is exchanged and orthogonalised, on every rank the same.

    Formula:
        Twice its bytes in ``ns_dtype``, and the workspace of Newton-Schulz.
    """
    shape = handle.key.shape
    return 2 * shape.numel() * options.dtype.itemsize + orthogonalise_bytes(shape, options)


def _momenta(shards: Sequence[Shard], options: MuonOptions, buffers: int) -> Tensor:
    """Move the momentum of every shard, and return what is to be orthogonalised, ``(matrices, *piece)``."""
    first = shards[0].handle
    pieces = torch.empty((len(shards), *first.shape), dtype=options.dtype, device=first.key.device)
    for piece, shard in zip(pieces, shards, strict=True):
        _accumulate(piece.view(-1), shard, options, buffers)
    return pieces


def _accumulate(piece: Tensor, shard: Shard, options: MuonOptions, buffers: int) -> None:
    """Move the momentum of one shard, and write what is to be orthogonalised into ``piece``, flat."""
    gradient = shard.handle.gradient(False)
    assert gradient is not None
    if not piece.numel():
        return
    length = chunk_length(piece.numel(), options.chunk_elements, options.codec.block_elements)
    stager = stager_of(shard.handle, shard.state, options.codec, length, buffers)
    accumulate_(gradient, shard.state, piece, options, shard.generator, stager)


def _orthogonalise(matrices: Tensor, options: MuonOptions) -> None:
    """Orthogonalise ``(owned, ..., rows, columns)``: on a device all together, on a CPU one after the other."""
    stack = matrices.view(-1, *matrices.shape[-2:])
    orthogonalise_(stack, _together(options, matrices, len(matrices)))


def _apply(piece: Tensor, shard: Shard, options: MuonOptions) -> None:
    """Update the weight of one shard by what was orthogonalised."""
    rate = options.lr * rate_ratio(options.adjust, *shard.handle.key.shape[-2:])
    own = replace(options, phases=shard.phases)
    if piece.numel():
        apply_(shard.handle, piece.view(-1), 1 - options.lr * options.weight_decay, rate, own, shard.generator)
    shard.state["step"] += 1


def _together(options: MuonOptions, tensor: Tensor, matrices: int) -> MuonOptions:
    """Return options with all matrices in one product; a CPU takes longer for 16-bit batches than for one after the other."""
    return options if tensor.device.type == "cpu" else replace(options, batch=max(options.batch, matrices))


def _stacked(shape: torch.Size, matrices: int) -> torch.Size:
    return torch.Size((matrices * prod(shape[:-2]), *shape[-2:]))
