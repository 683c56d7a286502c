"""A tape: the operations of one part of a training step, and what each keeps for backward.

The memory of a step follows from a few rules of reverse-mode autograd. An operation saves some
of its inputs and outputs until its own backward has run; backward visits operations in reverse,
forms one gradient for each input that needs one, then drops what was saved and the gradient it
came with. Given a part's operations, the bytes alive at every point of its backward follow by
counting. Sizes stay linear forms in the quantities of :data:`QUANTITIES`, so a tape is played
once for a model and gives closed forms for every batch and sequence length.

Source: pytorch torch/csrc/autograd/engine.cpp and input_buffer.cpp (v2.13.0).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from memplan.step.tapes.linear_forms import ZERO, Form, Part, Quantity, single_form
from memplan.step.tapes.taped_weight import Weight

FOREVER = 2**62
"""Index of an operation that never comes."""


@dataclass(slots=True, eq=False)
class Value:
    """A tensor of a tape; views share a storage.

    Attributes:
        foreign: Whether it is in the 16-bit dtype that products are not computed in: as wide, and yet to be cast.
        gradient_coefficient: Bytes of its gradient for each unit of the quantity, where they are more than its own.
        apart: Whether a head's numbers lie between those of others, so that a product of matrices may copy them first.
    """

    storage: int
    quantity: Quantity
    coefficient: int
    element_bytes: int
    needs_gradient: bool = True
    foreign: bool = False
    gradient_coefficient: int = 0
    apart: bool = False

    @property
    def width(self) -> int:
        """Elements for each unit of the quantity."""
        return self.coefficient // self.element_bytes


class Pass(IntEnum):
    """How an operation's backward makes the gradient of an input."""

    NEW = 0  # a new tensor of the input's size
    SAME = 1  # the gradient of the output itself, as for sums and views
    VIEW = 2  # a new tensor, handed on as a view of itself; autograd never adds into views in place


NEW, SAME, VIEW = Pass.NEW, Pass.SAME, Pass.VIEW


class Reduction(NamedTuple):
    """A sum over the rows of a matrix, for which CUDA's blocks keep partial sums (memplan.step.tapes.reduction_workspaces).

    Attributes:
        quantity: What rows are proportional to.
        times: Rows for each unit of it.
        columns: Length of the result.
    """

    quantity: Quantity
    times: int
    columns: int


@dataclass(slots=True, eq=False)
class Node:
    """The backward of one operation.

    Attributes:
        packs: Whether it keeps any tensor, weights and tables included: under checkpointing, the first such node that
            backward reaches has the part computed again.
        reduces: The sum over rows that forms a weight's gradient, or None.
        casts: Gradients that are cast from wider ones, in the workspace, when the operation's own backward is done.
    """

    name: str
    inputs: tuple[tuple[Value, Pass], ...]
    outputs: tuple[Value, ...]
    saved: tuple[int, ...]
    weights: tuple[Weight, ...]
    workspace: tuple[tuple[Quantity, int], ...]
    instant: str
    packs: bool
    reduces: Reduction | None
    casts: tuple[tuple[Quantity, int], ...] = ()


@dataclass(slots=True, eq=False)
class Operation:
    """One operation of forward.

    Attributes:
        makes: Storages that it allocates.
        scratch: What it allocates besides, and frees again.
        weights: Parameters that it reads, decoded first where they are codes.
        node: Its backward, or None.
        product: Whether selective checkpointing keeps its results.
        saves_last: Whether its node packs its tensors when the results are there, and not before: results that it
            keeps, and functions written in Python.
    """

    name: str
    makes: tuple[int, ...]
    scratch: tuple[tuple[Quantity, int], ...]
    weights: tuple[Weight, ...]
    node: Node | None
    product: bool
    saves_last: bool


