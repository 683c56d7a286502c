"""Storages that something refers to, counted, and their bytes."""

from __future__ import annotations

from collections.abc import Iterable

from memplan.step.tapes.linear_forms import NOTHING, Coefficients, Form, Part, Quantity

Storage = tuple[Part, Quantity, int]
"""What a storage counts as, what its bytes are proportional to, and how many there are for each unit of that."""


class LiveBytes:
    """The bytes alive at a moment, while operations allocate storages and let go of them.

    Args:
        storages: Those of a tape; an index stands for each.
    """

    __slots__ = ("_coefficients", "_references", "_snapshots", "storages")

    def __init__(self, storages: Iterable[Storage]) -> None:
        self.storages = list(storages)
        self._references: dict[int, int] = {}
        self._coefficients = [[0] * len(Quantity) for _ in Part]
        self._snapshots: list[Coefficients | None] = [NOTHING] * len(Part)  # None where it has changed since

    def form(self) -> Form:
        """Return the bytes alive now."""
        parts = self._snapshots
        for part, seen in enumerate(parts):
            if seen is None:
                own = self._coefficients[part]
                parts[part] = tuple(own) if any(own) else NOTHING
        return Form(tuple(parts))  # type: ignore[arg-type]

    def add(self, part: Part, quantity: Quantity, coefficient: int) -> None:
        """Count bytes that are no storage."""
        self._coefficients[part][quantity] += coefficient
        self._snapshots[part] = None

    def new(self, part: Part, quantity: Quantity, coefficient: int) -> int:
        """Allocate a storage and return its index."""
        self.storages.append((part, quantity, coefficient))
        self.retain(len(self.storages) - 1)
        return len(self.storages) - 1

    def retain(self, storage: int) -> None:
        """Refer to a storage once more; the first time allocates it."""
        count = self._references.get(storage, 0)
        if count == 0:
            part, quantity, coefficient = self.storages[storage]
            self._coefficients[part][quantity] += coefficient
            self._snapshots[part] = None
        self._references[storage] = count + 1

    def release(self, storage: int) -> None:
        """Refer to a storage once less; the last time frees it."""
        count = self._references[storage] - 1
        self._references[storage] = count
        if count == 0:
            part, quantity, coefficient = self.storages[storage]
            self._coefficients[part][quantity] -= coefficient
            self._snapshots[part] = None

    def retain_all(self, storages: Iterable[int]) -> None:
        """Refer to each of several storages once more."""
        for storage in storages:
            self.retain(storage)

    def release_all(self, storages: Iterable[int]) -> None:
        """Refer to each of several storages once less."""
        for storage in storages:
            self.release(storage)

    def is_shared(self, storage: int) -> bool:
        """Whether a storage is referred to more than once."""
        return self._references[storage] > 1
