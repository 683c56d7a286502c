"""The weight formats by name, with the layouts of the catalog's entries of the same names."""

from importlib import import_module
from typing import ClassVar

import torch
from torch import Tensor

from memplan.muon.stores.optimizer_errors import unknown_choice
from memplan.muon.weights.grid_formats import GridFormat, odd_ones
from memplan.muon.weights.weight_formats import Q8Format, UniformFormat, WeightFormat


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


WEIGHT_FORMATS: dict[str, WeightFormat] = {
    "q8-0": Q8Format("q8-0", 32, 34),
    "q4-0": UniformFormat("q4-0", 32, 18),
    "q5-0": UniformFormat("q5-0", 32, 22, bits=5),
    "q5-b64": UniformFormat("q5-b64", 64, 42, bits=5),
    "q6-b64": UniformFormat("q6-b64", 64, 50, bits=6),
    "iq3-xxs": Iq3Xxs("iq3-xxs", 256, 98, group=4, sub=32, factor=0.5),
    "iq2-xxs": Iq2Xxs("iq2-xxs", 256, 66),
    "iq2-xs": Iq2Xs("iq2-xs", 256, 74, sub=16),
    "iq2-s": Iq2S("iq2-s", 256, 82, sub=16, even_signs=False),
}


def weight_format(name: str) -> WeightFormat:
    """Return a weight format: one of ``WEIGHT_FORMATS``, or one of your own by its path, ``package.module.NAME``.

    Raises:
        UnknownNameError: If there is none.
    """
    if name in WEIGHT_FORMATS:
        return WEIGHT_FORMATS[name]
    module, _, last = name.rpartition(".")
    try:
        own = getattr(import_module(module), last) if module else None
    except (ImportError, AttributeError):
        own = None
    if not isinstance(own, WeightFormat):
        raise unknown_choice("weight format", name, WEIGHT_FORMATS)
    return own