@dataclass(slots=True)
class Tape:
    """Operations in the order of forward.

    Attributes:
        storages: (part, quantity, coefficient) of every storage.
        nodes: Operations that have a backward.
        operations: All operations.
        instant: Instant that operations added from now on belong to in backward.
        last_use: Storage -> index of the operation after which forward's own names for it are gone.
        regional: Storages that a region of autocast keeps until it ends.
        graph_use: Storage -> index of the operation after which a graph that is cut off lets it go; forward under
            checkpointing, or without gradients, has no such graph.
    """

    storages: list[tuple[Part, Quantity, int]] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    instant: str = ""
    last_use: dict[int, int] = field(default_factory=dict)
    regional: set[int] = field(default_factory=set)
    graph_use: dict[int, int] = field(default_factory=dict)

    def value(
        self,
        quantity: Quantity,
        width: int,
        element_bytes: int,
        needs_gradient: bool = True,
        part: Part = Part.ACTIVATIONS,
    ) -> Value:
        """Return a new tensor of ``width`` elements per unit of ``quantity``, with a storage of its own."""
        coefficient = width * element_bytes
        self.storages.append((part, quantity, coefficient))
        return Value(len(self.storages) - 1, quantity, coefficient, element_bytes, needs_gradient)

    def given(self, quantity: Quantity, width: int, element_bytes: int, needs_gradient: bool = True) -> Value:
        """Return a tensor that is there before the first operation, and as long as forward runs."""
        value = self.value(quantity, width, element_bytes, needs_gradient)
        self.last_use[value.storage] = FOREVER
        return value

    def part_of(self, quantity: Quantity, width: int, element_bytes: int, needs_gradient: bool = True) -> Value:
        """Return a tensor that is there like :meth:`given`, and whose bytes count elsewhere: a view of a larger one."""
        value = self.given(quantity, width, element_bytes, needs_gradient)
        self.storages[value.storage] = (Part.ACTIVATIONS, quantity, 0)
        return value

    def apply(
        self,
        name: str,
        inputs: Sequence[tuple[Value, Pass]],
        outputs: Value | Sequence[Value],
        saves: Sequence[Value] = (),
        weights: Sequence[Weight] = (),
        workspace: Sequence[tuple[Quantity, int]] = (),
        *,
        scratch: Sequence[tuple[Quantity, int]] = (),
        packs: bool | None = None,
        custom: bool = False,
        product: bool = False,
        reduces: Reduction | None = None,
        casts: Sequence[tuple[Quantity, int]] = (),
    ) -> Value:
        """Record an operation and return its (first) output.

        Args:
            name: What formulas call it.
            inputs: Inputs with the way their gradients are made.
            outputs: Outputs, made by :meth:`value` or :meth:`view`.
            saves: Tensors kept until this operation's backward is done.
            weights: Parameters that it reads.
            workspace: Scratch memory of its backward.
            scratch: Scratch memory of its forward.
            packs: Whether backward keeps anything, be it a table or a number; by default, what is saved and
                parameters that are no codes.
            custom: Whether it is a function written in Python, which keeps its tensors when it is done.
            product: Whether selective checkpointing keeps its results.
            reduces: The sum over rows that forms a weight's gradient.
            casts: Gradients that are cast from wider ones in the workspace.
        """
        made = (outputs,) if isinstance(outputs, Value) else tuple(outputs)
        used = tuple([pair for pair in inputs if pair[0].needs_gradient])
        needs = bool(used) or any(weight.trainable for weight in weights)
        for value in made:
            value.needs_gradient = needs
        new = self._first_seen([value for value, _ in inputs], (*made, *saves))
        storages = tuple(dict.fromkeys([value.storage for value in saves]))
        read, node = tuple(weights), None
        if needs:
            packed = bool(storages) or any(not weight.coded for weight in read) if packs is None else packs
            node = Node(name, used, made, storages, read, tuple(workspace), self.instant, packed, reduces, tuple(casts))
            self.nodes.append(node)
        last = custom or not set(new).isdisjoint(storages)
        self.operations.append(Operation(name, new, tuple(scratch), read, node, product, last))
        return made[0]

    def make(
        self,
        name: str,
        output: Value,
        *reads: Value,
        scratch: Sequence[tuple[Quantity, int]] = (),
        product: bool = False,
    ) -> Value:
        """Record an operation whose result has no gradient, whatever it reads; return its output."""
        output.needs_gradient = False
        new = self._first_seen(reads, (output,))
        self.operations.append(Operation(name, new, tuple(scratch), (), None, product, False))
        return output

    def _first_seen(self, reads: Sequence[Value], written: Sequence[Value]) -> tuple[int, ...]:
        """Note what the next operation reads and writes; return the storages that it allocates."""
        index = len(self.operations)
        last_use = self.last_use
        for value in reads:
            if last_use.get(value.storage, 0) <= index:
                last_use[value.storage] = index
        new = []
        for value in written:
            if value.storage not in last_use:
                last_use[value.storage] = index
                new.append(value.storage)
        return tuple(new)

    def touch(self, *values: Value) -> None:
        """Note that names of ``values`` are alive up to the operation recorded last."""
        index = len(self.operations) - 1
        for value in values:
            self.last_use[value.storage] = max(index, self.last_use.get(value.storage, 0))

    def alive(self, *values: Value) -> _Variables:
        """Keep ``values`` alive in forward until the block ends, as variables of a function are."""
        return _Variables(self, values)

    def view(self, base: Value, width: int | None = None) -> Value:
        """Return another look at ``base``'s storage, ``width`` elements of it per unit."""
        coefficient = base.coefficient if width is None else width * base.element_bytes
        return Value(base.storage, base.quantity, coefficient, base.element_bytes, base.needs_gradient, base.foreign)

    def saved_form(self) -> Form:
        """Return what all operations together save for backward, each storage once."""
        storages = dict.fromkeys(s for node in self.nodes for s in node.saved)
        return sum((single_form(*self.storages[storage]) for storage in storages), ZERO)

    def saved_tensors(self) -> list[tuple[str, Quantity, int, Part]]:
        """Return (operation, quantity, coefficient, part) of every storage kept, by its first keeper."""
        first: dict[int, str] = {}
        for node in self.nodes:
            for storage in node.saved:
                first.setdefault(storage, node.name)
        return [(name, self.storages[s][1], self.storages[s][2], self.storages[s][0]) for s, name in first.items()]


class _Variables:
    """A block of a function whose variables stay alive until it ends."""

    __slots__ = ("_tape", "_values")

    def __init__(self, tape: Tape, values: tuple[Value, ...]) -> None:
        self._tape, self._values = tape, values

    def __enter__(self) -> None:
        return

    def __exit__(self, *_: object) -> None:
        self._tape.touch(*self._values)
