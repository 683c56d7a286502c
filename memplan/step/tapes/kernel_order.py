"""Kernels of one compiled program, in the order that Inductor chooses for them.

A program is a graph of kernels. Inductor puts them into several orders, estimates what each has alive at its fullest, and takes
the first of those that need least; which one that is depends on the sizes.

Source:
    torch/_inductor/memory.py (v2.13.0): ``reorder_for_peak_memory`` and the orders that it tries.
"""

import heapq
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

Order = tuple[int, ...]
"""Kernels of a program by their numbers, as they run."""


class Schedule(NamedTuple):
    """Kernels as they run, and memory that stays between two of them for the second."""

    order: Order
    taken: tuple[tuple[str, str], ...] = ()  # A tensor, and the one before it whose memory it takes


Kind = Literal["written", "called", "viewed", "part", "joined"]
"""Whether a kernel writes into what it is given, is an operator of torch that returns results or a view, takes one of these, or
stands for what others have written side by side."""


class Kernel(NamedTuple):
    """One node of a program, as Inductor's scheduler has it."""

    name: str
    reads: tuple[str, ...]  # Tensors that it is given, weights aside
    makes: tuple[str, ...]  # Tensors that it writes; of a call those that it returns, of a part the one that it takes
    over: str = ""  # The tensor that it reads last and whose memory the first of these takes
    inside: tuple[str, ...] = ()  # What is allocated while it runs and gone behind it
    fused: tuple[str, ...] = ()  # What is counted as though it wrote it, and never leaves the kernel
    kind: Kind = "written"

    @property
    def results(self) -> str:
        """The name of all that a call returns."""
        return f"({self.makes[0]})"

    @property
    def leaves(self) -> tuple[str, ...]:
        """What kernels behind it read: what it makes, or all that it returns, of which parts are taken."""
        return (self.results,) if self.kind in ("called", "viewed") else self.makes


def called(name: str, reads: str, makes: str, taken: str | None = None, inside: tuple[str, ...] = ()) -> list[Kernel]:
    """Return an operator of torch, and behind it those of its results that are taken there: all, unless it is said."""
    call = Kernel(name, tuple(reads.split()), tuple(makes.split()), inside=inside, kind="called")
    return [call, *parts(call, makes if taken is None else taken)]


def written(name: str, reads: str, makes: str, over: str = "", fused: str = "", inside: tuple[str, ...] = ()) -> Kernel:
    """Return a kernel that the compiler writes, or a product."""
    return Kernel(name, tuple(reads.split()), tuple(makes.split()), over, inside, tuple(fused.split()))


def joined(name: str, reads: str, makes: str) -> Kernel:
    """Return what joins tensors that were written into its memory, and which Inductor counts once more."""
    return Kernel(name, tuple(reads.split()), (makes,), kind="joined")


def viewed(reads: str, makes: str) -> list[Kernel]:
    """Return a view of a tensor, or of what is no tensor of the program, which Inductor counts as though it had bytes."""
    call = Kernel("view", tuple(reads.split()), (makes,), kind="viewed")
    return [call, *parts(call, makes)]


def parts(call: Kernel, names: str) -> list[Kernel]:
    """Return the kernels that take results of a call."""
    return [Kernel("part", (call.results,), (name,), kind="part") for name in names.split()]


class Program(NamedTuple):
    """Kernels in the order that the scheduler has before it looks for a better one, and what outlives them."""

    kernels: tuple[Kernel, ...]
    given: tuple[str, ...]  # Tensors that are there before, that the program may let go of, and that Inductor counts
    stays: frozenset[str]  # Tensors that are there behind it: what it returns

    def users(self) -> dict[str, list[int]]:
        """Return, for each tensor, the kernels that read it."""
        result: dict[str, list[int]] = {}
        for number, kernel in enumerate(self.kernels):
            for name in dict.fromkeys(kernel.reads):
                result.setdefault(name, []).append(number)
        return result

    def roots(self) -> dict[str, str]:
        """Return, for each view, what it is taken from and parts of what is joined, the tensor that has the memory, or a name."""
        result: dict[str, str] = {}
        for kernel in self.kernels:
            if kernel.kind == "joined":
                result |= dict.fromkeys(kernel.reads, kernel.makes[0])
            if kernel.kind == "viewed":
                source = kernel.reads[0] if kernel.reads else kernel.results
                result |= dict.fromkeys((kernel.results, *kernel.makes), result.get(source, source))
        return result

    def formed(self, kernel: Kernel, there: Collection[str]) -> list[str]:
        """Return the tensors whose memory a kernel allocates: what it writes, or what that is to be joined in, once.

        Args:
            there: What has memory already.
        """
        roots = self.roots() if kernel.kind == "written" else {}
        names = dict.fromkeys(roots.get(name, name) for name in kernel.makes) if kernel.kind == "written" else ()
        return [name for name in names if name not in there]

    def last_reads(self, order: Order) -> dict[str, int]:
        """Return, for each tensor with memory, the step of an order at which it is read last, itself or a view of it."""
        roots, last = self.roots(), {}
        for step, number in enumerate(order):
            for name in self.kernels[number].reads:
                last[roots.get(name, name)] = step
        return last

    def outliving(self) -> set[str]:
        """Return what has memory and outlives the program."""
        roots = self.roots()
        return {roots.get(name, name) for name in self.stays}


