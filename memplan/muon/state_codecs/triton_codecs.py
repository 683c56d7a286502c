# ruff: noqa: ANN001 - kernels are Triton code, whose arguments are pointers and numbers of the device
"""Codes of momentum in one kernel each way: unpacking, lookup and scaling; largest magnitude, rounding and packing.

The codecs of ``block_codecs`` are the judge: tests run these kernels in Triton's interpreter, and every byte is equal.
Their speed on a GPU has not been measured, which is why groups have to ask for them (``codec_kernels: triton``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from memplan.muon.state_codecs.block_codecs import GaussianCodec, LinearCodec
from memplan.muon.state_codecs.codecs import SMALLEST_SCALE, BlockCodec, Codec, Scratch, Stretch
from memplan.muon.stores.optimizer_errors import OptimizerError
from memplan.units import ceil_div

try:
    import triton
    import triton.language as tl

    AVAILABLE = True
except ImportError:  # nobody has to have it
    AVAILABLE = False

TILE = 1024
"""Elements that a program handles, or one block where that is longer."""
_WHOLE = 12_582_912.0
"""1.5 * 2**23: added to an fp32 number and taken off again, it leaves the nearest whole number, halves to even."""

if AVAILABLE:

    @triton.jit  # type: ignore[untyped-decorator]
    def _decode_kernel(  # type: ignore[no-untyped-def]
        codes, scales, levels, out, elements, half, inverse,
        BITS: tl.constexpr, BLOCK: tl.constexpr, LOOKUP: tl.constexpr, SCALED: tl.constexpr, SIZE: tl.constexpr,
    ) -> None:  # fmt: skip
        place = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
        inside = place < elements
        codes_in_byte: tl.constexpr = 8 // BITS
        byte = tl.load(codes + place // codes_in_byte, mask=inside, other=0).to(tl.int32)
        code = (byte >> (place % codes_in_byte * BITS)) & ((1 << BITS) - 1)
        if LOOKUP:
            value = tl.load(levels + code)
        else:
            value = (code.to(tl.float32) - half) * inverse
        if SCALED:
            value *= tl.load(scales + place // BLOCK, mask=inside, other=0).to(tl.float32)
        tl.store(out + place, value, mask=inside)

    @triton.jit  # type: ignore[untyped-decorator]
    def _encode_kernel(  # type: ignore[no-untyped-def]
        values, codes, scales, noise, blocks, half, least, most, whole,
        BITS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, NOISY: tl.constexpr,
    ) -> None:  # fmt: skip
        rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        place = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        inside = (rows < blocks)[:, None]
        value = tl.load(values + place, mask=inside, other=0.0)
        largest = tl.minimum(tl.max(tl.abs(value), axis=1), most)
        if scales.dtype.element_ty == tl.bfloat16:  # to nearest, halves to even; the interpreter cuts off
            bits = largest.to(tl.int32, bitcast=True)
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
            largest = bits.to(tl.float32, bitcast=True)
        scale = largest.to(scales.dtype.element_ty)
        tl.store(scales + rows, scale, mask=rows < blocks)
        factor = tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), tl.maximum(scale.to(tl.float32), least))
        value = value * factor[:, None] * half + half
        if NOISY:
            value = tl.floor(value + tl.load(noise + place, mask=inside, other=0.0))
        else:
            value = (value + whole) - whole
        code = tl.minimum(tl.maximum(value, 0.0), 2 * half).to(tl.int32)
        _store_packed(codes, code, rows < blocks, BITS, BLOCK, ROWS)

    @triton.jit  # type: ignore[untyped-decorator]
    def _choose_kernel(  # type: ignore[no-untyped-def]
        values, codes, boundaries, noise, blocks, width,
        BITS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, NOISY: tl.constexpr,
    ) -> None:  # fmt: skip
        rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        place = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        inside = (rows < blocks)[:, None]
        value = tl.load(values + place, mask=inside, other=0.0)
        if NOISY:
            value = (tl.load(noise + place, mask=inside, other=0.5) - 0.5) * width + value
        code = tl.zeros((ROWS, BLOCK), dtype=tl.int32)
        for number in tl.static_range((1 << BITS) - 1):
            code += (value > tl.load(boundaries + number)).to(tl.int32)
        _store_packed(codes, code, rows < blocks, BITS, BLOCK, ROWS)

    @triton.jit  # type: ignore[untyped-decorator]
    def _store_packed(  # type: ignore[no-untyped-def]
        codes, code, inside, BITS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
    ) -> None:
        count: tl.constexpr = 8 // BITS
        first = tl.program_id(0) * ROWS * (BLOCK // count)
        shifted = tl.reshape(code, (ROWS, BLOCK // count, count)) << (tl.arange(0, count) * BITS)[None, None, :]
        byte = tl.sum(shifted, axis=2)
        place = tl.arange(0, ROWS)[:, None] * (BLOCK // count) + tl.arange(0, BLOCK // count)[None, :]
        tl.store(codes + first + place, byte.to(tl.uint8), mask=inside[:, None])


def in_one_kernel(codec: Codec) -> Codec:
    """Return the codec that stores the same bytes by one kernel each way.

    Raises:
        OptimizerError: If Triton is not installed, or there is no kernel for that codec.
    """
    if not AVAILABLE:
        raise OptimizerError("codec_kernels: triton is not installed; use torch")
    if isinstance(codec, BlockCodec) and 8 % codec.bits == 0 and codec.block_elements.bit_count() == 1:
        if type(codec) is LinearCodec:
            return TritonLinearCodec(codec.bits, codec.block_elements, codec.scale_dtype, codec.zero)
        if type(codec) is GaussianCodec:
            return TritonGaussianCodec(codec.bits, codec.block_elements, codec.scale_dtype)
    raise OptimizerError(
        "codec_kernels: triton has kernels for momentum in int8, int4, int2, gauss4 and gauss2, in blocks of a power of "
        "two; use torch"
    )


def runs_on(device: torch.device) -> bool:
    """Tell whether Triton's kernels run there: on CUDA, or anywhere in its interpreter."""
    return AVAILABLE and (device.type == "cuda" or bool(triton.knobs.runtime.interpret))


