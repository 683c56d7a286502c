"""When storages are allocated and freed while a tape is played, in order."""

from collections.abc import Iterable, Sequence

from memplan.step.tapes.linear_forms import ZERO, Form, Part, Quantity, Storage
from memplan.step.tapes.taped_operations import Mode, Reduction, Weight

Codes = tuple[int, ...]
"""Events: ``2 * storage`` allocates a storage, ``2 * storage + 1`` frees it."""

Places = tuple[tuple[str, int], ...]
"""A library, and the place among events after which its first product has its result; in the order of places."""

UsedUp = tuple[tuple[int, str, int], ...]
"""The place among events where a weight is updated inside backward, its name, and the storage of its gradient."""

NO_STORAGE = -1
"""Stands for a tensor that a part does not have."""

CUBLAS_AND_LT = ("cublas", "cublasLt")
"""Libraries that hold a workspace for each thread from their first product on."""


class EventRecorder:
    """Writes down when storages are allocated and freed, where ``LiveBytes`` counts.

    Args:
        entry: One that is there before.
        output: One that is handed on when forward ends.
        received: Whether others hold what arrives as well, so that it stays.
    """

    __slots__ = (
        "_arrived",
        "_entry",
        "_output",
        "_products",
        "_received",
        "_references",
        "_sums",
        "_updates",
        "codes",
        "gradient_storages",
        "keeps_output",
        "storages",
    )

    grown = shrunk = False  # no bytes are counted

    def __init__(self, storages: Iterable[Storage], entry: int, output: int, *, received: bool = False) -> None:
        self.storages: list[Storage | Reduction] = list(storages)
        self.codes: list[int] = []
        self._references: dict[int, int] = {}
        self.gradient_storages: dict[str, int] = {}
        self._products: dict[str, int] = {}
        self._updates: list[tuple[int, str, int]] = []
        self._sums: list[tuple[int, str, int]] = []
        self.keeps_output = True
        self._output = output
        self._entry = entry
        self._received, self._arrived = received, NO_STORAGE

    def noted(self) -> None:
        """Note no moment: no bytes are counted."""

    def form(self) -> Form:
        """Return nothing: no bytes are counted."""
        return ZERO

    def new(self, part: Part, quantity: Quantity, coefficient: int) -> int:
        """Allocate a storage and return its index."""
        self.storages.append((part, quantity, coefficient))
        self.retain(len(self.storages) - 1)
        return len(self.storages) - 1

    def set_aside(self, storage: int) -> int:
        """Give a storage another index, under which all refer to it, and return that; events before have the first one."""
        self.storages.append(self.storages[storage])
        self._references[len(self.storages) - 1] = self._references.pop(storage)
        return len(self.storages) - 1

    def retain(self, storage: int) -> None:
        """Refer to a storage once more; the first time allocates it."""
        count = self._references.get(storage, 0)
        if count == 0 and storage != self._entry:
            self.codes.append(2 * storage)
        elif count == 0:
            self._entry = NO_STORAGE  # it is there already, and new memory another time
        self._references[storage] = count + 1

    def release(self, storage: int) -> None:
        """Refer to a storage once less; the last time frees it, or hands it on."""
        count = self._references[storage] - 1
        self._references[storage] = count
        if count == 0:
            if storage == self._output:
                self.keeps_output = False
            else:
                self.codes.append(2 * storage + 1)

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

    def take(self, storages: Sequence[Storage]) -> Sequence[Storage]:
        """Allocate what an operation takes for itself; return what :meth:`give_back` takes."""
        return [(part, quantity, self.new(part, quantity, size)) for part, quantity, size in storages if size > 0]

    def give_back(self, taken: Sequence[Storage]) -> None:
        """Free what an operation has taken for itself, the last first."""
        for _, _, storage in reversed(taken):
            self.release(storage)

    def reduce(self, reduces: Reduction) -> None:
        """Allocate and free the partial sums of a sum over rows."""
        self.storages.append(reduces)
        self.codes += (2 * len(self.storages) - 2, 2 * len(self.storages) - 1)

    def arrive(self, part: Part, quantity: Quantity, coefficient: int) -> int:
        """Return a storage that another part has allocated."""
        self.storages.append((part, quantity, coefficient))
        self._arrived = len(self.storages) - 1 if self._received else NO_STORAGE
        self._references[len(self.storages) - 1] = 1 + self._received
        return len(self.storages) - 1

    def keep(self, name: str, storage: int) -> None:
        """Note that a weight's gradient stays in a storage."""
        self.gradient_storages[name] = storage

    def hand_on(self, name: str, storage: int) -> None:
        """Leave a weight's gradient to be added up by others."""
        self.gradient_storages[name] = storage

    def store(self, weight: Weight, mode: Mode, formed: int) -> None:
        """Store, add or leave to be used up a weight's gradient, which has just been formed.

        Autograd casts the gradient of autocast's copy to the weight's dtype first, and copies one whose rows lie apart.

        Args:
            mode: What becomes of its gradient.
        """
        if weight.summed:
            self._sums.append((len(self.codes), weight.name, formed))
            self.hand_on(weight.name, formed)
            return
        gradient, size = formed, weight.formed_bytes
        if weight.is_made_anew(mode):
            gradient, size = self.new(Part.GRADIENTS, Quantity.ONE, weight.own_bytes), weight.own_bytes
            self.release(formed)
        moved = weight.gradient_bytes != size or (weight.converted and not weight.casts_gradient)
        if mode == "layer":
            self._updates.append((len(self.codes), weight.name, gradient))
            self._references[gradient] = 0  # the update lets it go
            return
        if mode == "first":
            stays = self.new(Part.GRADIENTS, Quantity.ONE, weight.gradient_codes_bytes) if moved else gradient
            self.keep(weight.name, stays)
        if moved or mode != "first":
            halves = [weight.add_bytes // 2] * 2 if moved or mode == "again" else []
            self.give_back(self.take([(Part.TEMPORARIES, Quantity.ONE, half) for half in halves]))
            self.release(gradient)

    def multiply(self, *, with_bias: bool = False) -> None:
        """Note that a product of matrices has its result; cuBLASLt runs those that add a bias, cuBLAS all."""
        for library in CUBLAS_AND_LT if with_bias else CUBLAS_AND_LT[:1]:
            self._products.setdefault(library, len(self.codes))

    def cut(self) -> tuple[Codes, Places]:
        """Return the events since the last cut, and the place of each library's first product."""
        result = tuple(self.codes), tuple(self._products.items())
        self.codes, self._products = [], {}
        return result

    def used_up(self) -> UsedUp:
        """Return the gradients that updates use up as soon as they are formed."""
        return tuple(self._updates)

    def summed(self) -> UsedUp:
        """Return the gradients that others add up, and the places where they are formed."""
        return tuple(self._sums)

    def end_of_forward(self) -> None:
        """From now on the output is a storage like others."""
        self._output = NO_STORAGE

    def rest(self, others: Iterable[int]) -> Codes:
        """Return events that free what is still there, but for ``others``, and for what others hold."""
        left = {storage for storage, count in self._references.items() if count > (storage == self._arrived)}
        return tuple(2 * storage + 1 for storage in sorted(left.difference(others)))