class _Graph:
    """A program with the sizes of its tensors, as Inductor counts them."""

    def __init__(self, program: Program, sizes: Mapping[str, int]) -> None:
        self.program, self.users, self.roots = program, program.users(), program.roots()
        self.sizes = {name: sizes.get(name, 0) for name in (*program.given, *self._names(program))}
        self.made = {name: number for number, kernel in enumerate(program.kernels) for name in kernel.leaves}
        self.before = [
            sorted({self.made[name] for name in kernel.reads if name in self.made}) for kernel in program.kernels
        ]
        taken = [name for kernel in program.kernels if kernel.kind == "part" for name in kernel.makes]
        self.takes = [self._taken_by(kernel, taken) for kernel in program.kernels]
        self.freeable = {*program.given, *self.made}

    @staticmethod
    def _names(program: Program) -> Iterator[str]:
        for kernel in program.kernels:
            yield from (*kernel.leaves, *kernel.fused)

    def _taken_by(self, kernel: Kernel, taken: Sequence[str]) -> int:
        """Return the bytes that a kernel is counted with; a view with those of all views of its tensor."""
        if kernel.kind == "part":
            return 0
        if kernel.kind == "viewed":
            root = self.roots[kernel.results]
            return sum(self.sizes[name] for name in taken if self.roots.get(name) == root)
        if kernel.kind == "called":
            return sum(self.sizes[name] for name in kernel.makes if name in taken)
        return sum(self.sizes[name] for name in (*kernel.makes, *kernel.fused))

    def _lost(self, number: int) -> int:
        return sum(self.sizes[name] for name in self.program.kernels[number].fused)

    def _depth_first(self, numbers: Iterable[int], key: Mapping[int, tuple[int, ...]]) -> Order:
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
        for name in (*self.program.given, *(name for n in order for name in self.program.kernels[n].leaves)):
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
            live -= sum(self.sizes[name] for name in ends) + self._lost(number)
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
        alive, last, retained = self.timeline(order), self.program.last_reads(order), self.program.outliving()
        most, kernels = self.estimate(order), self.program.kernels
        ends: dict[int, list[str]] = {}
        there: set[str] = set()
        for name, step in last.items():
            ends.setdefault(step, []).append(name)
        for step, number in enumerate(order):
            kernel = kernels[number]
            over = kernel.over if last.get(kernel.over) == step and kernel.over not in retained else ""
            for made in self.program.formed(kernel, there)[bool(over) :]:
                there.add(made)
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
            for name in sorted(ends.get(step, ())):
                if name in self.made and name in keys and name not in retained and name != over:
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
            frees |= {name for name in kernel.leaves if not uses[name]}
            return self.takes[number] - self._lost(number) - sum(self.sizes[name] for name in frees)

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
        return self._depth_first(sorted(key, key=key.__getitem__), key)

    def _after(self) -> list[list[int]]:
        after: list[list[int]] = [[] for _ in self.before]
        for number, before in enumerate(self.before):
            for other in before:
                after[other].append(number)
        return after


def orders(program: Program, sizes: Mapping[str, int]) -> tuple[Order, ...]:
    """Return the orders of a program's kernels that Inductor tries, the one that it starts from first.

    Args:
        sizes: Bytes of each tensor, as Inductor counts it.
    """
    graph = _Graph(program, sizes)
    first = tuple(range(len(program.kernels)))
    return first, graph.least_first(), graph.earliest_first(), graph.smallest_first()


def schedule(program: Program, sizes: Mapping[str, int], keys: Mapping[str, str]) -> Schedule:
    """Return the order in which Inductor lets the kernels of a program run, and which of their tensors take memory of others.

    Args:
        sizes: Bytes of each tensor, as Inductor counts it.
        keys: Its dtype.

    Source:
        ``AllocateLine.should_reuse_buffer`` in torch/_inductor/codegen/wrapper.py (v2.13.0).
    """
    graph = _Graph(program, sizes)
    order = min(orders(program, sizes), key=graph.estimate)
    return Schedule(order, tuple(graph.taken(order, keys)))
