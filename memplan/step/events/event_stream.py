"""Allocations and frees in order, put together from the parts of a step."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter

from memplan.step.playing.section_events import SectionEvents
from memplan.step.tapes.event_recorder import CUBLAS_AND_LT, NO_STORAGE, Codes, Places, UsedUp
from memplan.step.tapes.linear_forms import Quantity
from memplan.units import MIB

Libraries = dict[str, int]
"""Libraries that have made no workspace yet in a thread, and the bytes of one."""

CUBLASLT_WORKSPACE_BYTES = MIB
"""Workspace of cuBLASLt, one for each thread that runs it: seen in the memory history of an H200 (torch 2.11)."""

UseUp = Callable[[str, int], None]
"""Writes the events of the update of the weight of a name from the gradient in a storage, which it lets go."""


def libraries_of(library_bytes: int) -> Mapping[str, Libraries]:
    """Return the libraries whose workspaces forward and backward make, given the bytes of a cuBLAS workspace; 0 for none."""
    libraries = dict(zip(CUBLAS_AND_LT, (library_bytes, CUBLASLT_WORKSPACE_BYTES), strict=True))
    return {thread: dict(libraries) if library_bytes else {} for thread in ("forward", "backward")}


def _none(name: str, gradient: int) -> None:
    """Stand for updates where no gradient is used up."""
    raise AssertionError(name, gradient)


@dataclass(slots=True, eq=False)
class EventStream:
    """A stream that grows."""

    sizes: list[int] = field(default_factory=list)  # Bytes of each storage; its index is its name
    codes: list[int] = field(default_factory=list)  # ``2 * storage`` allocates a storage, ``2 * storage + 1`` frees it
    libraries: set[int] = field(default_factory=set)  # Storages that are workspaces of libraries
    # What storages are of, from the one given on, unless a section has made them.
    components: list[tuple[int, str]] = field(default_factory=list)
    # The first storage of each section that was played, and its events, which tell the part of each.
    sections: list[tuple[int, SectionEvents]] = field(default_factory=list)
    # What the step does, from the place among codes that is given on.
    phases: list[tuple[int, str]] = field(default_factory=list)
    streams: dict[int, int] = field(default_factory=dict)  # Storages of other CUDA streams than that which computes
    cleared: int = 0  # Place among codes where what is cached is given back to the driver; 0 for none

    def of(self, component: str) -> None:
        """Say what the next storages are of."""
        self.components.append((len(self.sizes), component))

    def begin(self, phase: str) -> None:
        """Say what the step does from here on."""
        self.phases.append((len(self.codes), phase))

    def allocate(self, size: int, stream: int = 0) -> int:
        """Allocate so many bytes, on a CUDA stream; return the storage's name."""
        if stream:
            self.streams[len(self.sizes)] = stream
        self.sizes.append(size)
        self.codes.append(2 * len(self.sizes) - 2)
        return len(self.sizes) - 1

    def allocate_all(self, sizes: Iterable[int]) -> list[int]:
        """Allocate several storages, in order."""
        first = len(self.sizes)
        self.sizes += sizes
        names = range(first, len(self.sizes))
        self.codes += [2 * name for name in names]
        return [*names]

    def free(self, storage: int) -> None:
        """Free a storage."""
        self.codes.append(2 * storage + 1)

    def free_all(self, storages: Iterable[int]) -> None:
        """Free several storages."""
        self.codes += [2 * storage + 1 for storage in storages]

    def make_workspace(self, libraries: Libraries, library: str) -> None:
        """Allocate the workspace that a library has from its first product in a thread on, if it has none."""
        if library in libraries:
            self.libraries.add(self.allocate(libraries.pop(library)))

    def repeat(self, sizes: Sequence[int], codes: Sequence[int]) -> None:
        """Write events that allocate and free these sizes, whose names begin with 0 in the codes."""
        base = 2 * len(self.sizes)
        self.sizes += sizes
        self.codes += [code + base for code in codes]

    def passing(self, *sizes: int) -> None:
        """Allocate storages one after the other, then free them, the last first."""
        self.free_all(reversed(self.allocate_all(sizes)))


