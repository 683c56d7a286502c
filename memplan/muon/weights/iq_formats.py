"""IQ3_XXS, IQ2_XXS, IQ2_XS and IQ2_S: where a block keeps grid indices, signs and 4-bit scales.

Source:
    https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h (layouts)
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from memplan.muon.weights.grid_formats import GridFormat, odd_ones


class Iq3Xxs(GridFormat):
    """98 bytes: d, 64 grid indices, 8 words of four 7-bit signs and a 4-bit scale."""

    __slots__ = ()

    def _unpack(self, blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        words = blocks[:, 66:98].clone(memory_format=torch.contiguous_format).view(torch.int32)
        return blocks[:, 2:66].to(torch.int32), *_split_words(words)

    def _pack(self, blocks: Tensor, index: Tensor, signs: Tensor, scales: Tensor) -> None:
        blocks[:, 2:66].copy_(index)
        blocks[:, 66:98].copy_(_joined_words(signs, scales).view(torch.uint8))


class Iq2Xxs(GridFormat):
    """66 bytes: d, then for each 32 elements four grid indices, and a word of signs and scale."""

    __slots__ = ()

    def _unpack(self, blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        pairs = blocks[:, 2:].view(-1, 8, 8)
        words = pairs[:, :, 4:].clone(memory_format=torch.contiguous_format).view(torch.int32).view(-1, 8)
        return pairs[:, :, :4].to(torch.int32).view(-1, 32), *_split_words(words)

    def _pack(self, blocks: Tensor, index: Tensor, signs: Tensor, scales: Tensor) -> None:
        pairs = blocks[:, 2:].view(-1, 8, 8)
        pairs[:, :, :4].copy_(index.view(-1, 8, 4))
        pairs[:, :, 4:].copy_(_joined_words(signs, scales).view(torch.uint8).view(-1, 8, 4))


class Iq2Xs(GridFormat):
    """74 bytes: d, 32 half-words of a 9-bit grid index and 7 signs, 16 4-bit scales."""

    __slots__ = ()

    def _unpack(self, blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        words = (
            blocks[:, 2:66]
            .clone(memory_format=torch.contiguous_format)
            .view(torch.int16)
            .to(torch.int32)
            .bitwise_and_(0xFFFF)
        )
        signs = _with_even_sign(words >> 9)
        return words.bitwise_and_(511), signs, _nibbles(blocks[:, 66:74])

    def _pack(self, blocks: Tensor, index: Tensor, signs: Tensor, scales: Tensor) -> None:
        words = (signs.bitwise_and(127) << 9).bitwise_or_(index)
        blocks[:, 2:66].copy_(words.to(torch.int16).view(torch.uint8))
        blocks[:, 66:74].copy_(scales[:, 1::2].bitwise_left_shift(4).bitwise_or_(scales[:, ::2]))


class Iq2S(GridFormat):
    """82 bytes: d, 32 low bytes of grid indices, 32 sign bytes, 8 bytes of high bits, 16 4-bit scales."""

    __slots__ = ()
    encoded_blocks: ClassVar[int] = 128

    def _unpack(self, blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shifts = torch.arange(0, 8, 2, device=blocks.device, dtype=torch.int32)
        high = (blocks[:, 66:74].to(torch.int32)[:, :, None] >> shifts).bitwise_and_(3).view(-1, 32)
        index = high.bitwise_left_shift_(8).bitwise_or_(blocks[:, 2:34].to(torch.int32))
        return index, blocks[:, 34:66].to(torch.int32), _nibbles(blocks[:, 74:82])

    def _pack(self, blocks: Tensor, index: Tensor, signs: Tensor, scales: Tensor) -> None:
        blocks[:, 2:34].copy_(index.bitwise_and(255))
        blocks[:, 34:66].copy_(signs)
        shifts = torch.arange(0, 8, 2, device=blocks.device, dtype=torch.int32)
        blocks[:, 66:74].copy_(((index >> 8).view(-1, 8, 4) << shifts).sum(dim=2))
        blocks[:, 74:82].copy_(scales[:, 1::2].bitwise_left_shift(4).bitwise_or_(scales[:, ::2]))


def _split_words(words: Tensor) -> tuple[Tensor, Tensor]:
    """Return sign bytes ``(blocks, 32)`` and scales ``(blocks, 8)`` of words of 7, 7, 7, 7 and 4 bits."""
    shifts = torch.arange(0, 28, 7, device=words.device, dtype=torch.int32)
    signs = (words[:, :, None] >> shifts).bitwise_and_(127).view(-1, 32)
    return _with_even_sign(signs), (words >> 28).bitwise_and_(15)


def _joined_words(signs: Tensor, scales: Tensor) -> Tensor:
    """Return the words that ``_split_words`` splits, int32 ``(blocks, 8)``."""
    shifts = torch.arange(0, 28, 7, device=signs.device, dtype=torch.int32)
    words = (signs.bitwise_and(127).view(-1, 8, 4) << shifts).sum(dim=2, dtype=torch.int32)
    return words.bitwise_or_(scales << 28)


def _with_even_sign(signs: Tensor) -> Tensor:
    """Return 7-bit ``signs`` with the eighth bit that makes the number of ones even."""
    return signs | (odd_ones(signs) << 7)


def _nibbles(packed: Tensor) -> Tensor:
    """Return the halves of each byte, low one first, int32."""
    shifts = torch.tensor([0, 4], device=packed.device, dtype=torch.int32)
    return (packed.to(torch.int32)[:, :, None] >> shifts).bitwise_and_(15).view(packed.shape[0], -1)
