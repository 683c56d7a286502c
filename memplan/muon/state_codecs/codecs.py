"""How one state tensor is stored: plain floats, or codes in blocks, each block with its own scale.

A codec turns a stretch of its state, always from the start of a block, into fp32 values and back.
All that it needs besides is a ``Scratch``, whose bytes are known beforehand. State is one or two
plain tensors in a dict, so that saving, moving and counting them needs no special code.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from memplan.muon.state_codecs.packing import index_dtype, pack_, unpack_
from memplan.units import ceil_div

SCALE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SMALLEST_SCALE = 1e-30
"""Blocks whose largest element is below this become zeros; its reciprocal still fits in fp32."""


@dataclass(frozen=True, slots=True)
class Scratch:
    """Temporaries of a codec for one stretch of state."""

    values: Tensor | None = None  # Decoded values, fp32, ``(elements,)``; None where the state itself serves
    factors: Tensor | None = None  # One fp32 number for each block
    index: Tensor | None = None  # Codes, one for each entry, where they are packed or looked up
    levels: Tensor | None = None  # The codebook, where there is one
    boundaries: Tensor | None = None  # Where nearest codes change, where there is a codebook


@dataclass(frozen=True, slots=True)
class Stretch:
    """Some elements of a state tensor, from the start of a block on."""

    state: dict[str, Tensor]  # The tensors of a parameter's states, by their keys in ``optimizer.state``
    slot: str  # Name of the state tensor, such as ``momentum_buffer``
    start: int  # First element; a multiple of the codec's blocks
    elements: int  # How many there are; the last block may be in part


class Codec(Protocol):
    """What the optimizer asks of a state format."""

    @property
    def block_elements(self) -> int:
        """Elements in a block; a stretch of state begins at a multiple of it."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, scale included."""

    def empty(self, slot: str, elements: int, device: torch.device) -> dict[str, Tensor]:
        """Return the tensors of a state of zeros, by their keys in ``optimizer.state``."""

    def scratch(self, elements: int, device: torch.device) -> Scratch:
        """Return temporaries for ``elements``, a whole number of blocks."""

    def scratch_bytes(self, elements: int) -> int:
        """Return the bytes of ``scratch``."""

    def load(self, where: Stretch, scratch: Scratch) -> Tensor:
        """Return the values of a stretch, padded to whole blocks, in fp32."""

    def store(
        self, values: Tensor, where: Stretch, scratch: Scratch, noise: Tensor | None = None, spare: Tensor | None = None
    ) -> None:
        """Store ``values``, as ``load`` returned and the caller changed them; they are destroyed.

        With ``noise``, uniform in [0, 1) and as long as ``values``, rounding is stochastic. ``spare``, fp32 and
        as long, may be overwritten, and so may ``noise``; codecs that fit scales need one of them, or take memory.
        """


def padded(elements: int, block_elements: int) -> int:
    """Return ``elements`` rounded up to whole blocks."""
    return ceil_div(elements, block_elements) * block_elements


