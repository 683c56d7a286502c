"""Grid formats: groups of elements as points of a grid, with signs and 4-bit scales.

Each group of 4 or 8 magnitudes is one of a few hundred grid points, which the ``gguf`` package holds
and which are read from it when first needed. A block of 256 has an fp16 scale ``d``; each sub-block of
32 or 16 a 4-bit scale ``s``; a value is ``d * (0.5 + s) * factor * grid * sign``. Where only 7 of 8 signs
are stored, the eighth makes the number of minus signs even.

``gguf`` itself cannot encode these formats: the encoder here finds the nearest grid point by one matrix product
with all points, for scales that are least squares fits over a few candidates. Nothing is left out of either search:
of points of one length only that of the largest product can be the nearest, at any scale, so that candidates are
compared by one number for each length. Numbers are rounded to ``FRACTIONS`` of a grid's unit, whose points are some 8
apart: sums of products with whole numbers are then exact in fp32, and no order of sums decides which point is nearest.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from memplan.muon.stores.optimizer_errors import OptimizerError
from memplan.muon.stores.rounding_noise import uniform
from memplan.muon.weights.weight_formats import WeightFormat, read_scale, write_scale

SUPER = 256
LEAST_DISTANCE = 1e-3
FRACTIONS = 256
"""Of a grid's unit, in which groups are compared with its points; numbers beyond twice its largest are taken as that."""
SCORES_AT_ONCE = 1 << 18
"""Of groups with points, which a CPU's second cache holds, 1 MiB."""
_SMALLEST_SCALE = 1e-30
_SIGN_GROUP = 8
_FAR = 1e30
"""What sets a score below the largest apart from it, however near."""


class Grid(NamedTuple):
    """A format's grid, fp32.

    Attributes:
        points: ``(points, group)``.
        halves: Half the squared length of each point, ``(points,)``.
        closeness: One over the distance between any two points, which is taken as at least ``LEAST_DISTANCE``,
            ``(points, points)``.
    """

    points: Tensor
    halves: Tensor
    closeness: Tensor


@lru_cache(maxsize=32)
def grid_of(name: str, device: torch.device) -> Grid:
    """Return a format's grid, with what is worked out from it once.

    Raises:
        OptimizerError: If the ``gguf`` package is not installed.
    """
    try:
        from gguf import quants
    except ImportError as error:
        raise OptimizerError(f"{name}: needs the gguf package, which holds its grid (pip install gguf)") from error
    kind = getattr(quants, name.upper().replace("-", "_"))
    kind.init_grid()
    grid = torch.from_numpy(kind.grid.reshape(kind.grid_shape)).clone().to(device)
    distances = torch.cdist(grid, grid, compute_mode="donot_use_mm_for_euclid_dist").clamp_min_(LEAST_DISTANCE)
    return Grid(grid, grid.square().sum(dim=1).div_(2), distances.reciprocal_())


class Lengths(NamedTuple):
    """A grid's points by their length, fp32 on the CPU."""

    points: Tensor  # Shortest first, ``(points, group)``
    halves: Tensor  # Half the squared length, once for each length, ``(lengths, 1)``
    counts: tuple[int, ...]  # Points of each length


@lru_cache(maxsize=32)
def lengths_of(name: str) -> Lengths:
    """Return the points of a format's grid, shortest first."""
    grid = grid_of(name, torch.device("cpu"))
    halves, counts = grid.halves.unique(return_counts=True)  # type: ignore[no-untyped-call]
    return Lengths(grid.points[grid.halves.argsort()], halves[:, None], tuple(counts.tolist()))


@lru_cache(maxsize=32)
def largest_of(name: str) -> float:
    """Return the largest number of a format's grid."""
    return float(grid_of(name, torch.device("cpu")).points.max())


