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

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal, NamedTuple

from memplan.step.tapes.linear_forms import WIDTH, ZERO, Form, Part, Quantity

FOREVER = 2**62
"""Index of an operation that never comes."""

Mode = Literal["first", "again", "filled", "layer"]
"""How weight gradients fare: kept from now on, added to ones already there, added to zeros where the last step left some,
or used at once."""


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter tensor as an operation of a tape sees it.

    Attributes:
        name: Its name, for explanations.
        trainable: Whether backward forms a gradient for it.
        element_bytes: Bytes of an element as products and norms read it.
        copy_bytes: A copy in the compute dtype made for the product: dequantised, and made
            again for backward; or cast by autocast, and kept from forward to backward.
        decoding_bytes: What making a dequantised copy takes besides.
        copy_kept: Whether that copy is kept (autocast) or made anew (dequantised).
        own_bytes: The weight in its own dtype.
        formed_bytes: Its gradient as backward forms it, in the compute dtype.
        gradient_bytes: Its gradient as it is stored; the formed one itself where ``converted`` is false.
        converted: Whether storing makes another tensor.
        add_bytes: Temporaries of rounding into, and of adding to, a gradient store.
        coded: Whether the weight is no float parameter; its gradient is stored while the
            operation that formed it still holds its inputs.
        delayed: Whether its gradient waits for another to be added (a tied head), whatever the mode.
        shared: Whether a gradient of it has been stored before, to which this one is added.
        handed_over: Whether the bundled optimizer has moved the gradient into its store, and the one
            that was formed is gone, before an update inside backward.
        update_bytes: Temporaries of updating this tensor alone, for updates inside backward.
        rows: Its first dimension.
        columns: Its last dimension.
        foreign: Whether it is stored in the 16-bit dtype that products are not computed in.
        emptied: Whether a step takes its gradient away even where gradients are filled with zeros.
        summed: Whether autograd adds up several gradients of it before it is stored.
    """

    name: str
    trainable: bool = True
    element_bytes: int = 2
    copy_bytes: int = 0
    copy_kept: bool = False
    own_bytes: int = 0
    formed_bytes: int = 0
    gradient_bytes: int = 0
    converted: bool = False
    coded: bool = False
    add_bytes: int = 0
    delayed: bool = False
    shared: bool = False
    handed_over: bool = False
    update_bytes: int = 0
    rows: int = 0
    columns: int = 0
    foreign: bool = False
    emptied: bool = False
    summed: bool = False
    decoding_bytes: int = 0

    def own_mode(self, mode: Mode) -> Mode:
        """Return how this weight's gradient fares where gradients in general fare so."""
        if self.summed:
            return "again"
        if mode != "filled":
            return mode
        return "first" if self.emptied else "again"

    def storing_bytes(self, mode: Mode) -> int:
        """Return what storing, adding or using up the gradient takes besides the gradient as it was formed.

        Autocast's copy has a gradient of its own, which is cast to the weight's dtype and let go
        before anything else happens.
        """
        mode = self.own_mode(mode)
        cast = self.copy_kept and self.copy_bytes == self.formed_bytes < self.own_bytes
        converted = self.gradient_bytes != self.own_bytes if cast else self.converted
        kept = self.gradient_bytes if converted and mode != "again" else 0
        added = self.add_bytes if converted or mode == "again" else 0
        update = self.update_bytes if mode == "layer" else 0
        if self.handed_over:
            update -= self.own_bytes if cast else self.formed_bytes
        extra = kept + max(added, update)
        return max(self.own_bytes, self.own_bytes - self.formed_bytes + extra) if cast else extra


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
        keeps_last: Whether its node packs its tensors when the results are there, and not before: results that it
            keeps, and functions written in Python.
    """

    name: str
    makes: tuple[int, ...]
    scratch: tuple[tuple[Quantity, int], ...]
    weights: tuple[Weight, ...]
    node: Node | None
    product: bool
    keeps_last: bool


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
        needs = any(value.needs_gradient for value, _ in inputs) or any(w.trainable for w in weights)
        for value in made:
            value.needs_gradient = needs
        new = self._first_seen([value for value, _ in inputs], (*made, *saves))
        node = None
        if needs:
            used = tuple((value, how) for value, how in inputs if value.needs_gradient)
            storages = tuple(dict.fromkeys(value.storage for value in saves))
            packed = bool(storages) or any(not w.coded for w in weights) if packs is None else packs
            node = Node(
                name,
                used,
                made,
                storages,
                tuple(weights),
                tuple(workspace),
                self.instant,
                packed,
                reduces,
                tuple(casts),
            )
            self.nodes.append(node)
        last = custom or any(value.storage in new for value in saves)
        self.operations.append(Operation(name, new, tuple(scratch), tuple(weights), node, product, last))
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
        for value in reads:
            self.last_use[value.storage] = max(index, self.last_use.get(value.storage, 0))
        new = tuple(s for s in dict.fromkeys(value.storage for value in written) if s not in self.last_use)
        self.last_use.update(dict.fromkeys(new, index))
        return new

    def touch(self, *values: Value) -> None:
        """Note that names of ``values`` are alive up to the operation recorded last."""
        for value in values:
            self.last_use[value.storage] = max(len(self.operations) - 1, self.last_use.get(value.storage, 0))

    @contextmanager
    def holding(self, *values: Value) -> Iterator[None]:
        """Keep ``values`` alive in forward until the block ends, as variables of a function are."""
        try:
            yield
        finally:
            self.touch(*values)

    def view(self, base: Value, width: int | None = None) -> Value:
        """Return another look at ``base``'s storage, ``width`` elements of it per unit."""
        coefficient = base.coefficient if width is None else width * base.element_bytes
        return Value(base.storage, base.quantity, coefficient, base.element_bytes, base.needs_gradient, base.foreign)

    def saved_form(self) -> Form:
        """Return what all operations together keep for backward, each storage once."""
        form = [0] * len(ZERO)
        for storage in dict.fromkeys(s for node in self.nodes for s in node.saved):
            part, quantity, coefficient = self.storages[storage]
            form[part * WIDTH + quantity] += coefficient
        return tuple(form)

    def saved_tensors(self) -> list[tuple[str, Quantity, int, Part]]:
        """Return (operation, quantity, coefficient, part) of every storage kept, by its first keeper."""
        seen: dict[int, str] = {}
        for node in self.nodes:
            for storage in node.saved:
                seen.setdefault(storage, node.name)
        return [(name, self.storages[s][1], self.storages[s][2], self.storages[s][0]) for s, name in seen.items()]
