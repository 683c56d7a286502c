# ruff: noqa: ANN001, ANN202 - kernels are Triton code, whose arguments are pointers and numbers of the device
"""Codes of weights by one kernel each way: Q8_0, evenly spaced codes, and updates of IQ3_XXS and IQ2_XXS.

The formats of ``weight_formats`` and ``grid_formats`` are the judge: tests run these kernels in Triton's interpreter, and
every byte and value is equal. Where Triton does not run, the plain code does, and everywhere where scales of a grid's codes
are sought anew, which happens once: their sums are not exact.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from memplan.muon.state_codecs.triton_codecs import AVAILABLE, runs_on
from memplan.muon.stores.optimizer_errors import OptimizerError
from memplan.muon.stores.rounding_noise import uniform
from memplan.muon.weights.grid_formats import GridFormat
from memplan.muon.weights.triton_grids import decode_grid, update_grid
from memplan.muon.weights.weight_codecs import Iq2Xxs, Iq3Xxs
from memplan.muon.weights.weight_formats import Q8Format, UniformFormat, WeightFormat
from memplan.units import ceil_div

if TYPE_CHECKING:
    import torch
    from torch import Tensor

if AVAILABLE:
    import triton
    import triton.language as tl

    from memplan.muon.weights.triton_grids import scale_at, store_scale

TILE = 1024
"""Elements that a program handles."""

if AVAILABLE:

    @triton.jit  # type: ignore[untyped-decorator]
    def _reciprocal_or_zero(scale, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
        is_zero = scale == 0.0
        one = tl.full((ROWS,), 1.0, tl.float32)
        return tl.where(is_zero, 0.0, tl.div_rn(one, tl.where(is_zero, 1.0, scale)))

    @triton.jit  # type: ignore[untyped-decorator]
    def _decode_uniform(  # type: ignore[no-untyped-def]
        blocks, out, elements,
        BITS: tl.constexpr, BLOCK: tl.constexpr, BYTES: tl.constexpr, LOW: tl.constexpr, SIZE: tl.constexpr,
    ) -> None:  # fmt: skip
        place = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
        inside = place < elements
        first, element = blocks + place // BLOCK * BYTES, place % BLOCK
        if BITS == 8:
            code = tl.load(first + 2 + element, mask=inside, other=0).to(tl.int8, bitcast=True).to(tl.float32)
        else:
            byte = tl.load(first + LOW + element % (BLOCK // 2), mask=inside, other=0).to(tl.int32)
            code = (byte >> (element // (BLOCK // 2) * 4)) & 15
            if BITS > 4:
                count: tl.constexpr = 8 // (BITS - 4)
                above = tl.load(first + 2 + element // count, mask=inside, other=0).to(tl.int32)
                code |= ((above >> (element % count * (BITS - 4))) & ((1 << (BITS - 4)) - 1)) << 4
            code = code.to(tl.float32) - (1 << (BITS - 1))
        tl.store(out + place, code * scale_at(first, inside), mask=inside)

    @triton.jit  # type: ignore[untyped-decorator]
    def _encode_q8(  # type: ignore[no-untyped-def]
        values, blocks, noise, count, most, least, inverse,
        ROWS: tl.constexpr, KEEP: tl.constexpr, NOISY: tl.constexpr, DIVIDES: tl.constexpr,
    ) -> None:  # fmt: skip
        rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        inside, element = rows < count, tl.arange(0, 32)[None, :]
        both = inside[:, None]
        value = tl.load(values + rows[:, None] * 32 + element, mask=both, other=0.0)
        scale, first = tl.max(tl.abs(value), axis=1), blocks + rows * 34
        scale = tl.div_rn(scale, tl.full((ROWS,), 127.0, tl.float32)) if DIVIDES else scale * inverse
        if KEEP:
            old = scale_at(first, inside)
            scale = tl.where((scale <= old * most) & (scale >= old * least), old, scale)
        written = store_scale(first, scale, inside)
        if NOISY:
            code = value * _reciprocal_or_zero(written, ROWS)[:, None]
            code = tl.floor(code + tl.load(noise + rows[:, None] * 32 + element, mask=both, other=0.0))
        else:
            exact = value * _reciprocal_or_zero(scale, ROWS)[:, None]
            size = tl.abs(exact)
            whole = tl.floor(size)
            whole += tl.floor((size - whole) * 2)
            code = tl.where(exact < 0, -whole, whole)
        code = tl.minimum(tl.maximum(code, -128.0), 127.0).to(tl.int32)
        tl.store(first[:, None] + 2 + element, (code & 255).to(tl.uint8), mask=both)

    @triton.jit  # type: ignore[untyped-decorator]
    def _code_of(  # type: ignore[no-untyped-def]
        value, factor, noise, inside, BITS: tl.constexpr, NOISY: tl.constexpr
    ):
        zero: tl.constexpr = 1 << (BITS - 1)
        if NOISY:
            code = tl.floor(value * factor[:, None] + zero + tl.load(noise, mask=inside, other=0.0))
        else:
            code = value * factor[:, None] + (zero + 0.5)
        return tl.minimum(tl.maximum(code, 0.0), 2 * zero - 1.0).to(tl.int32)

    @triton.jit  # type: ignore[untyped-decorator]
    def _store_high(  # type: ignore[no-untyped-def]
        place, code, inside, BITS: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr
    ) -> None:
        count: tl.constexpr = 8 // (BITS - 4)
        shifts = (tl.arange(0, count) * (BITS - 4))[None, None, :]
        byte = tl.sum(tl.reshape(code >> 4, (ROWS, HALF // count, count)) << shifts, axis=2)
        tl.store(place[:, None] + tl.arange(0, HALF // count)[None, :], byte.to(tl.uint8), mask=inside)

    @triton.jit  # type: ignore[untyped-decorator]
    def _encode_uniform(  # type: ignore[no-untyped-def]
        values, blocks, noise, count,
        BITS: tl.constexpr, BLOCK: tl.constexpr, BYTES: tl.constexpr, LOW: tl.constexpr, ROWS: tl.constexpr,
        KEEP: tl.constexpr, NOISY: tl.constexpr,
    ) -> None:  # fmt: skip
        half: tl.constexpr = BLOCK // 2
        zero: tl.constexpr = 1 << (BITS - 1)
        rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        inside, element = rows < count, tl.arange(0, half)[None, :]
        both, begin, first = inside[:, None], rows[:, None] * BLOCK + element, blocks + rows * BYTES
        one = tl.load(values + begin, mask=both, other=0.0)
        two = tl.load(values + begin + half, mask=both, other=0.0)
        largest = tl.maximum(tl.max(tl.abs(one), axis=1), tl.max(tl.abs(two), axis=1))[:, None]
        # of equal magnitudes the first: its sign decides the scale's
        at = tl.minimum(
            tl.min(tl.where(tl.abs(one) == largest, element, BLOCK), axis=1),
            tl.min(tl.where(tl.abs(two) == largest, element + half, BLOCK), axis=1),
        )[:, None]
        picked = tl.where(element == at, one, 0.0) + tl.where(element + half == at, two, 0.0)
        scale = tl.sum(picked, axis=1) * (-1.0 / zero)
        if KEEP:
            old = scale_at(first, inside)
            factor = _reciprocal_or_zero(old, ROWS)[:, None]
            low = tl.minimum(tl.min(one * factor, axis=1), tl.min(two * factor, axis=1))
            high = tl.maximum(tl.max(one * factor, axis=1), tl.max(two * factor, axis=1))
            fits = (low >= -zero - 0.5) & (high <= zero - 0.5) & ((low <= -zero / 2) | (high >= zero / 2))
            scale = tl.where(fits, old, scale)
        written = store_scale(first, scale, inside)
        factor = _reciprocal_or_zero(written if NOISY else scale, ROWS)
        one = _code_of(one, factor, noise + begin, both, BITS, NOISY)
        two = _code_of(two, factor, noise + begin + half, both, BITS, NOISY)
        tl.store(first[:, None] + LOW + element, ((one & 15) | ((two & 15) << 4)).to(tl.uint8), mask=both)
        if BITS > 4:
            _store_high(first + 2, one, both, BITS, half, ROWS)
            _store_high(first + 2 + half * (BITS - 4) // 8, two, both, BITS, half, ROWS)


def in_kernels(chosen: WeightFormat) -> WeightFormat:
    """Return the format whose codes are read, and where there is a kernel written, by one kernel each way.

    Raises:
        OptimizerError: If Triton is not installed, or there is no kernel for that format.
    """
    if not AVAILABLE:
        raise OptimizerError("kernels: triton is not installed; use torch")
    twin = _TWINS.get(type(chosen))
    if twin is None:
        raise OptimizerError(
            f"kernels: triton has kernels for q8-0, q4-0, q5-0, q5-b64, iq3-xxs and iq2-xxs, not for {chosen.name}; use torch"
        )
    made: WeightFormat = twin(**{field.name: getattr(chosen, field.name) for field in fields(chosen)})
    return made


class _Reads(WeightFormat):
    """Reads blocks by one kernel on devices that run kernels, and by the plain code on others."""

    __slots__ = ()

    def _decode_part(self, blocks: Tensor, out: Tensor) -> None:
        if runs_on(blocks.device):
            self._decode_by_kernel(blocks, out)
        else:
            super()._decode_part(blocks, out)

    def _decode_by_kernel(self, blocks: Tensor, out: Tensor) -> None:
        raise NotImplementedError


class _Writes(_Reads):
    """Writes them likewise."""

    __slots__ = ()

    def _encode_part(
        self, values: Tensor, blocks: Tensor, generator: torch.Generator | None, search: int, keep: bool
    ) -> None:
        if runs_on(blocks.device):
            rows = TILE // self.block_elements
            noise = values if generator is None else uniform(values.shape, generator, values.device)  # else unread
            self._encode_by_kernel(
                (ceil_div(len(blocks), rows),), (values, blocks, noise, len(blocks)),
                {"ROWS": rows, "KEEP": keep, "NOISY": generator is not None, "enable_fp_fusion": False},
            )  # fmt: skip
        else:
            super()._encode_part(values, blocks, generator, search, keep)

    def _encode_by_kernel(self, grid: tuple[int], given: tuple[Any, ...], options: dict[str, Any]) -> None:
        raise NotImplementedError


class TritonQ8(_Writes, Q8Format):
    """Q8_0 by one kernel each way."""

    __slots__ = ()

    def _decode_by_kernel(self, blocks: Tensor, out: Tensor) -> None:
        _decoded(self, blocks, out, 8, 2)

    def _encode_by_kernel(self, grid: tuple[int], given: tuple[Any, ...], options: dict[str, Any]) -> None:
        divides = given[1].device.type == "cpu"
        _encode_q8[grid](*given, 1.004, 0.5, 1 / 127, DIVIDES=divides, **options)


class TritonUniform(_Writes, UniformFormat):
    """Evenly spaced codes by one kernel each way."""

    __slots__ = ()

    def _decode_by_kernel(self, blocks: Tensor, out: Tensor) -> None:
        _decoded(self, blocks, out, self.bits, self._high_end)

    def _encode_by_kernel(self, grid: tuple[int], given: tuple[Any, ...], options: dict[str, Any]) -> None:
        sizes = {"BITS": self.bits, "BLOCK": self.block_elements, "BYTES": self.block_bytes, "LOW": self._high_end}
        _encode_uniform[grid](*given, **sizes, **options)


class _Updates(_Reads):
    """Reads blocks of a grid's codes so, and writes those whose scales stay."""

    __slots__ = ()

    def _decode_by_kernel(self, blocks: Tensor, out: Tensor) -> None:
        assert isinstance(self, GridFormat)
        decode_grid(self, blocks, out)

    def _encode_part(
        self, values: Tensor, blocks: Tensor, generator: torch.Generator | None, search: int, keep: bool
    ) -> None:
        if keep and runs_on(blocks.device):
            assert isinstance(self, GridFormat)
            update_grid(self, values, blocks, generator)
        else:
            super()._encode_part(values, blocks, generator, search, keep)


class TritonIq3Xxs(_Updates, Iq3Xxs):
    """IQ3_XXS by one kernel each way."""

    __slots__ = ()


class TritonIq2Xxs(_Updates, Iq2Xxs):
    """IQ2_XXS by one kernel each way."""

    __slots__ = ()


_TWINS: dict[type[WeightFormat], type[Any]] = {
    Q8Format: TritonQ8,
    UniformFormat: TritonUniform,
    Iq3Xxs: TritonIq3Xxs,
    Iq2Xxs: TritonIq2Xxs,
}


def _decoded(chosen: WeightFormat, blocks: Tensor, out: Tensor, bits: int, low: int) -> None:
    _decode_uniform[(ceil_div(out.numel(), TILE),)](
        blocks, out, out.numel(),
        BITS=bits, BLOCK=chosen.block_elements, BYTES=chosen.block_bytes, LOW=low, SIZE=TILE, enable_fp_fusion=False,
    )  # fmt: skip
