"""Pieces of matrices to the ranks that own them, and back: one all-to-all each way for a round of matrices of one shape.

Bytes are sent as they lie, whatever the dtype, since not every backend knows all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from memplan.muon.sharded.divisions import Division


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
