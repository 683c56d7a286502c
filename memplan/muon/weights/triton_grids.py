# ruff: noqa: ANN001, ANN201, ANN202 - kernels are Triton code, whose arguments are pointers and numbers of the device
"""Codes of a grid by one kernel each way: IQ3_XXS and IQ2_XXS decoded, and updated where their scales stay.

Every sum that decides between points is exact (``grid_formats``), so that the kernels' order of sums is as good as any.
"""

from __future__ import annotations

import torch
from torch import Tensor

from memplan.muon.state_codecs.triton_codecs import AVAILABLE
from memplan.muon.stores.rounding_noise import uniform
from memplan.muon.weights.grid_formats import FRACTIONS, SUPER, GridFormat, grid_of, largest_of
from memplan.units import ceil_div

if AVAILABLE:
    import triton
    import triton.language as tl

TILE = 1024
"""Elements that a program decodes."""
ROWS = 4
"""Blocks whose codes a program forms."""

if AVAILABLE:

    @triton.jit
    def scale_at(place, inside):  # type: ignore[no-untyped-def]
        """Return the fp16 numbers that begin at ``place``, uint8, as fp32."""
        low = tl.load(place, mask=inside, other=0).to(tl.int16)
        high = tl.load(place + 1, mask=inside, other=0).to(tl.int16)
        return (low | (high << 8)).to(tl.float16, bitcast=True).to(tl.float32)

    @triton.jit
    def store_scale(place, scale, inside):  # type: ignore[no-untyped-def]
        """Write fp32 numbers there as fp16, and return what was written."""
        half = tl.minimum(tl.maximum(scale, -65504.0), 65504.0).to(tl.float16)
        bits = half.to(tl.int16, bitcast=True).to(tl.int32)
        tl.store(place, (bits & 255).to(tl.uint8), mask=inside)
        tl.store(place + 1, ((bits >> 8) & 255).to(tl.uint8), mask=inside)
        return half.to(tl.float32)

    @triton.jit  # type: ignore[untyped-decorator]
    def _decode_grid(  # type: ignore[no-untyped-def]
        blocks, out, grid, elements, share,
        GROUP: tl.constexpr, BYTES: tl.constexpr, MIXED: tl.constexpr, SIZE: tl.constexpr,
    ) -> None:  # fmt: skip
        place = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
        inside = place < elements
        first, element = blocks + place // 256 * BYTES, place % 256
        sub, eight = element // 32, element // 8
        if MIXED:  # four indices and a word, for each 32 elements
            at, words = first + 2 + sub * 8 + eight % 4, first + 2 + sub * 8 + 4
        else:
            at, words = first + 2 + element // GROUP, first + 66 + sub * 4
        word = tl.zeros((SIZE,), dtype=tl.int32)
        for number in tl.static_range(4):
            word |= tl.load(words + number, mask=inside, other=0).to(tl.int32) << (8 * number)
        signs = (word >> (eight % 4 * 7)) & 127
        odd = signs ^ (signs >> 4)
        odd ^= odd >> 2
        odd ^= odd >> 1
        minus = ((signs | ((odd & 1) << 7)) >> (element % 8)) & 1
        step = scale_at(first, inside) * (((word >> 28) & 15).to(tl.float32) + 0.5) * share
        index = tl.load(at, mask=inside, other=0).to(tl.int32)
        value = tl.load(grid + index * GROUP + element % GROUP, mask=inside, other=0.0) * step
        tl.store(out + place, value * (1.0 - 2.0 * minus.to(tl.float32)), mask=inside)

    @triton.jit
    def _parity(number):  # type: ignore[no-untyped-def]
        odd = number ^ (number >> 4)
        odd ^= odd >> 2
        return (odd ^ (odd >> 1)) & 1

    @triton.jit
    def _grid_scales(  # type: ignore[no-untyped-def]
        first, words, most, share, largest, inside
    ):
        word = tl.zeros(words.shape, dtype=tl.int32)
        for number in tl.static_range(4):
            word |= tl.load(words + number, mask=inside[:, None], other=0).to(tl.int32) << (8 * number)
        old, scales = scale_at(first, inside), ((word >> 28) & 15).to(tl.float32)
        reach = tl.div_rn(most, tl.maximum((scales + 0.5) * old[:, None] * (share * largest), 1e-30))
        scales = tl.maximum(scales + (reach > 1.25).to(tl.float32) - (reach < 0.6).to(tl.float32), 0.0)
        outgrown = tl.max(scales, axis=1) > 15
        scale = store_scale(first, tl.where(outgrown, old * 1.0625, old), inside)
        return scale, tl.minimum(scales, 15.0)

    @triton.jit  # type: ignore[untyped-decorator]
    def _nearest_of_grid(  # type: ignore[no-untyped-def]
        points, grid, halves, GROUP: tl.constexpr, POINTS: tl.constexpr
    ):
        best = tl.full(points.shape[:4], -1e30, tl.float32)
        index = tl.zeros(points.shape[:4], dtype=tl.int32)
        for number in range(POINTS):
            point = tl.load(grid + number * GROUP + tl.arange(0, GROUP))[None, None, None, None, :]
            score = tl.sum(points * point, axis=4) - tl.load(halves + number)
            better = score > best
            index, best = tl.where(better, number, index), tl.where(better, score, best)
        return index

    @triton.jit  # type: ignore[untyped-decorator]
    def _drawn_of_grid(  # type: ignore[no-untyped-def]
        points, index, drawn, grid, closeness, GROUP: tl.constexpr, POINTS: tl.constexpr
    ):
        element = tl.arange(0, GROUP)[None, None, None, None, :]
        near = tl.load(grid + index[:, :, :, :, None] * GROUP + element)
        rest = points - near
        from_near = tl.sum(rest * near, axis=4)
        best, way = tl.full(index.shape, -1e30, tl.float32), tl.zeros(index.shape, dtype=tl.float32)
        neighbour = tl.zeros(index.shape, dtype=tl.int32)
        for number in range(POINTS):
            point = tl.load(grid + number * GROUP + tl.arange(0, GROUP))[None, None, None, None, :]
            along = tl.sum(rest * point, axis=4) - from_near
            score = along * tl.load(closeness + index * POINTS + number)
            better = score > best
            neighbour, way = tl.where(better, number, neighbour), tl.where(better, along, way)
            best = tl.where(better, score, best)
        squares, odds = rest * rest, tl.zeros(index.shape, dtype=tl.float32)
        for place in tl.static_range(GROUP):  # in the plain code's order: squares are not exact
            odds += tl.sum(tl.where(element == place, squares, 0.0), axis=4)
        return tl.where(drawn < tl.div_rn(odds, tl.maximum(way, 1e-6)), neighbour, index)

    @triton.jit  # type: ignore[untyped-decorator]
    def _update_grid(  # type: ignore[no-untyped-def]
        values, blocks, noise, count, grid, halves, closeness, share, largest,
        GROUP: tl.constexpr, BYTES: tl.constexpr, MIXED: tl.constexpr, POINTS: tl.constexpr, FINE: tl.constexpr,
        ROWS: tl.constexpr, NOISY: tl.constexpr,
    ) -> None:  # fmt: skip
        each: tl.constexpr = 8 // GROUP  # groups of eight elements, which share a byte of signs
        rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        inside, first = rows < count, blocks + rows * BYTES
        sub, four = tl.arange(0, 8)[None, :], tl.arange(0, 4)[None, None, :]
        words = first[:, None] + (2 + sub * 8 + 4 if MIXED else 66 + sub * 4)
        eight = (sub * 4)[:, :, None] + four
        element = tl.arange(0, 8)[None, None, None, :]
        covered = inside[:, None, None, None]
        value = tl.load(
            values + rows[:, None, None, None] * 256 + eight[:, :, :, None] * 8 + element, mask=covered, other=0.0
        )
        signs, size = tl.sum((value < 0).to(tl.int32) << element, axis=3), tl.abs(value)
        smallest = tl.min(size, axis=3)[:, :, :, None]
        place = tl.min(tl.where(size == smallest, element, 8), axis=3)
        odd = _parity(signs)
        turned = smallest * (1 - 2 * odd)[:, :, :, None].to(tl.float32)
        size = tl.where(element == place[:, :, :, None], turned, size)
        signs ^= odd << place
        scale, scales = _grid_scales(first, words, tl.max(tl.max(size, axis=3), axis=2), share, largest, inside)
        step = tl.maximum((scales + 0.5) * scale[:, None] * share, 1e-30)[:, :, None, None]
        points = tl.div_rn(size, tl.broadcast_to(step, size.shape))
        points = tl.minimum(tl.maximum(points, -2 * largest), 2 * largest)
        points = tl.floor(points * FINE + 0.5) * (1.0 / FINE)
        points = tl.reshape(points, (ROWS, 8, 4, each, GROUP))
        index = _nearest_of_grid(points, grid, halves, GROUP, POINTS)
        group = eight[:, :, :, None] * each + tl.arange(0, each)[None, None, None, :]
        if NOISY:
            drawn = tl.load(noise + rows[:, None, None, None] * (32 * each) + group, mask=covered, other=1.0)
            index = _drawn_of_grid(points, index, drawn, grid, closeness, GROUP, POINTS)
        at = (sub * 8)[:, :, None, None] + four[:, :, :, None] if MIXED else group
        tl.store(first[:, None, None, None] + 2 + at, index.to(tl.uint8), mask=covered)
        word = tl.sum((signs & 127) << (7 * four), axis=2) | (scales.to(tl.int32) << 28)
        for number in tl.static_range(4):
            tl.store(words + number, ((word >> (8 * number)) & 255).to(tl.uint8), mask=inside[:, None])


