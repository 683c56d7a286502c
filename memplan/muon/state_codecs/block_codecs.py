"""The codes themselves: evenly spaced, the notes' own, best for a normal distribution, and powers."""

from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from memplan.muon.state_codecs.codecs import SMALLEST_SCALE, BlockCodec, Scratch, Stretch, rounded_down_
from memplan.muon.state_codecs.packing import CODES_IN_A_BYTE, pack_, pack_ternary_, unpack_, unpack_ternary_
from memplan.units import ceil_div


@dataclass(frozen=True, slots=True)
class LinearCodec(BlockCodec):
    """Evenly spaced levels from -1 to 1, scaled by the block's largest magnitude.

    Source:
        https://arxiv.org/abs/2509.23106: linear codes suffice for Muon's momentum in 8 bits.
    """

    zero: bool = True  # Whether zero is a level: ``2**bits - 1`` levels then, else ``2**bits``

    @property
    def half(self) -> float:
        """Steps from the middle to the largest level."""
        return float((1 << self.bits - 1) - 1) if self.zero else ((1 << self.bits) - 1) / 2

    @property
    def zero_code(self) -> int:
        """The code in the middle."""
        return int(self.half)

    def _decode(self, codes: Tensor, values: Tensor, scratch: Scratch) -> None:
        self._read(codes, values, scratch)
        values.sub_(self.half).mul_(1 / self.half)

    def _encode(self, values: Tensor, codes: Tensor, scratch: Scratch, noise: Tensor | None) -> None:
        values.mul_(self.half).add_(self.half)
        values = values.round_() if noise is None else values.add_(noise).floor_()
        self._write(values.clamp_(0, 2 * self.half), codes, scratch)


@dataclass(frozen=True, slots=True)
class NotesCodec(LinearCodec):
    """The quantiser of the notes, in blocks: no zero, and a range that grows and never shrinks. It diverges.

    Where a magnitude exceeds 0.9 of the range, the range becomes 1.2 times that magnitude. The
    largest level decays to 0.95 of the range in a step, which exceeds 0.9 of it: the range grows
    by 14 % each step, whatever the gradients are.

    Source:
        https://github.com/SQCU/pfhe, scripts/benchmark_muon_lowbit.py, which has one range for
        each tensor; here each block has its own.
    """

    zero: bool = False
    first_range: float = 0.01

    def _statistic(self, rows: Tensor, _elements: int, scales: Tensor, factors: Tensor) -> None:
        torch.linalg.vector_norm(rows, ord=float("inf"), dim=1, out=factors)
        if scales.is_meta:  # numbers decide, and there are none
            return
        for block in range(scales.numel()):
            known = max(float(scales[block]), self.first_range)
            largest = float(factors[block])
            factors[block] = known if largest <= 0.9 * known else 1.2 * largest


