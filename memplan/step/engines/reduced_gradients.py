"""DeepSpeed's buckets over one backward: what they and the gradients that have left them take as each gradient arrives.

A gradient is copied into the bucket and let go of. One that finds no room has the bucket reduced first: its pieces are
copied into a tensor of their own, unless all of them belong to one rank, and a rank copies the gradients of its own
parameters, each of them whole, into a buffer that is made with the first of them. A gradient larger than the bucket waits
beside it for the next one, as a copy of itself where gradients go to host memory; under ZeRO 1 the ranks that do not own it
keep it until the end, and its owners do where it sums up in host memory first. Ranks differ in when their own buffer is made
and how large it is; what is told is the fullest.

Source:
    deepspeed/runtime/zero/stage_1_and_2.py (0.19.8): ``reduce_independent_p_g_buckets_and_remove_grads``,
    ``reduce_ipg_grads``, ``average_tensor``, ``allreduce_and_scatter``, ``copy_grads_in_partition``, ``setup_buckets``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Protocol

from memplan.documents.frozen_values import dataclass
from memplan.step.states.flat_partitions import FlatGroup, Piece, RankShare


@dataclass(frozen=True, slots=True)
class EngineBytes:
    """What is there besides a model's own tensors."""

    communication: int  # Buckets and copies
    gradients: int  # Gradients that are whole, that wait, and a rank's own

    @property
    def bytes(self) -> int:
        """Both."""
        return self.communication + self.gradients


class Gradients(Protocol):
    """What becomes of the gradients of one backward."""

    @property
    def resident(self) -> EngineBytes:
        """What is there between two of them."""

    def arrive(self, name: str, kind: str = "gradient") -> EngineBytes:
        """Take in the gradient of a parameter, or what else is marked; return the most that is there besides it meanwhile."""

    def end(self) -> EngineBytes:
        """Take in what is left; return the most that is there meanwhile."""


class WholeGradients:
    """Gradients that stay whole, as under ZeRO 1 until the last micro-step has run backward.

    Args:
        sizes: Bytes of the gradient of each parameter.
        bucket_bytes: Buckets, which are made with the first.
        again: Whether gradients, and the buckets, are there from a micro-step before.
    """

    def __init__(self, sizes: Mapping[str, int], bucket_bytes: int, *, again: bool) -> None:
        self._sizes, self._bucket_bytes, self._again = sizes, bucket_bytes, again
        self.resident = EngineBytes(bucket_bytes, sum(sizes.values())) if again else EngineBytes(0, 0)

    def arrive(self, name: str, kind: str = "gradient") -> EngineBytes:
        """Keep the gradient of a parameter, or add it to the one that is there."""
        del kind
        before = self.resident
        if not self._again:
            self.resident = EngineBytes(self._bucket_bytes, before.gradients + self._sizes[name])
        return EngineBytes(self._bucket_bytes, before.gradients)

    def end(self) -> EngineBytes:
        """Keep what is there."""
        return self.resident