def decode_grid(chosen: GridFormat, blocks: Tensor, out: Tensor) -> None:
    """Write the values of blocks of IQ3_XXS or IQ2_XXS, ``(blocks, block_bytes)``, into ``out``, fp32."""
    assert chosen.block_elements == SUPER
    _decode_grid[(ceil_div(out.numel(), TILE),)](
        blocks, out, grid_of(chosen.name, blocks.device).points, out.numel(), chosen.factor,
        GROUP=chosen.group, BYTES=chosen.block_bytes, MIXED=_is_mixed(chosen), SIZE=TILE, enable_fp_fusion=False,
    )  # fmt: skip


def update_grid(chosen: GridFormat, values: Tensor, blocks: Tensor, generator: torch.Generator | None) -> None:
    """Write the codes of ``values``, fp32 ``(blocks, 256)``, into such blocks, whose scales stay or move by one step."""
    grid, noise = grid_of(chosen.name, blocks.device), values  # which is not read without a generator
    if generator is not None:
        noise = uniform(torch.Size((values.numel() // chosen.group,)), generator, values.device)
    _update_grid[(ceil_div(len(blocks), ROWS),)](
        values, blocks, noise, len(blocks), grid.points, grid.halves, grid.closeness, chosen.factor, largest_of(chosen.name),
        GROUP=chosen.group, BYTES=chosen.block_bytes, MIXED=_is_mixed(chosen), POINTS=len(grid.points),
        FINE=FRACTIONS, ROWS=ROWS, NOISY=generator is not None, enable_fp_fusion=False,
    )  # fmt: skip


def _is_mixed(chosen: GridFormat) -> bool:
    """Tell whether indices and words of signs alternate, as in IQ2_XXS; else all indices come first."""
    return chosen.group == 8
