"""Weights in blocks, byte for byte as GGUF files store them: the interface, Q8_0, and evenly spaced codes.

A format turns rows of blocks, ``(blocks, block_bytes)`` uint8, into fp32 values and back. Decoding equals
the ``gguf`` package bit for bit, and so does encoding of Q8_0, Q4_0 and Q5_0 to nearest. Temporaries are
bounded: ``DECODED_AT_ONCE`` elements are decoded, and ``encoded_blocks`` encoded, at a time. On a GPU
every stretch costs its kernels' launches, so that stretches are as long as a few MiB allow.

Source:
    https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h (layouts)
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from memplan.muon.stores.chunk_loops import starts
from memplan.muon.stores.optimizer_errors import OptimizerError
from memplan.muon.stores.rounding_noise import uniform

DEFAULT_SEARCH = 9
DECODED_AT_ONCE = 1 << 20


@dataclass(frozen=True, slots=True)
class Temporaries:
    """Bytes that the code below allocates for each block that it handles at a time."""

    decode: int  # For ``decode_``
    nearest: int  # For ``encode_`` to nearest that keeps scales
    stochastic: int  # For ``encode_`` with noise that keeps scales
    fresh: int  # For ``encode_`` to nearest with new scales
    decode_once: int = 0  # For ``decode_``, once


TEMPORARIES = {
    "q8-0": Temporaries(6, 396, 268, 392),
    "q4-0": Temporaries(16, 205, 285, 192),
    "q5-0": Temporaries(42, 205, 285, 192),
    "q5-b64": Temporaries(80, 381, 541, 368),
    "q6-b64": Temporaries(96, 381, 541, 368),
    "iq3-xxs": Temporaries(2496, 68_548, 136_644, 99_488, 32),
    "iq2-xxs": Temporaries(2368, 35_396, 70_468, 37_024, 32),
    "iq2-xs": Temporaries(2432, 68_228, 136_068, 72_384, 32),
    "iq2-s": Temporaries(2432, 133_764, 267_140, 136_384, 32),
}
"""Counted, and asserted equal to measurement, by ``tests/muon/test_stores.py``: most is the scores of
a block's groups against all points of a grid, two such tables where rounding is stochastic."""


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """A GGUF block format; subclasses know its codes."""

    name: str  # As in the catalog: ``q8-0``
    block_elements: int  # Elements of a block
    block_bytes: int  # Bytes of a block
    tensor_bytes: int = 0  # Bytes once for each tensor: none

    encoded_blocks: ClassVar[int] = 32_768

    @property
    def decoded_blocks(self) -> int:
        """Blocks that are decoded at a time."""
        return DECODED_AT_ONCE // self.block_elements

    def row_bytes(self, columns: int) -> int:
        """Return the bytes of a row.

        Raises:
            OptimizerError: If ``columns`` is no whole number of blocks.
        """
        if columns % self.block_elements:
            raise OptimizerError(
                f"{self.name}: rows of {columns} do not divide into blocks of {self.block_elements} elements"
            )
        return columns // self.block_elements * self.block_bytes

    def decode_(self, blocks: Tensor, out: Tensor) -> Tensor:
        """Write the values of ``blocks`` into ``out``, fp32 ``(blocks * block_elements,)``, and return it."""
        for part, values in self._stretches(blocks, out, self.decoded_blocks):
            self._decode_part(part, values)
        return out

    def encode_(
        self,
        values: Tensor,
        blocks: Tensor,
        generator: torch.Generator | None = None,
        search: int = DEFAULT_SEARCH,
        keep: bool = False,
    ) -> None:
        """Write the codes of fp32 ``values`` into ``blocks``.

        Args:
            values: ``(blocks * block_elements,)``; not changed.
            blocks: ``(blocks, block_bytes)``, overwritten.
            generator: With it rounding is stochastic, with the mean of what is stored near the value.
            search: How many scales are tried where the best is not known beforehand.
            keep: Keep a scale that is stored while the values still fit it. Values that did not
                change then keep their codes: only what an update adds is rounded, and not, step
                after step, the whole weight.
        """
        for part, stretch in self._stretches(blocks, values, self.encoded_blocks):
            self._encode_part(stretch, part, generator, search, keep)

    def decode_bytes(self, blocks: int) -> int:
        """Return what ``decode_`` allocates, tables that are read once in a process left out."""
        table = TEMPORARIES[self.name]
        return table.decode * min(blocks, self.decoded_blocks) + table.decode_once

    def update_bytes(self, blocks: int, stochastic: bool = False) -> int:
        """Return the most that ``decode_``, and then ``encode_`` with ``keep``, allocate."""
        table = TEMPORARIES[self.name]
        each = table.stochastic if stochastic else table.nearest
        return max(self.decode_bytes(blocks), each * min(blocks, self.encoded_blocks))

    def _stretches(self, blocks: Tensor, values: Tensor, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        rows = values.view(-1, self.block_elements)
        for first in starts(blocks.shape[0], count):
            last = first + count
            yield blocks[first:last], rows[first:last]

    def _decode_part(self, blocks: Tensor, out: Tensor) -> None:
        raise NotImplementedError

    def _encode_part(
        self, values: Tensor, blocks: Tensor, generator: torch.Generator | None, search: int, keep: bool
    ) -> None:
        raise NotImplementedError


def read_scale(blocks: Tensor) -> Tensor:
    """Return the fp16 number at the start of each block, as fp32 ``(blocks, 1)``."""
    return blocks[:, :2].clone(memory_format=torch.contiguous_format).view(torch.float16).float()


def write_scale(blocks: Tensor, scale: Tensor) -> Tensor:
    """Write ``scale``, ``(blocks, 1)``, as fp16 at the start of each block; return what was written, as fp32."""
    half = scale.clamp(-65504.0, 65504.0).half()
    blocks[:, :2].copy_(half.view(torch.uint8))
    return half.float()


def reciprocal_or_zero(scale: Tensor) -> Tensor:
    """Return ``1 / scale``, and 0 where ``scale`` is 0."""
    return torch.where(scale == 0, scale, 1 / scale)


class Q8Format(WeightFormat):
    """Q8_0: an fp16 scale, then 32 signed bytes."""

    __slots__ = ()

    def _decode_part(self, blocks: Tensor, out: Tensor) -> None:
        out.copy_(blocks[:, 2:].view(torch.int8)).mul_(read_scale(blocks))

    def _encode_part(
        self, values: Tensor, blocks: Tensor, generator: torch.Generator | None, search: int, keep: bool
    ) -> None:
        del search
        scale = values.abs().amax(dim=1, keepdim=True).div_(127)
        if keep:
            old = read_scale(blocks)
            scale = torch.where((scale <= 1.004 * old) & (scale >= 0.5 * old), old, scale)
        written = write_scale(blocks, scale)
        if generator is None:
            codes = round_half_away_(values * reciprocal_or_zero(scale))
        else:
            codes = values * reciprocal_or_zero(written)
            codes.add_(uniform(codes.shape, generator, codes.device)).floor_()
        blocks[:, 2:].view(torch.int8).copy_(codes.clamp_(-128, 127))


@dataclass(frozen=True, slots=True)
class UniformFormat(WeightFormat):
    """Evenly spaced codes of 4 to 6 bits: an fp16 scale, the bits above the fourth, then the low four.

    Of the low bits, the first half of a block's elements lies in the low halves of bytes, and the second half in the
    high ones; bits above the fourth follow each other, element by element. With 4 bits and blocks of 32 that is
    GGUF's Q4_0, with 5 bits its Q5_0; blocks of 64 are our own.
    """

    bits: int = 4  # Of a code

    @property
    def _high_end(self) -> int:
        """Where a block's low bits begin."""
        return 2 + self.block_elements * (self.bits - 4) // 8

    def _decode_part(self, blocks: Tensor, out: Tensor) -> None:
        half, low = self.block_elements // 2, blocks[:, self._high_end :]
        if self.bits == 4:
            out[:, :half].copy_(low.bitwise_and(15))
            out[:, half:].copy_(low.bitwise_right_shift(4))
        else:
            codes = torch.empty(out.shape, dtype=torch.uint8, device=out.device)
            torch.bitwise_and(low, 15, out=codes[:, :half])
            torch.bitwise_right_shift(low, 4, out=codes[:, half:])
            high = blocks[:, 2 : self._high_end]
            for place, part in self._places(codes):
                above = high.bitwise_right_shift(place).bitwise_and_((1 << self.bits - 4) - 1)
                part.bitwise_or_(above.bitwise_left_shift_(4))
            out.copy_(codes)
        out.sub_(1 << self.bits - 1).mul_(read_scale(blocks))

    def _encode_part(
        self, values: Tensor, blocks: Tensor, generator: torch.Generator | None, search: int, keep: bool
    ) -> None:
        del search
        zero = 1 << self.bits - 1
        place = values.abs().argmax(dim=1, keepdim=True)
        scale = values.gather(1, place).div_(-zero)
        if keep:
            old = read_scale(blocks)
            ends = (values * reciprocal_or_zero(old)).aminmax(dim=1, keepdim=True)
            inside = (ends.min >= -zero - 0.5) & (ends.max <= zero - 0.5)
            scale = torch.where(inside & ((ends.min <= -zero / 2) | (ends.max >= zero / 2)), old, scale)
        written = write_scale(blocks, scale)
        if generator is None:
            codes = (values * reciprocal_or_zero(scale)).add_(zero + 0.5).trunc_()
        else:
            codes = (values * reciprocal_or_zero(written)).add_(zero)
            codes.add_(uniform(codes.shape, generator, codes.device)).floor_()
        whole = codes.clamp_(0, 2 * zero - 1).to(torch.uint8)
        if self.bits > 4:
            high = blocks[:, 2 : self._high_end].zero_()
            for place_, part in self._places(whole):
                high.bitwise_or_(part.bitwise_right_shift(4).bitwise_left_shift_(place_))
            whole.bitwise_and_(15)
        half = self.block_elements // 2
        blocks[:, self._high_end :].copy_(whole[:, half:].bitwise_left_shift(4).bitwise_or_(whole[:, :half]))

    def _places(self, codes: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield each place in a byte of bits above the fourth, and the elements whose bits are there."""
        width = self.bits - 4
        count = 8 // width
        for element in range(count):
            yield element * width, codes[:, element::count]


def round_half_away_(values: Tensor) -> Tensor:
    """Round to nearest in place, halves away from zero, as C's ``roundf`` and not as ``torch.round``."""
    sign = values.sign()
    values.abs_()
    whole = values.floor()
    values.sub_(whole).mul_(2).floor_().add_(whole)
    return values.mul_(sign)