@dataclass(frozen=True, slots=True)
class GridFormat(WeightFormat):
    """A format of grid points; ``iq_formats`` has the byte layout of each."""

    group: int = 8  # Elements of a grid point
    sub: int = 32  # Elements that share a 4-bit scale
    factor: float = 0.25  # Of all scales
    even_signs: bool = True  # Whether only 7 of 8 signs are stored

    encoded_blocks: ClassVar[int] = 256

    def _unpack(self, blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return grid indices ``(blocks, 256 / group)``, sign bytes ``(blocks, 32)`` and scales, all int32."""
        raise NotImplementedError

    def _pack(self, blocks: Tensor, index: Tensor, signs: Tensor, scales: Tensor) -> None:
        """Write what ``_unpack`` returns; of ``signs`` the top bit may be left out."""
        raise NotImplementedError

    def _decode_part(self, blocks: Tensor, out: Tensor) -> None:
        grid = grid_of(self.name, blocks.device).points
        index, signs, scales = self._unpack(blocks)
        step = (read_scale(blocks) * scales.float().add_(0.5)).mul_(self.factor)
        torch.index_select(grid, 0, index.view(-1), out=out.view(-1, self.group))
        out.view(-1, SUPER // self.sub, self.sub).mul_(step[:, :, None])
        out.mul_(_sign_factors(signs).view(-1, SUPER))

    def _encode_part(
        self, values: Tensor, blocks: Tensor, generator: torch.Generator | None, search: int, keep: bool
    ) -> None:
        grid = grid_of(self.name, blocks.device)
        signs, magnitudes = self._signs(values)
        subs = magnitudes.view(-1, SUPER // self.sub, self.sub)
        if keep:
            d, scales = self._stored_scales(subs, blocks, largest_of(self.name))
        else:
            d, scales = self._fresh_scales(subs, blocks, search)
        step = (scales.add(0.5) * d).mul_(self.factor).clamp_min_(_SMALLEST_SCALE)
        points = _rounded(subs / step[:, :, None], largest_of(self.name)).view(-1, self.group)
        index = _nearest(points, grid)
        if generator is not None:
            index = _stochastic(points, index, grid, generator)
        self._pack(blocks, index.view(values.shape[0], -1), signs, scales.to(torch.int32))
        if generator is None and not keep:
            self._refit(blocks, values)

    def _fresh_scales(self, subs: Tensor, blocks: Tensor, search: int) -> tuple[Tensor, Tensor]:
        """Write a new ``d``, and return it with the 4-bit scales, fp32."""
        best = self._sub_scales(subs, search)
        d = write_scale(blocks, best.amax(dim=1, keepdim=True).div_(15.5 * self.factor))
        scales = best.div_(d.mul(self.factor).clamp_min_(_SMALLEST_SCALE)).sub_(0.5).round_().clamp_(0, 15)
        return d, scales

    def _stored_scales(self, subs: Tensor, blocks: Tensor, top: float) -> tuple[Tensor, Tensor]:
        """Return the stored ``d`` and 4-bit scales, one step up or down where a sub-block outgrew its own.

        Where even the largest 4-bit scale is too small, ``d`` grows by a sixteenth of itself.
        """
        old = read_scale(blocks)
        scales = self._unpack(blocks)[2].float()
        reach = subs.amax(dim=2).div_((scales.add(0.5) * old).mul_(self.factor * top).clamp_min_(_SMALLEST_SCALE))
        scales.add_((reach > 1.25).float()).sub_((reach < 0.6).float()).clamp_(min=0)
        d = write_scale(blocks, torch.where((scales > 15).any(dim=1, keepdim=True), old * (1 + 1 / 16), old))
        return d, scales.clamp_(max=15)

    def _signs(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return sign bytes ``(blocks, 32)``, int32, and what the grid has to meet, ``(blocks, 256)``.

        Where the number of minus signs is odd but must be even, the smallest element takes the wrong sign.
        """
        groups = values.view(-1, SUPER // _SIGN_GROUP, _SIGN_GROUP)
        powers = torch.arange(_SIGN_GROUP, device=values.device, dtype=torch.int32)
        signs = ((groups < 0).to(torch.int32) << powers).sum(dim=2, dtype=torch.int32)
        magnitudes = groups.abs()
        if self.even_signs:
            smallest, place = magnitudes.min(dim=2)
            odd = odd_ones(signs)
            magnitudes.scatter_(2, place[:, :, None], smallest.mul_(1 - 2 * odd)[:, :, None])
            signs ^= odd << place.to(torch.int32)
        return signs, magnitudes.view(-1, SUPER)

    def _sub_scales(self, subs: Tensor, search: int) -> Tensor:
        """Return for each sub-block, ``(blocks, subs)``, the best least squares scale of a few tried.

        Candidates map the largest magnitude to the grid's largest value and to ones beyond it. At a scale ``s`` the
        point nearest to ``p / s`` has the largest ``p.g - s * g.g / 2``.
        """
        lengths = lengths_of(self.name)
        halves = lengths.halves.to(subs.device)
        largest = subs.amax(dim=2).div_(largest_of(self.name))
        products = lengths.points.to(subs.device) @ subs.view(-1, self.group).mT
        classes = products.split(lengths.counts)  # type: ignore[no-untyped-call]
        best_of_length = torch.stack([part.amax(dim=0) for part in classes])
        del products, classes
        scores = torch.empty_like(best_of_length)
        best = torch.zeros_like(largest)
        gain = torch.full_like(largest, -1)
        for candidate in range(search):
            share = 1.0 if search == 1 else 1.15 - 0.6 * candidate / (search - 1)
            scale = largest.mul(share).clamp_min_(_SMALLEST_SCALE)
            fit, square = self._sums(best_of_length, scale, halves, scores)
            score = fit.clamp_min_(0).square().div_(square)
            better = score > gain
            gain = torch.where(better, score, gain)
            best = torch.where(better, fit.div_(square), best)
        return best

    def _sums(self, best_of_length: Tensor, scale: Tensor, halves: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``p.g`` and ``g.g`` of the nearest points, each summed over the groups of a sub-block."""
        scales = scale[:, :, None].expand(*scale.shape, self.sub // self.group).reshape(-1)
        torch.addcmul(best_of_length, halves, scales, value=-1, out=scores)
        most = scores.amax(dim=0)
        half = torch.add(halves, scores.sub_(most), alpha=_FAR, out=scores).amax(dim=0)
        sums = (most.addcmul_(half, scales), half.mul_(2))
        fit, square = (part.view(*scale.shape, -1).sum(dim=2) for part in sums)
        return fit, square

    def _refit(self, blocks: Tensor, values: Tensor) -> None:
        """Replace each block's ``d`` by the least squares fit to the codes that were chosen."""
        decoded = torch.empty_like(values)
        self._decode_part(blocks, decoded)
        ratio = (
            (decoded * values)
            .sum(dim=1, keepdim=True)
            .div_(decoded.square().sum(dim=1, keepdim=True).clamp_min_(_SMALLEST_SCALE))
        )
        old = read_scale(blocks)
        write_scale(blocks, torch.where(ratio > 0, old * ratio, old))


def _rounded(points: Tensor, largest: float) -> Tensor:
    """Round numbers in units of a grid to whole ``FRACTIONS``, in place: every sum of products with its points is then exact."""
    points.clamp_(-2 * largest, 2 * largest)
    return points.mul_(FRACTIONS).add_(0.5).floor_().div_(FRACTIONS)


def _nearest(points: Tensor, grid: Grid) -> Tensor:
    """Return the index of the grid point nearest to each of ``points``, ``(groups, group)``, as int32."""
    table, index = _table(points, grid), points.new_empty(len(points), dtype=torch.int64)
    for part in _parts(points, grid):
        scores = torch.addmm(grid.halves, points[part], grid.points.mT, beta=-1, out=table[: part.stop - part.start])
        _first_of_largest_(scores, table[len(scores) :], index[part])
    return index.to(torch.int32)


def _table(points: Tensor, grid: Grid) -> Tensor:
    """Return memory for a score of each group and point of a grid."""
    return points.new_empty((len(points), len(grid.points)))


def _parts(points: Tensor, grid: Grid) -> Iterator[slice]:
    """Yield the groups that are compared with a grid's points at a time: on a CPU as many as its caches hold the scores of."""
    step = SCORES_AT_ONCE // len(grid.points) if points.device.type == "cpu" else max(len(points), 1)
    for first in range(0, len(points), step):
        yield slice(first, min(first + step, len(points)))


def _first_of_largest_(scores: Tensor, spare: Tensor, index: Tensor) -> None:
    """Write the place of the largest of each row, of equal ones the first, into ``index``, int64; ``scores`` are used up.

    ``argmax`` along rows takes three times as long on a CPU: where a part leaves rows of its table free, the largest is
    sought by places in the order of what is left from each on.
    """
    count = scores.shape[1]
    if spare.numel() < len(scores) + count:
        torch.argmax(scores, 1, out=index)
        return
    left, first = spare[0], spare[1:].view(-1)[: len(scores), None]
    torch.amax(scores, 1, keepdim=True, out=first)
    torch.eq(scores, first, out=scores).mul_(torch.arange(count, 0, -1, out=left))
    torch.amax(scores, 1, keepdim=True, out=first)
    index.copy_(first.neg_().add_(count).clamp_(max=count - 1)[:, 0])


def _stochastic(points: Tensor, index: Tensor, grid: Grid, generator: torch.Generator) -> Tensor:
    """Return ``index``, or a neighbour of it in the direction of the remainder, with odds that keep the mean.

    With ``r`` the remainder and ``b`` the way to the neighbour, the odds are ``r.r / r.b``: along
    ``r`` the mean of what is stored is the value. Of all grid points the neighbour is that whose
    direction is nearest to ``r``.
    """
    near = torch.index_select(grid.points, 0, index)
    remainder = points - near
    from_near = near.mul_(remainder).sum(dim=1)
    neighbour = _nearest_direction(remainder, from_near, index, grid)
    way = torch.index_select(grid.points, 0, neighbour).mul_(remainder).sum(dim=1).sub_(from_near)
    squares = remainder.square_()
    odds = squares[:, 0].clone()
    for element in range(1, squares.shape[1]):  # in this order everywhere: squares are not exact
        odds += squares[:, element]
    odds.div_(way.clamp_min_(1e-6))
    drawn = uniform(odds.shape, generator, odds.device)
    return torch.where(drawn < odds, neighbour, index)


def _nearest_direction(remainder: Tensor, from_near: Tensor, index: Tensor, grid: Grid) -> Tensor:
    """Return the points, as int32, that lie from those of ``index`` most nearly where the remainders point to."""
    scores, rows = _table(remainder, grid), _table(remainder, grid)
    neighbour = remainder.new_empty(len(remainder), dtype=torch.int64)
    for part in _parts(remainder, grid):
        count = part.stop - part.start
        along = torch.mm(remainder[part], grid.points.mT, out=scores[:count]).sub_(from_near[part, None])
        along.mul_(torch.index_select(grid.closeness, 0, index[part], out=rows[:count]))
        _first_of_largest_(along, scores[count:], neighbour[part])
    return neighbour.to(torch.int32)


def odd_ones(numbers: Tensor) -> Tensor:
    """Return 1 for each of ``numbers``, integers of 8 bits, that has an odd number of ones, else 0."""
    parity = numbers ^ (numbers >> 4)
    parity ^= parity >> 2
    parity ^= parity >> 1
    return parity.bitwise_and_(1)


def _sign_factors(signs: Tensor) -> Tensor:
    """Return -1 or 1 for each bit of ``signs``, fp32 ``(blocks, 32, 8)``."""
    shifts = torch.arange(_SIGN_GROUP, device=signs.device, dtype=torch.int32)
    return (signs[:, :, None] >> shifts).bitwise_and_(1).float().mul_(-2).add_(1)