class Buckets:
    """Gradients that leave.

    Args:
        shares: What each rank has of them.
        size: Elements of a bucket.
        width: Bytes of an element.
        copies: Whether pieces are copied before they are reduced.
        lingers: Whether a gradient larger than a bucket stays until the end on ranks that do not own it.
        leaves: Bytes that each element of a rank's piece takes on its way to host memory; None where gradients stay.
    """

    def __init__(
        self,
        groups: Sequence[FlatGroup],
        shares: Sequence[RankShare],
        *,
        size: int,
        count: int,
        width: int,
        lingers: bool,
        copies: bool,
        leaves: int | None = None,
    ) -> None:
        self._pieces: Mapping[str, list[Piece]] = {
            name: group.pieces(place) for group in groups for place, name in enumerate(group.names)
        }
        self._shares, self._lingers, self._copies, self._leaves = shares, lingers, copies, leaves
        self._size, self._width, self._bucket_bytes = size, width, size * width * count
        self._names: list[str] = []
        self._elements = self._waiting = self._whole = self._lingering = 0
        self._before, self._zeros = [0] * len(shares), [0] * len(shares)
        self._own: dict[int, int] = {} if leaves is None else dict.fromkeys(range(len(shares)), 0)
        self.resident = EngineBytes(0, 0)

    def with_own(self) -> Buckets:
        """Return the same where ranks have gradients of micro-steps before, as many as of this one."""
        self._before = [share.gradient_bytes + share.zeros_bytes for share in self._shares]
        self.resident = self._now()
        return self

    def with_whole(self, size: int) -> Buckets:
        """Return the same where whole gradients of so many bytes are there, which leave as they arrive; and the buckets."""
        self._whole = size
        self.resident = EngineBytes(self._bucket_bytes, size)
        return self

    def _now(self, *, buckets: bool = False) -> EngineBytes:
        """Return what is there: on the rank that has the most."""
        resident = zip(range(len(self._shares)), self._before, self._zeros, strict=True)
        own = max(before + zeros + self._own.get(rank, 0) for rank, before, zeros in resident)
        gradients = self._whole + self._waiting + self._lingering + own
        return EngineBytes(self._bucket_bytes if buckets else 0, gradients)

    def arrive(self, name: str, kind: str = "gradient") -> EngineBytes:
        """Take in the gradient of a parameter; return the most that is there besides it meanwhile."""
        del kind
        elements = sum(size for _, size in self._pieces[name])
        most = self._now(buckets=True)
        if self._elements + elements > self._size and self._names:
            most = self._reduce()
        self._names.append(name)
        self._elements += elements
        self._waiting = elements * self._width if elements > self._size else 0
        if self._leaves is not None and self._waiting:  # cloned (``_offload_gradient_safety_enabled``)
            most = max(most, self._now(buckets=True), key=lambda resident: resident.bytes)
        self._whole -= min(self._whole, elements * self._width)
        self.resident = self._now(buckets=True)
        return most

    def end(self) -> EngineBytes:
        """Reduce what is left, and make zeros of what has no gradient; the buckets go."""
        most = self._reduce()
        self._lingering = 0
        self._own = self._own if self._leaves is None else dict.fromkeys(self._own, 0)
        self._zeros = [share.zeros_bytes for share in self._shares]
        self.resident = self._now()
        return max(most, self._now(buckets=True), key=lambda resident: resident.bytes)

    def _reduce(self) -> EngineBytes:
        """Return the most that is there: with a copy of the gradients, or with those that ranks have copied for themselves."""
        copied, before = self._copied(), self._now(buckets=True)
        owners = {rank for name in self._names for rank, _ in self._pieces[name]}
        for rank in owners:
            self._own.setdefault(rank, self._shares[rank].gradient_bytes)
        after = self._now(buckets=True)
        if self._leaves:
            leaving = self._leaves * max((size for name in self._names for size in self._owned(name)), default=0)
            after = EngineBytes(after.communication, after.gradients + leaving)
        if self._leaves == 0:
            for rank in owners:  # until ``_clear_param_grad_only``
                self._own[rank] += self._waiting * (not self._shares[rank].names.isdisjoint(self._names))
        if self._lingers:
            self._lingering += self._waiting
            for rank in owners if self._waiting else ():
                self._own[rank] -= self._waiting
        self._names, self._elements, self._waiting = [], 0, 0
        return max(
            after, EngineBytes(before.communication + copied, before.gradients), key=lambda resident: resident.bytes
        )

    def _owned(self, name: str) -> list[int]:
        """Return the pieces of a parameter that its owners have."""
        return [size for rank, size in self._pieces[name] if name in self._shares[rank].names]

    def _copied(self) -> int:
        """Return the most that is copied at once: pieces are taken together until they fill a bucket."""
        if not self._copies:
            return 0
        parts = parts_of_bucket([self._pieces[name] for name in self._names], self._size)
        return self._width * max(parts, default=0)


def parts_of_bucket(pieces: Sequence[Sequence[Piece]], size: int) -> list[int]:
    """Return the elements of each copy that a bucket is reduced in: pieces are taken together until they fill one; one alone is no copy.

    Args:
        pieces: Of each parameter in the bucket.
        size: Elements of a bucket.
    """
    slices = [piece for own in pieces for piece in own]
    together = [sum(size for _, size in run) for _, run in groupby(slices, key=lambda piece: piece[0])]
    return [sum(part) for part in _filled(together, size) if len(part) > 1]


def _filled(sizes: Sequence[int], most: int) -> Iterator[list[int]]:
    """Yield sizes in lists that each end with the one that exceeds the most."""
    part: list[int] = []
    for size in sizes:
        part.append(size)
        if sum(part) > most:
            yield part
            part = []
    if part:
        yield part