@dataclass(frozen=True, slots=True)
class RunEvents:
    """A training run from the first weight on."""

    sizes: Sequence[int]  # Bytes of each storage
    codes: Sequence[int]  # ``2 * storage`` allocates a storage, ``2 * storage + 1`` frees it
    libraries: frozenset[int]  # Storages that are workspaces of libraries
    steps: tuple[int, ...]  # Place of the first event of each step
    # For each step, where every micro-step but its first begins and the last ends: the place of the event, and the
    # number of storages by then.
    passes: tuple[tuple[tuple[int, int], ...], ...]
    stream: EventStream  # What they were written to, which tells what each storage is of, and what the step does when

    @property
    def steady_from(self) -> int:
        """Place of the first event of the last step."""
        return self.steps[-1]


class PlayedSection:
    """One run of a part of the model within a stream.

    Args:
        sizes: Bytes of each of its storages.
        owned: Whether the part before keeps that for itself, so that it is not to be freed here.
    """

    __slots__ = ("_aliases", "_base", "_before", "_events", "_given", "_left", "_stream", "visited")

    def __init__(
        self, stream: EventStream, events: SectionEvents, sizes: Sequence[int], entry: int, owned: bool = False
    ) -> None:
        self._stream, self._events, self._base = stream, events, len(stream.sizes)
        stream.sizes.extend(sizes)
        stream.sections.append((self._base, events))
        self._aliases = {events.entry: NO_STORAGE if owned else entry}
        self._given: dict[int, Sequence[int]] = {}
        self._before: dict[int, Sequence[int]] = {}
        self._left = False  # Whether its region of autocast has ended
        self.visited: Callable[[str, str], None] | None = None  # Writes what comes as a module begins or ends

    def is_given(self, storage: int, others: Sequence[int]) -> None:
        """Stand a storage of the part's own for others of the stream, which are there already and which it frees."""
        self._given[storage] = others

    def frees_instead(self, storage: int, other: int, *before: int) -> None:
        """Free another storage of the stream, and some before it, where the part frees one of its own, which stays."""
        self._aliases[storage], self._before[storage] = other, before

    def own_name(self, storage: int) -> int:
        """Return what a storage that the part allocates is called in the stream."""
        return storage + self._base

    @property
    def output(self) -> int:
        """The storage that the part hands on."""
        return self.name(self._events.output)

    @property
    def output_owned(self) -> bool:
        """Whether the part keeps what it hands on for its own backward, and frees it then."""
        return self._events.keeps_output

    @property
    def gradient_storages(self) -> dict[str, int]:
        """The weights whose gradients stay, by name, and their storages."""
        return {name: self.name(storage) for name, storage in self._events.gradient_storages}

    @property
    def escaped(self) -> list[int]:
        """What the graph of the loss holds of it."""
        return [own for own in map(self.name, self._events.escaped) if own != NO_STORAGE]

    @property
    def leaf(self) -> list[int]:
        """The gradient of a leaf within the part, and the leaf; nothing where there is none."""
        return [self.name(storage) for storage in self._events.leaf]

    @property
    def cached(self) -> list[int]:
        """Keys and values that the model returns."""
        return [self.own_name(storage) for storage in self._events.cached]

    @property
    def named(self) -> list[tuple[Quantity, int]]:
        """What the model has names for until all layers have run, by quantity."""
        return [(quantity, self.own_name(storage)) for quantity, storage in self._events.named]

    def returns(
        self,
        libraries: Libraries,
        before: int,
        behind_product: Callable[[], None] | None = None,
        leave_region: Callable[[], None] | None = None,
    ) -> int:
        """Write the events of forward, whose function returns another result besides the output; return that, which stays, or ``NO_STORAGE``.

        Args:
            before: What the function of the part before has returned, which goes now; ``NO_STORAGE`` for nothing.
            behind_product: Writes what comes behind the first product.
            leave_region: Writes what comes where a region of autocast ends within.
        """
        own = self._events.returned
        if own == NO_STORAGE:
            self._stream.free_all([] if before == NO_STORAGE else [before])
            self.forward(libraries, behind_product, leave_region)
            return NO_STORAGE
        self.frees_instead(own, before)
        self.forward(libraries, behind_product, leave_region)
        del self._aliases[own]
        return self.own_name(own)

    def forward(
        self,
        libraries: Libraries,
        behind_product: Callable[[], None] | None = None,
        leave_region: Callable[[], None] | None = None,
    ) -> None:
        """Write the events of forward, and the workspaces that libraries make at their first product."""
        more = self._visits(0) + ([(self._first_product(0), behind_product)] if behind_product else [])
        more += [(place, leave_region) for place in self._events.left if leave_region]
        self._with_libraries(self._events.forward, self._events.products[0], libraries, more=more)

    def _visits(self, way: int) -> list[tuple[int, Callable[[], None]]]:
        """Return what is written where modules begin and end, in forward (0) or in backward (1)."""
        visited = self.visited
        return [(place, partial(visited, kind, name)) for place, kind, name in self._events.visits[way] if visited]

    def _first_product(self, way: int) -> int:
        """Return the place of the first product in forward (0), or in backward (1)."""
        return min((place for _, place in self._events.products[way]), default=0)

    def region_end(self) -> None:
        """Write the events at the end of the whole forward, once."""
        if not self._left:
            self._write(self._events.region_end)
        self._left = True

    @property
    def leaving(self) -> int:
        """The gradient of what the part was given, or ``NO_STORAGE``."""
        own = self._events.leaving
        return NO_STORAGE if own == NO_STORAGE else self.name(own)

    def backward(
        self,
        arriving: int,
        libraries: Libraries,
        use_up: UseUp,
        at_product: Callable[[], None] | None = None,
        sum_up: UseUp | None = None,
    ) -> None:
        """Write the events of backward, of updates within it, and of workspaces that libraries make.

        Args:
            arriving: The storage of the gradient of what the part hands on.
            libraries: Those that have made none in this thread.
            use_up: Writes the events of an update inside backward.
            at_product: Writes what comes before the first product.
            sum_up: Writes how a gradient that others add up is added, as soon as it is formed.
        """
        events = self._events
        if events.waits:
            self._aliases.pop(events.entry)
        if events.arriving != NO_STORAGE:
            self._aliases[events.arriving] = arriving
        at = [(max(self._first_product(1) - 1, 0), at_product)] if at_product else []  # before its result
        sums = [(place, partial(sum_up, name, self.name(own))) for place, name, own in events.summed if sum_up]
        more = self._visits(1) + at + sums
        self._with_libraries(events.backward, events.products[1], libraries, events.used_up, use_up, more)

    def _with_libraries(
        self,
        codes: Codes,
        places: Places,
        libraries: Libraries,
        used_up: UsedUp = (),
        use_up: UseUp = _none,
        more: Sequence[tuple[int, Callable[[], None]]] = (),
    ) -> None:
        """Write events with what comes between them: workspaces of libraries, updates, and more."""
        between: list[tuple[int, Callable[[], None]]] = [
            (place, partial(self._stream.make_workspace, libraries, library))
            for library, place in places
            if library in libraries
        ]
        between += [(place, partial(use_up, name, self.name(storage))) for place, name, storage in used_up]
        between += more
        start = 0
        for place, write in sorted(between, key=itemgetter(0)):
            self._write(codes[start:place])
            start = place
            write()
        self._write(codes[start:])

    def name(self, storage: int) -> int:
        """Return what a storage of the part is called in the stream."""
        return self._aliases.get(storage, storage + self._base)

    def _write(self, codes: Codes) -> None:
        """Write events under the names that storages have in the stream."""
        base, written = 2 * self._base, self._stream.codes
        for own, others in self._given.items():
            if 2 * own in codes:
                codes = tuple([code for code in codes if code != 2 * own])
            if 2 * own + 1 in codes:
                place = codes.index(2 * own + 1)
                self._write(codes[:place])
                self._stream.free_all(others)
                codes = codes[place + 1 :]
        start = len(written)
        written += [code + base for code in codes]
        freed = {2 * own + 1: (*self._before.get(own, ()), name) for own, name in self._aliases.items()}
        places = {codes.index(code): names for code, names in freed.items() if code in codes}
        for place in sorted(places, reverse=True):
            names = [name for name in places[place] if name != NO_STORAGE]
            written[start + place : start + place + 1] = [2 * name + 1 for name in names]


class SectionPlayer:
    """Plays parts of a model within a stream; sizes are formed once for parts that are alike.

    Args:
        values: Values of the quantities that sizes are made of.
    """

    def __init__(self, stream: EventStream, values: Sequence[int]) -> None:
        self._stream, self.values = stream, values
        self._sizes: dict[int, tuple[SectionEvents, list[int]]] = {}

    def section(self, events: SectionEvents, entry: int, owned: bool = False) -> PlayedSection:
        """Return a run of a part that is about to begin; takes what :class:`PlayedSection` does."""
        if id(events) not in self._sizes:
            self._sizes[id(events)] = events, events.sizes(self.values)
        return PlayedSection(self._stream, events, self._sizes[id(events)][1], entry, owned)


def leave_region(parts: Iterable[PlayedSection]) -> None:
    """Write the end of a region of autocast that parts have run in."""
    for part in parts:
        part.region_end()