@dataclass(frozen=True, slots=True)
class TritonLinearCodec(LinearCodec):
    """``LinearCodec`` by one kernel each way."""

    def load(self, where: Stretch, scratch: Scratch) -> Tensor:
        """Decode whole blocks into ``scratch.values``."""
        return _load(self, self._stored(where), None, scratch, self.half)

    def store(
        self, values: Tensor, where: Stretch, scratch: Scratch, noise: Tensor | None = None, spare: Tensor | None = None
    ) -> None:
        """Take each block's scale, then its codes."""
        del scratch, spare
        codes, scales = self._stored(where)
        rows = _rows(self)
        _encode_kernel[(ceil_div(scales.numel(), rows),)](
            values, codes, scales, values if noise is None else noise, scales.numel(), self.half,
            SMALLEST_SCALE, torch.finfo(scales.dtype).max, _WHOLE,
            BITS=self.bits, BLOCK=self.block_elements, ROWS=rows, NOISY=noise is not None, enable_fp_fusion=False,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class TritonGaussianCodec(GaussianCodec):
    """``GaussianCodec`` whose codes are chosen and read in one kernel; its sums are torch's, so that scales are the same."""

    def load(self, where: Stretch, scratch: Scratch) -> Tensor:
        """Decode whole blocks into ``scratch.values``."""
        return _load(self, self._stored(where), scratch.levels, scratch, 0.0)

    def _decode(self, codes: Tensor, values: Tensor, scratch: Scratch) -> None:
        _decode(codes, None, scratch.levels, values, self, 0.0)

    def _encode(self, values: Tensor, codes: Tensor, scratch: Scratch, noise: Tensor | None) -> None:
        rows, blocks = _rows(self), values.numel() // self.block_elements
        width = (self.levels[-1] - self.levels[0]) / (len(self.levels) - 1)
        _choose_kernel[(ceil_div(blocks, rows),)](
            values, codes, scratch.boundaries, values if noise is None else noise, blocks, width,
            BITS=self.bits, BLOCK=self.block_elements, ROWS=rows, NOISY=noise is not None, enable_fp_fusion=False,
        )  # fmt: skip


def _rows(codec: BlockCodec) -> int:
    return max(TILE // codec.block_elements, 1)


def _load(
    codec: BlockCodec, stored: tuple[Tensor, Tensor], levels: Tensor | None, scratch: Scratch, half: float
) -> Tensor:
    """Return the values of whole blocks, decoded into ``scratch.values``."""
    codes, scales = stored
    assert scratch.values is not None
    values = scratch.values[: scales.numel() * codec.block_elements]
    _decode(codes, scales, levels, values, codec, half)
    return values


def _decode(
    codes: Tensor, scales: Tensor | None, levels: Tensor | None, values: Tensor, codec: BlockCodec, half: float
) -> None:
    """Write what ``codes`` stand for into ``values``, times their block's scale where there are scales."""
    _decode_kernel[(ceil_div(values.numel(), TILE),)](
        codes, codes if scales is None else scales, codes if levels is None else levels, values, values.numel(),
        half, 1 / half if half else 0.0,
        BITS=codec.bits, BLOCK=codec.block_elements, LOOKUP=levels is not None, SCALED=scales is not None, SIZE=TILE,
        enable_fp_fusion=False,
    )  # fmt: skip
