"""How ranks divide a parameter, read off its DTensor: one division for each mesh dimension that shards a matrix.

Momentum and moments are updated where their shards lie. Newton-Schulz needs whole matrices, so that the divisions of rows and
columns have to be undone; those of a stack's leading dimension leave every matrix whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memplan.muon.stores.optimizer_errors import OptimizerError

if TYPE_CHECKING:
    from collections.abc import Iterable

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
        value = torch.tensor(float(flag), device=parameter.device)
        for mesh_dim in range(mesh.ndim):
            dist.all_reduce(value, dist.ReduceOp.MAX, group=mesh.get_group(mesh_dim))
        flag = flag if value.is_meta else bool(value)
    return flag
