"""How ranks divide a parameter, pass its pieces to those that own them, and keep its states in checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memplan.muon.stores.optimizer_errors import OptimizerError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

SHARD_DRAWS = 1_000_000_007
"""What sets the random numbers of a parameter's shards apart: a prime, far above any number of parameters."""


@dataclass(frozen=True, slots=True)
class Division:
    """The ranks of one mesh dimension, which hold consecutive pieces of a tensor along one of its dimensions."""

    group: ProcessGroup  # The ranks, in the order of their pieces
    own: int  # This rank's place among them
    dim: int  # Dimension of the tensor
    whole: tuple[int, ...]  # Shape of what they hold together
    lengths: tuple[int, ...]  # Of each rank's piece along ``dim``; zeros where there are more ranks than rows

    @property
    def ranks(self) -> int:
        """How many they are."""
        return len(self.lengths)

    def piece(self, rank: int) -> tuple[int, ...]:
        """Return the shape of a rank's piece."""
        return (*self.whole[: self.dim], self.lengths[rank], *self.whole[self.dim + 1 :])

    def owned(self, matrices: int) -> tuple[int, ...]:
        """Return how many of so many matrices each rank gets whole."""
        return owned_counts(matrices, self.ranks)


def owned_counts(matrices: int, ranks: int) -> tuple[int, ...]:
    """Return how many of so many matrices each rank orthogonalises: consecutive ones, the first ranks one more."""
    each, more = divmod(matrices, ranks)
    return tuple(each + (rank < more) for rank in range(ranks))


def world_size() -> int:
    """Return how many ranks hold the same parameters, where torch.distributed has been told of any; else one."""
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def is_divided(tensor: Any) -> bool:
    """Tell whether a tensor is a DTensor, without importing torch.distributed where none can be."""
    return type(tensor).__name__ == "DTensor" and hasattr(tensor, "placements")


