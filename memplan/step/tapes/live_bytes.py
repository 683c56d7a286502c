"""Storages that something refers to, counted, and their bytes."""

from collections.abc import Iterable, Sequence

from memplan.step.tapes.linear_forms import NOTHING, ZERO, Coefficients, Form, Part, Quantity, Storage
from memplan.step.tapes.taped_operations import Reduction


class LiveBytes:
    """The bytes alive at a moment, while operations allocate storages and let go of them.

    Args:
        storages: Those of a tape; an index stands for each.

    Attributes:
        grown, shrunk: Whether something has come, or gone, since the moment that was noted last.
    """

    __slots__ = ("_coefficients", "_references", "_snapshots", "grown", "shrunk", "storages")

    def __init__(self, storages: Iterable[Storage]) -> None:
        self.storages = list(storages)
        self._references: dict[int, int] = {}
        self._coefficients = [[*NOTHING] for _ in ZERO.parts]
        self._snapshots: list[Coefficients | None] = [*ZERO.parts]  # None where it has changed since
        self.noted()

    def noted(self) -> None:
        """Take what is alive now as noted."""
        self.grown = self.shrunk = False

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
        if coefficient > 0:
            self.grown = True
        elif coefficient < 0:
            self.shrunk = True

    def new(self, part: Part, quantity: Quantity, coefficient: int) -> int:
        """Allocate a storage and return its index."""
        self.storages.append((part, quantity, coefficient))
        self.retain(len(self.storages) - 1)
        return len(self.storages) - 1

    def set_aside(self, storage: int) -> int:
        """Give a storage another index, under which all refer to it, and return that."""
        self.storages.append(self.storages[storage])
        self._references[len(self.storages) - 1] = self._references.pop(storage)
        return len(self.storages) - 1

    def retain(self, storage: int) -> None:
        """Refer to a storage once more; the first time allocates it."""
        if count := self._references.get(storage):
            self._references[storage] = count + 1
            return
        self._references[storage] = 1
        self.add(*self.storages[storage])

    def release(self, storage: int) -> None:
        """Refer to a storage once less; the last time frees it."""
        count = self._references[storage] - 1
        self._references[storage] = count
        if count == 0:
            part, quantity, coefficient = self.storages[storage]
            self.add(part, quantity, -coefficient)

    def retain_all(self, storages: Iterable[int]) -> None:
        """Refer to each of several storages once more."""
        references = self._references
        for storage in storages:
            if count := references.get(storage):
                references[storage] = count + 1
            else:
                self.retain(storage)

    def release_all(self, storages: Iterable[int]) -> None:
        """Refer to each of several storages once less."""
        references = self._references
        for storage in storages:
            if (count := references[storage]) > 1:
                references[storage] = count - 1
            else:
                self.release(storage)

    def take(self, storages: Sequence[Storage]) -> Sequence[Storage]:
        """Allocate what an operation takes for itself; return what :meth:`give_back` takes."""
        for part, quantity, coefficient in storages:
            self.add(part, quantity, coefficient)
        return storages

    def give_back(self, taken: Sequence[Storage]) -> None:
        """Free what an operation has taken for itself."""
        for part, quantity, coefficient in taken:
            self.add(part, quantity, -coefficient)

    def arrive(self, part: Part, quantity: Quantity, coefficient: int) -> int:
        """Count a storage that another part of the model has allocated; return its index."""
        return self.new(part, quantity, coefficient)

    def reduce(self, reduces: Reduction) -> None:
        """Note partial sums, which are counted with the moment (:class:`memplan.step.tapes.moments.Instant`)."""

    def keep(self, name: str, storage: int) -> None:
        """Note that a weight's gradient stays in a storage."""

    def hand_on(self, _: str, storage: int) -> None:
        """Let go of a weight's gradient, which others are added to."""
        self.release(storage)

    def multiply(self, *, with_bias: bool = False) -> None:
        """Note that a product of matrices has its result."""

    def is_shared(self, storage: int) -> bool:
        """Whether a storage is referred to more than once."""
        return self._references[storage] > 1
