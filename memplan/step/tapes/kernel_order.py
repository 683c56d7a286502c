"""Kernels of one compiled program, in the order that Inductor chooses for them.

A program is a graph of kernels. Inductor puts them into several orders, estimates what each has alive at its fullest, and takes
the first of those that need least; which one that is depends on the sizes.

Source:
    torch/_inductor/memory.py (v2.13.0): ``reorder_for_peak_memory`` and the orders that it tries.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

Order = tuple[int, ...]
"""Kernels of a program by their numbers, as they run."""


class Schedule(NamedTuple):
    """Kernels as they run, and memory that stays between two of them for the second."""

    order: Order
    taken: tuple[tuple[str, str], ...] = ()  # A tensor, and the one before it whose memory it takes


class Kernel(NamedTuple):
    """One kernel of a program."""

    name: str
    reads: tuple[str, ...]  # Tensors that it is given, weights aside
    makes: tuple[str, ...]  # Tensors that it writes
    over: str = ""  # The tensor that it reads last and whose memory the first of these takes
    inside: tuple[str, ...] = ()  # What is allocated while it runs and gone behind it
    library: bool = False  # Whether it is an operator of torch, which allocates what it makes
    view: bool = False  # Whether it makes a view alone, which Inductor counts as though it had bytes


class Program(NamedTuple):
    """Kernels in the order of the graph that was lowered, and what outlives them."""

    kernels: tuple[Kernel, ...]
    given: tuple[str, ...]  # Tensors that are there before, and that the program may let go of
    stays: frozenset[str]  # Tensors that are there behind it: what it returns

    def users(self) -> dict[str, list[int]]:
        """Return, for each tensor, the kernels that read it."""
        result: dict[str, list[int]] = {}
        for number, kernel in enumerate(self.kernels):
            for name in dict.fromkeys(kernel.reads):
                result.setdefault(name, []).append(number)
        return result


class _Graph:
    """A program with the sizes of its tensors."""

    def __init__(self, program: Program, sizes: Mapping[str, int]) -> None:
        self.program, self.sizes, self.users = program, sizes, program.users()
        made = {name: number for number, kernel in enumerate(program.kernels) for name in kernel.makes}
        self.made = made
        self.before = [sorted({made[name] for name in kernel.reads if name in made}) for kernel in program.kernels]
        self.takes = [sum(sizes[name] for name in kernel.makes) for kernel in program.kernels]
        self.freeable = {*program.given, *made}

    def depth_first(self, numbers: Iterable[int], key: Mapping[int, tuple[int, ...]]) -> Order:
        """Return the kernels so that each comes right behind what it reads, visited by ``key``."""
        order: dict[int, None] = {}

        def visit(number: int) -> None:
            if number not in order:
                for other in sorted(self.before[number], key=key.__getitem__):
                    visit(other)
                order[number] = None

        for number in numbers:
            visit(number)
        return tuple(order)

    def ends(self, order: Sequence[int]) -> list[list[str]]:
        """Return what nothing needs behind each kernel of an order."""
        place = {number: step for step, number in enumerate(order)}
        result: list[list[str]] = [[] for _ in order]
        for name in (*self.program.given, *(name for n in order for name in self.program.kernels[n].makes)):
            if name not in self.program.stays:
                last = max((place[number] for number in self.users.get(name, ())), default=-1)
                result[place[self.made[name]] if last < 0 else last].append(name)
        return result

    def timeline(self, order: Sequence[int]) -> list[int]:
        """Return what is alive while each kernel of an order runs, as Inductor estimates it."""
        live, result = sum(self.sizes[name] for name in self.program.given), []
        for number, ends in zip(order, self.ends(order), strict=True):
            live += self.takes[number]
            result.append(live)
            live -= sum(self.sizes[name] for name in ends)
        return result

    def estimate(self, order: Sequence[int]) -> int:
        """Return the most that an order has alive, as Inductor estimates it."""
        return max(sum(self.sizes[name] for name in self.program.given), *self.timeline(order))

    def taken(self, order: Order, keys: Mapping[str, str]) -> Iterator[tuple[str, str]]:
        """Yield the tensors that take memory which was let go of before, with what had it.

        The latest of the same dtype and size is taken, if the kernel before let go of it, or what stays between does not raise
        the most that was estimated.
        """
        free: dict[tuple[str, int], list[tuple[int, str]]] = {}
        alive, ends, most = self.timeline(order), self.ends(order), self.estimate(order)
        for step, number in enumerate(order):
            kernel = self.program.kernels[number]
            over = kernel.over if kernel.over in ends[step] else ""
            for made in () if kernel.library else kernel.makes[bool(over) :]:
                pool = free.get((keys[made], self.sizes[made]), [])
                if not pool:
                    continue
                since, name = pool[-1]
                between = range(since + 1, step)
                if not between or self.sizes[made] + max(alive[i] for i in between) <= most:
                    pool.pop()
                    for i in between:
                        alive[i] += self.sizes[made]
                    yield made, name
            for name in (name for name in ends[step] if name in self.made and name != over):
                if self.program.kernels[self.made[name]].view:
                    continue
                free.setdefault((keys[name], self.sizes[name]), []).append((step, name))

    def least_first(self) -> Order:
        """Return the order that at each step takes what raises the most least, and then what leaves least."""
        stays, kernels = self.program.stays, self.program.kernels
        waiting = [len(before) for before in self.before]
        uses = {name: len(self.users.get(name, ())) + (name in stays) for name in self.freeable}
        live = sum(self.sizes[name] for name in self.program.given)
        most = max(live, sum(self.sizes[name] for name in stays if name in self.freeable))
        ready, order = {number for number, count in enumerate(waiting) if not count}, []

        def left(number: int) -> int:
            kernel = kernels[number]
            frees = {name for name in kernel.reads if name in self.freeable and uses[name] == 1}
            frees |= {name for name in kernel.makes if not uses[name]}
            return self.takes[number] - sum(self.sizes[name] for name in frees)

        after = self._after()
        while ready:
            gap = most - live
            number = min(ready, key=lambda n: (self.takes[n] if self.takes[n] > gap else 0, left(n), n))
            ready.remove(number)
            order.append(number)
            most = max(most, live + self.takes[number])
            live += left(number)
            for name in {name for name in kernels[number].reads if name in self.freeable}:
                uses[name] -= 1
            for other in after[number]:
                waiting[other] -= 1
                if not waiting[other]:
                    ready.add(other)
        return tuple(order)

    def earliest_first(self) -> Order:
        """Return the order that takes first what was ready first."""
        waiting, after = [len(before) for before in self.before], self._after()
        place: dict[int, int] = {}
        ready: list[tuple[list[int], int]] = [([], number) for number, count in enumerate(waiting) if not count]
        heapq.heapify(ready)
        while ready:
            _, number = heapq.heappop(ready)
            place[number] = len(place)
            for other in after[number]:
                waiting[other] -= 1
                if not waiting[other]:
                    heapq.heappush(ready, (sorted(place[n] for n in self.before[other]), other))
        return tuple(place)

    def smallest_first(self) -> Order:
        """Return the order that comes to kernels by the bytes that they read and write."""
        key = {
            number: (self.takes[number] + sum(self.sizes[name] for name in {*kernel.reads} & self.freeable), number)
            for number, kernel in enumerate(self.program.kernels)
        }
        return self.depth_first(sorted(key, key=key.__getitem__), key)

    def _after(self) -> list[list[int]]:
        after: list[list[int]] = [[] for _ in self.before]
        for number, before in enumerate(self.before):
            for other in before:
                after[other].append(number)
        return after


def schedule(program: Program, sizes: Mapping[str, int], keys: Mapping[str, str]) -> Schedule:
    """Return the order in which Inductor lets the kernels of a program run, and which of their tensors take memory of others.

    Args:
        sizes: Bytes of each tensor.
        keys: Its dtype.

    Source:
        ``AllocateLine.should_reuse_buffer`` in torch/_inductor/codegen/wrapper.py (v2.13.0).
    """
    graph = _Graph(program, sizes)
    numbers = range(len(program.kernels))
    orders = (
        graph.depth_first(numbers, {number: (number,) for number in numbers}),
        graph.least_first(),
        graph.earliest_first(),
        graph.smallest_first(),
    )
    order = min(orders, key=graph.estimate)
    return Schedule(order, tuple(graph.taken(order, keys)))