def local_part(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a DTensor, the storage itself; any other tensor as it is."""
    return tensor._local_tensor if is_divided(tensor) else tensor  # type: ignore[attr-defined]


def placed_as(gradient: Any, parameter: Any) -> Any:
    """Return the gradient of a DTensor where that lies: of a norm under tensor parallelism ranks have sums of their own rows alone."""
    if gradient.placements == parameter.placements:
        return gradient
    return gradient.redistribute(placements=parameter.placements)


def refuse_placements(parameter: Any, label: str) -> None:
    """Raise unless every placement of a DTensor is one that pieces can be read off.

    Raises:
        OptimizerError: If it holds partial sums, or is strided along more than one mesh dimension.
    """
    kinds = [type(placement).__name__ for placement in parameter.placements]
    unknown = [kind for kind in kinds if kind not in ("Shard", "Replicate", "_StridedShard")]
    if unknown or kinds.count("_StridedShard") > 1:
        raise OptimizerError(
            f"{label} is a DTensor with placements {tuple(parameter.placements)}: expected shards, along one mesh dimension "
            "strided at most, and replicas"
        )


def divisions_of(parameter: Any) -> tuple[Division, ...]:
    """Return the divisions of a DTensor in the order in which they are undone; none for any other tensor.

    A mesh divides from its first dimension to its last, but for a strided shard, which fully_shard makes of what tensor
    parallelism has divided before: the last division is undone first. Pieces are those of ``torch.chunk``.

    Source:
        torch/distributed/tensor/placement_types.py, ``_StridedShard``; torch/distributed/fsdp/_fully_shard/_fsdp_param.py,
        ``_init_sharded_param``.
    """
    if not is_divided(parameter):
        return ()
    mesh: DeviceMesh = parameter.device_mesh
    sharded = [n for n, placement in enumerate(parameter.placements) if not placement.is_replicate()]
    applied = sorted(sharded, key=lambda n: type(parameter.placements[n]).__name__ == "_StridedShard")
    shape, divisions = tuple(parameter.shape), []
    for mesh_dim in applied:
        dim, own = parameter.placements[mesh_dim].dim, mesh.get_local_rank(mesh_dim)
        lengths = chunk_lengths(shape[dim], mesh.size(mesh_dim))
        divisions.append(Division(mesh.get_group(mesh_dim), own, dim, shape, lengths))
        shape = divisions[-1].piece(own)
    return tuple(reversed(divisions))


def matrix_divisions(parameter: Any) -> tuple[Division, ...]:
    """Return those divisions that cut matrices: of rows and columns, over more than one rank."""
    return tuple(one for one in divisions_of(parameter) if one.ranks > 1 and one.dim >= parameter.ndim - 2)


def chunk_lengths(length: int, ranks: int) -> tuple[int, ...]:
    """Return the lengths of the pieces that ``torch.chunk`` makes, and zeros for the ranks that get none."""
    each = -(-length // ranks)
    return tuple(max(0, min(each, length - rank * each)) for rank in range(ranks))


def shards_have_whole_blocks(parameter: Any, block_elements: int) -> bool:
    """Tell whether the rows of every rank's shard are whole blocks, as they are of any tensor that is not divided.

    Codes and scales are then divided as the parameter is, and any number of ranks can load them.
    """
    if not is_divided(parameter) or block_elements == 1:
        return True
    lengths, last = {parameter.shape[-1]}, parameter.ndim - 1
    for division in reversed(divisions_of(parameter)):
        if division.dim == last:
            lengths = {piece for length in lengths for piece in chunk_lengths(length, division.ranks)}
    return all(length % block_elements == 0 for length in lengths)


def draw_number(place: int, parameter: Any) -> int:
    """Return the number that sets a parameter's random numbers apart: its place, and which shard this rank has; replicas share it."""
    shard = 0
    for division in divisions_of(parameter):
        shard = shard * division.ranks + division.own
    return place + SHARD_DRAWS * shard


def anywhere(flag: bool, parameters: Iterable[Any]) -> bool:
    """Tell whether a flag is set on any rank of the meshes of DTensors; one small all-reduce for each mesh dimension."""
    import torch.distributed as dist

    meshes = {parameter.device_mesh: parameter for parameter in parameters if is_divided(parameter)}
    for mesh, parameter in meshes.items():
        value = torch.tensor(float(flag), dtype=torch.float32, device=parameter.device)
        for mesh_dim in range(mesh.ndim):
            dist.all_reduce(value, dist.ReduceOp.MAX, group=mesh.get_group(mesh_dim))
        flag = flag if value.is_meta else bool(value)
    return flag


def to_owners(pieces: Tensor, division: Division, matrices: int) -> Tensor:
    """Send each matrix's piece to its owner; return those of the owned ones, rank after rank, flat.

    Args:
        pieces: ``(matrices, *piece)``, contiguous.
        division: Whose ranks take part.
        matrices: How many there are, on every rank the same.
    """
    owned = division.owned(matrices)
    sent = [count * prod(division.piece(division.own)) for count in owned]
    taken = [owned[division.own] * prod(division.piece(rank)) for rank in range(division.ranks)]
    return _exchanged(pieces, sent, taken, division)


def from_owners(pieces: Tensor, division: Division, matrices: int) -> Tensor:
    """Send the pieces of the owned matrices, as :func:`in_pieces` lays them, back; return ``(matrices, *piece)``."""
    owned = division.owned(matrices)
    sent = [owned[division.own] * prod(division.piece(rank)) for rank in range(division.ranks)]
    taken = [count * prod(division.piece(division.own)) for count in owned]
    return _exchanged(pieces, sent, taken, division).view(matrices, *division.piece(division.own))


def put_together(pieces: Tensor, division: Division, owned: int) -> Tensor:
    """Return ``(owned, *whole)`` from what :func:`to_owners` returned; a view where pieces follow one another as rows do."""
    if _lies_whole(division, owned):
        return pieces.view(owned, *division.whole)
    whole = pieces.new_empty((owned, *division.whole))
    for place, piece in zip(_places(whole, division), _split(pieces, division, owned), strict=True):
        place.copy_(piece)
    return whole


def in_pieces(whole: Tensor, division: Division, owned: int) -> Tensor:
    """Return the pieces of ``(owned, *whole)``, rank after rank, flat: the inverse of :func:`put_together`."""
    if _lies_whole(division, owned):
        return whole.view(-1)
    pieces = torch.empty_like(whole).view(-1)
    for place, piece in zip(_places(whole, division), _split(pieces, division, owned), strict=True):
        piece.copy_(place)
    return pieces


def _lies_whole(division: Division, owned: int) -> bool:
    return owned * prod(division.whole[: division.dim]) <= 1


def _places(whole: Tensor, division: Division) -> Sequence[Tensor]:
    return torch.split(whole, list(division.lengths), dim=division.dim + 1)


def _split(pieces: Tensor, division: Division, owned: int) -> list[Tensor]:
    sizes = [owned * prod(division.piece(rank)) for rank in range(division.ranks)]
    parts = torch.split(pieces, sizes)
    return [part.view(owned, *division.piece(rank)) for rank, part in enumerate(parts)]


def _exchanged(pieces: Tensor, sent: list[int], taken: list[int], division: Division) -> Tensor:
    import torch.distributed as dist

    width = pieces.element_size()
    received = pieces.new_empty(sum(taken))
    dist.all_to_all_single(
        received.view(torch.uint8),
        pieces.reshape(-1).view(torch.uint8),
        [count * width for count in taken],
        [count * width for count in sent],
        group=division.group,
    )
    return received


State = dict[str, "Tensor"]


def shared_state(state: State, parameter: Any, entries: Mapping[str, Fraction]) -> State:
    """Return the state of a DTensor's shard with every tensor of it as a DTensor that is divided alike; ``step`` stays.

    Args:
        state: The tensors by their names, as the optimizer keeps them.
        parameter: The DTensor.
        entries: Of tensors that hold codes or scales, how many entries stand for an element; one elsewhere.
    """
    if not is_divided(parameter):
        return state
    return {
        name: tensor if name == "step" else _shared(tensor, parameter, entries.get(name, Fraction(1)))
        for name, tensor in state.items()
    }


def _shared(tensor: Tensor, parameter: Any, entries: Fraction) -> Tensor:
    """Return a DTensor of a state that has, for each row of the parameter, a row of ``entries`` times its length."""
    from torch.distributed.tensor import DTensor

    *rows, last = local_part(parameter).shape
    shape = (*parameter.shape[:-1], int(parameter.shape[-1] * entries))
    strides = tuple(prod(shape[n + 1 :]) for n in range(len(shape)))
    own = tensor.view(*rows, int(last * entries))
    placed: Tensor = DTensor.from_local(
        own, parameter.device_mesh, parameter.placements, run_check=False, shape=torch.Size(shape), stride=strides
    )
    return placed


def local_state(saved: Any, state: State) -> Any:
    """Return the state of a checkpoint with this rank's part of every DTensor, in the shapes of ``state``."""
    if not isinstance(saved, dict):
        return saved
    parts = {name: local_part(tensor) if is_divided(tensor) else tensor for name, tensor in saved.items()}
    return {
        name: part.view(state[name].shape)
        if is_divided(saved[name]) and name in state and part.numel() == state[name].numel()
        else part
        for name, part in parts.items()
    }
