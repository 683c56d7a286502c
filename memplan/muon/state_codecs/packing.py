"""Codes of 1, 2, 3, 4, 6 or 8 bits in bytes, little end first, without a temporary beyond the codes themselves."""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor


def group_of(bits: int) -> tuple[int, int]:
    """Return how many codes fill how many whole bytes: (2, 1) for 4 bits, (8, 3) for 3 bits."""
    divisor = gcd(bits, 8)
    return 8 // divisor, bits // divisor


def index_dtype(bits: int) -> torch.dtype:
    """Return the narrowest dtype in which ``pack_`` and ``unpack_`` can work: uint8, or int32 for 3 bits."""
    return torch.uint8 if group_of(bits)[1] == 1 else torch.int32


def pack_(index: Tensor, codes: Tensor, bits: int) -> None:
    """Write the low ``bits`` of each entry of ``index`` into ``codes``; ``index`` is overwritten.

    Args:
        index: ``(elements,)``, of ``index_dtype(bits)`` or int32; entries below ``2**bits``.
        codes: ``(elements * bits / 8,)``, uint8.
        bits: Bits of a code; not 5 or 7, whose groups do not fit in 32 bits.
    """
    count, size = group_of(bits)
    if count == 1:
        codes.copy_(index)
        return
    groups, packed = index.view(-1, count), codes.view(-1, size)
    word = groups[:, 0]
    for position in range(1, count):
        word.bitwise_or_(groups[:, position].bitwise_left_shift_(bits * position))
    packed[:, 0].copy_(word)
    for byte in range(1, size):
        packed[:, byte].copy_(word.bitwise_right_shift_(8))


def unpack_(codes: Tensor, index: Tensor, bits: int) -> None:
    """Write the codes in ``codes`` into ``index``: the inverse of ``pack_``."""
    count, size = group_of(bits)
    if count == 1:
        index.copy_(codes)
        return
    groups, packed = index.view(-1, count), codes.view(-1, size)
    word = groups[:, 0]
    word.copy_(packed[:, 0])
    for byte in range(1, size):
        part = groups[:, byte]
        word.bitwise_or_(part.copy_(packed[:, byte]).bitwise_left_shift_(8 * byte))
    for position in range(count - 1, 0, -1):
        torch.bitwise_right_shift(word, bits * position, out=groups[:, position])
    groups.bitwise_and_(2**bits - 1)