@dataclass(frozen=True, slots=True)
class GaussianCodec(BlockCodec):
    """The best levels for a normal distribution: chosen at the block's root mean square, stored with the scale that fits.

    With ``l`` the levels that a block's values ``v`` are rounded to, its scale is the least squares fit
    ``<v, l> / <l, l>``. What is stored is then the projection of ``v`` on ``l``, whose norm is at most that of
    ``v``. With the root mean square itself as the scale a block of alike magnitudes decodes 1.5 times as large
    in 2 bits, and momentum grows without bound.

    Source:
        Max, Quantizing for minimum distortion, IRE Trans. Inf. Theory 6 (1960), table I; the
        same numbers to twelve decimals, as the test derives them.
    """

    @property
    def levels(self) -> tuple[float, ...]:
        """All levels, smallest first."""
        upper = LLOYD_MAX[self.bits]
        return (*(-level for level in reversed(upper)), *upper)

    def _pack(self, index: Tensor, codes: Tensor) -> None:
        pack_(index, codes, self.bits)

    def _unpack(self, codes: Tensor, index: Tensor) -> None:
        unpack_(codes, index, self.bits)

    def scratch(self, elements: int, device: torch.device) -> Scratch:
        """Return values, factors, a wide index, and the codebook."""
        levels = torch.tensor(self.levels, dtype=torch.float32, device=device)
        return Scratch(
            values=torch.empty(elements, dtype=torch.float32, device=device),
            factors=torch.empty(elements // self.block_elements, dtype=torch.float32, device=device),
            index=torch.empty(elements, dtype=torch.int32, device=device),
            levels=levels,
            boundaries=(levels[1:] + levels[:-1]).mul_(0.5),
        )

    def scratch_bytes(self, elements: int) -> int:
        """Return 8 bytes for each element, 4 for each block, and the codebook with its boundaries."""
        return 8 * elements + 4 * (elements // self.block_elements) + self.codebook_bytes

    @property
    def codebook_bytes(self) -> int:
        """Bytes of the levels, and of the boundaries between them, in fp32."""
        return 4 * (2 * len(self.levels) - 1)

    def store(
        self, values: Tensor, where: Stretch, scratch: Scratch, noise: Tensor | None = None, spare: Tensor | None = None
    ) -> None:
        """Choose codes at the root mean square, then the scale that fits them best."""
        codes, scales = self._stored(where)
        assert scratch.factors is not None
        factors, rows = scratch.factors[: scales.numel()], values.view(-1, self.block_elements)
        values[where.elements :].zero_()
        self._statistic(rows, where.elements, scales, factors)
        rows.div_(factors.clamp_(SMALLEST_SCALE, torch.finfo(torch.float32).max)[:, None])
        self._encode(values, codes, scratch, None if noise is None else noise[: values.numel()])
        free = noise if noise is not None else torch.empty_like(values) if spare is None else spare
        self._fit(values, codes, where.elements, free[: values.numel()], scratch)
        scales.copy_(rounded_down_(factors, scales.dtype))

    def _fit(self, values: Tensor, codes: Tensor, elements: int, levels: Tensor, scratch: Scratch) -> None:
        """Multiply ``scratch.factors`` by ``<v, l> / <l, l>`` of each block; ``values`` and ``levels`` are overwritten."""
        assert scratch.factors is not None
        assert scratch.index is not None
        blocks = values.numel() // self.block_elements
        self._decode(codes, levels, scratch)
        levels[elements:].zero_()
        products = scratch.index.view(torch.float32)[:blocks]
        torch.sum(values.mul_(levels).view(blocks, -1), dim=1, out=products)
        squares = values[:blocks]
        torch.sum(levels.mul_(levels).view(blocks, -1), dim=1, out=squares)
        scratch.factors[:blocks].mul_(products.div_(squares.clamp_min_(SMALLEST_SCALE)).clamp_min_(0))

    def _statistic(self, rows: Tensor, elements: int, _scales: Tensor, factors: Tensor) -> None:
        torch.linalg.vector_norm(rows, dim=1, out=factors)
        factors.mul_(1 / sqrt(self.block_elements))
        tail = elements % self.block_elements
        if tail:
            factors[-1:].mul_(sqrt(self.block_elements / tail))

    def _decode(self, codes: Tensor, values: Tensor, scratch: Scratch) -> None:
        assert scratch.index is not None
        assert scratch.levels is not None
        index = scratch.index[: values.numel()]
        self._unpack(codes, index)
        torch.index_select(scratch.levels, 0, index, out=values)

    def _encode(self, values: Tensor, codes: Tensor, scratch: Scratch, noise: Tensor | None) -> None:
        assert scratch.index is not None
        assert scratch.boundaries is not None
        index = scratch.index[: values.numel()]
        if noise is not None:  # as wide as the mean distance of levels; the values are needed again
            width = (self.levels[-1] - self.levels[0]) / (len(self.levels) - 1)
            values = noise.sub_(0.5).mul_(width).add_(values)
        torch.bucketize(values, scratch.boundaries, out_int32=True, out=index)
        self._pack(index, codes)


@dataclass(frozen=True, slots=True)
class TernaryCodec(GaussianCodec):
    """The best three levels for a normal distribution, five to a byte: 52 bytes and a scale for a block of 256.

    Source:
        Max (1960), table I: the same number to twelve decimals, as the test derives it. Five codes below three in a
        byte: TQ1_0 in https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h, whose order of bytes is another.
    """

    @property
    def levels(self) -> tuple[float, ...]:
        """Minus one level, zero, and the level."""
        return (-TERNARY_LEVEL, 0.0, TERNARY_LEVEL)

    @property
    def code_bytes(self) -> int:
        """Bytes of a block's codes: five in each."""
        return ceil_div(self.block_elements, CODES_IN_A_BYTE)

    def _pack(self, index: Tensor, codes: Tensor) -> None:
        pack_ternary_(index.view(-1, self.block_elements), codes.view(-1, self.code_bytes))

    def _unpack(self, codes: Tensor, index: Tensor) -> None:
        unpack_ternary_(codes.view(-1, self.code_bytes), index.view(-1, self.block_elements))


@dataclass(frozen=True, slots=True)
class LogCodec(BlockCodec):
    """Powers of ``2**(1/8)`` down from the block's largest element; for what is never negative.

    Adam's second moment must not have zero as a level: an element that became zero would get an
    unbounded step. The 256 levels span ``2**-31.9`` to 1. Its steps are 9 % wide, but a second
    moment changes by 0.1 % in a step, so rounding must be stochastic; the noise is bent such
    that the mean of what is stored is the value itself, not its logarithm.
    """

    STEPS_PER_OCTAVE = 8

    def _decode(self, codes: Tensor, values: Tensor, scratch: Scratch) -> None:
        self._read(codes, values, scratch)
        values.sub_(255).mul_(1 / self.STEPS_PER_OCTAVE).exp2_()

    def _encode(self, values: Tensor, codes: Tensor, scratch: Scratch, noise: Tensor | None) -> None:
        steps = self.STEPS_PER_OCTAVE
        values.clamp_(min=2.0 ** (-255 / steps)).log2_().mul_(steps).add_(255)
        if noise is None:
            values.round_()
        else:
            noise.mul_(2.0 ** (1 / steps) - 1).add_(1).log2_().mul_(-steps).add_(1)
            values.add_(noise).floor_()
        self._write(values.clamp_(0, 255), codes, scratch)


TERNARY_LEVEL = 1.224006361925
"""The outer levels of three with least mean square error for a standard normal variable; the third is zero."""

LLOYD_MAX = {
    2: (0.452780034636, 1.510417608499),
    3: (0.245094178944, 0.756005281206, 1.343909278505, 2.151945704537),
    4: (
        0.128395029851, 0.388048299490, 0.656759118532, 0.942340456487,
        1.256231197347, 1.618046386022, 2.069017226531, 2.732589570995,
    ),
}  # fmt: skip
"""Positive levels of the quantiser with least mean square error for a standard normal variable."""