def rounded_down_(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Round fp32 ``values``, none negative, in place and towards zero to numbers that ``dtype`` holds."""
    values.clamp_max_(torch.finfo(dtype).max)
    if dtype == torch.float16:
        values.mul_(2.0**24).floor_().mul_(2.0**-24).view(torch.int32).bitwise_and_(-(1 << 13))
    elif dtype == torch.bfloat16:
        values.view(torch.int32).bitwise_and_(-(1 << 16))
    return values


def codec_bytes(codec: Codec, elements: int) -> int:
    """Return the bytes of a state: whole blocks, the last one padded.

    Formula:
        ``ceil(elements / block_elements) * block_bytes``
    """
    return ceil_div(elements, codec.block_elements) * codec.block_bytes


@dataclass(frozen=True, slots=True)
class PlainCodec:
    """Floats, one after the other: fp32 in place, bf16 through an fp32 copy of the stretch."""

    dtype: torch.dtype = torch.float32

    @property
    def block_elements(self) -> int:
        """One: there are no blocks."""
        return 1

    @property
    def block_bytes(self) -> int:
        """Bytes of one float."""
        return self.dtype.itemsize

    def empty(self, slot: str, elements: int, device: torch.device) -> dict[str, Tensor]:
        """Return zeros."""
        return {slot: torch.zeros(elements, dtype=self.dtype, device=device)}

    def scratch(self, elements: int, device: torch.device) -> Scratch:
        """Return nothing for fp32."""
        if self.dtype == torch.float32:
            return Scratch()
        return Scratch(values=torch.empty(elements, dtype=torch.float32, device=device))

    def scratch_bytes(self, elements: int) -> int:
        """Return 0 for fp32, else ``4 * elements``."""
        return 0 if self.dtype == torch.float32 else 4 * elements

    def load(self, where: Stretch, scratch: Scratch) -> Tensor:
        """Return the state itself, or a copy of it."""
        stored = self._stored(where)
        return stored if scratch.values is None else scratch.values[: where.elements].copy_(stored)

    def store(
        self, values: Tensor, where: Stretch, scratch: Scratch, noise: Tensor | None = None, spare: Tensor | None = None
    ) -> None:
        """Copy ``values`` back where they were copied; rounding is to nearest."""
        del noise, spare
        if scratch.values is not None:
            self._stored(where).copy_(values)

    def _stored(self, where: Stretch) -> Tensor:
        return where.state[where.slot].view(-1)[where.start : where.start + where.elements]


@dataclass(frozen=True, slots=True)
class BlockCodec:
    """Codes in blocks with one scale each; subclasses say which codes.

    The scale is a block's largest magnitude and the largest level is one: what is stored has no larger
    magnitude than what was given, so that a running mean cannot grow by being stored.
    """

    bits: int = 8  # Bits of a code
    block_elements: int = 128  # Elements that share a scale; a multiple of 8
    scale_dtype: str = "fp32"  # ``fp32``, ``bf16`` or ``fp16``

    @property
    def code_bytes(self) -> int:
        """Bytes of a block's codes."""
        return self.block_elements * self.bits // 8

    @property
    def block_bytes(self) -> int:
        """Bytes of a block's codes and its scale."""
        return self.code_bytes + SCALE_DTYPES[self.scale_dtype].itemsize

    @property
    def zero_code(self) -> int:
        """The code of a fresh state, whose scales are zero."""
        return 0

    def keys(self, slot: str) -> tuple[str, str]:
        """Return the keys of codes and scales; momentum, the only slot of Muon, needs no prefix."""
        return ("codes", "scales") if slot == "momentum_buffer" else (f"{slot}_codes", f"{slot}_scales")

    def empty(self, slot: str, elements: int, device: torch.device) -> dict[str, Tensor]:
        """Return codes ``(blocks * code_bytes,)`` uint8 and scales ``(blocks,)``."""
        codes, scales = self.keys(slot)
        blocks = ceil_div(elements, self.block_elements)
        byte = sum(self.zero_code << shift for shift in range(0, 8, self.bits)) & 255
        return {
            codes: torch.full((blocks * self.code_bytes,), byte, dtype=torch.uint8, device=device),
            scales: torch.zeros(blocks, dtype=SCALE_DTYPES[self.scale_dtype], device=device),
        }

    def scratch(self, elements: int, device: torch.device) -> Scratch:
        """Return values and factors, and an index where codes are packed."""
        index = torch.empty(elements, dtype=index_dtype(self.bits), device=device) if self.bits < 8 else None
        return Scratch(
            values=torch.empty(elements, dtype=torch.float32, device=device),
            factors=torch.empty(elements // self.block_elements, dtype=torch.float32, device=device),
            index=index,
        )

    def scratch_bytes(self, elements: int) -> int:
        """Return ``4 * elements`` for values, 4 for each block, and one or four for each packed code."""
        packed = index_dtype(self.bits).itemsize * elements if self.bits < 8 else 0
        return 4 * elements + 4 * (elements // self.block_elements) + packed

    def load(self, where: Stretch, scratch: Scratch) -> Tensor:
        """Decode whole blocks into ``scratch.values``."""
        codes, scales = self._stored(where)
        length = scales.numel() * self.block_elements
        assert scratch.values is not None
        assert scratch.factors is not None
        values, factors = scratch.values[:length], scratch.factors[: scales.numel()].copy_(scales)
        self._decode(codes, values, scratch)
        values.view(-1, self.block_elements).mul_(factors[:, None])
        return values

    def store(
        self, values: Tensor, where: Stretch, scratch: Scratch, noise: Tensor | None = None, spare: Tensor | None = None
    ) -> None:
        """Take each block's scale, then its codes."""
        del spare
        codes, scales = self._stored(where)
        assert scratch.factors is not None
        factors, rows = scratch.factors[: scales.numel()], values.view(-1, self.block_elements)
        self._statistic(rows, where.elements, scales, factors)
        scales.copy_(factors.clamp_max_(torch.finfo(scales.dtype).max))
        factors.copy_(scales).clamp_min_(SMALLEST_SCALE).reciprocal_()
        rows.mul_(factors[:, None])
        self._encode(values, codes, scratch, None if noise is None else noise[: values.numel()])

    def _stored(self, where: Stretch) -> tuple[Tensor, Tensor]:
        """Return the codes and scales of its blocks, as they lie in the state."""
        size, state, (codes, scales) = self.block_elements, where.state, self.keys(where.slot)
        first, last = where.start // size, ceil_div(where.start + where.elements, size)
        return state[codes][first * self.code_bytes : last * self.code_bytes], state[scales][first:last]

    def _statistic(self, rows: Tensor, _elements: int, _scales: Tensor, factors: Tensor) -> None:
        """Write each block's scale into ``factors``; by default its largest magnitude."""
        torch.linalg.vector_norm(rows, ord=float("inf"), dim=1, out=factors)

    def _decode(self, codes: Tensor, values: Tensor, scratch: Scratch) -> None:
        """Write what each code stands for, at scale one."""
        raise NotImplementedError

    def _encode(self, values: Tensor, codes: Tensor, scratch: Scratch, noise: Tensor | None) -> None:
        """Write the codes of ``values``, which are at scale one."""
        raise NotImplementedError

    def _read(self, codes: Tensor, values: Tensor, scratch: Scratch) -> None:
        if scratch.index is None:
            values.copy_(codes)
        else:
            index = scratch.index[: values.numel()]
            unpack_(codes, index, self.bits)
            values.copy_(index)

    def _write(self, values: Tensor, codes: Tensor, scratch: Scratch) -> None:
        if scratch.index is None:
            codes.copy_(values)
        else:
            pack_(scratch.index[: values.numel()].copy_(values), codes, self.bits)
