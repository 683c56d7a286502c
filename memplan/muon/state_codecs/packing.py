"""Codes of 1, 2, 3, 4, 6 or 8 bits in bytes, little end first, or five below three in a byte; no temporaries but the codes."""

from math import gcd

import torch
from torch import Tensor

CODES_IN_A_BYTE = 5
"""Codes of three values in a byte: ``3**5`` is 243."""


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


def pack_ternary_(index: Tensor, codes: Tensor) -> None:
    """Write numbers below three, ``(blocks, elements)`` int32, into ``codes``, ``(blocks, bytes)``; ``index`` is overwritten.

    Byte ``i`` of a block of ``b`` bytes holds elements ``i``, ``b + i``, ``2 b + i``, ... as the digits of a number
    to the base of three, lowest first.
    """
    word = index[:, : codes.shape[1]]
    for part, factor in _digits(index, codes.shape[1]):
        word[:, : part.shape[1]].add_(part, alpha=factor)
    codes.copy_(word)


def unpack_ternary_(codes: Tensor, index: Tensor) -> None:
    """Write the numbers in ``codes`` into ``index``: the inverse of ``pack_ternary_``."""
    word = index[:, : codes.shape[1]].copy_(codes)
    for part, factor in reversed(_digits(index, codes.shape[1])):
        left = word[:, : part.shape[1]]
        torch.div(left, factor, rounding_mode="floor", out=part)
        left.sub_(part, alpha=factor)


def _digits(index: Tensor, size: int) -> list[tuple[Tensor, int]]:
    """Return all digits but the lowest, each with what it is multiplied by."""
    return [(index[:, place * size : (place + 1) * size], 3**place) for place in range(1, CODES_IN_A_BYTE)]
