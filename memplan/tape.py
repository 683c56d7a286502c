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
from typing import Literal

from memplan.forms import WIDTH, ZERO, Form, Part, Quantity

Mode = Literal["first", "again", "layer"]
"""How weight gradients fare: kept from now on, added to ones already there, or used at once."""


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
    decoding_bytes: int = 0

    def storing_bytes(self, mode: Mode) -> int:
        """Return what storing, adding or using up the gradient takes besides the gradient as it was formed.

        Autocast's copy has a gradient of its own, which is cast to the weight's dtype and let go
        before anything else happens.
        """
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
    """A tensor of a tape; views share a storage."""

    storage: int
    quantity: Quantity
    coefficient: int
    element_bytes: int
    needs_gradient: bool = True

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


@dataclass(slots=True, eq=False)
class Node:
    """One operation with a backward."""

    name: str
    inputs: tuple[tuple[Value, Pass], ...]
    outputs: tuple[Value, ...]
    saved: tuple[int, ...]
    weights: tuple[Weight, ...]
    workspace: tuple[tuple[Quantity, int], ...]
    instant: str


@dataclass(slots=True)
class Tape:
    """Operations in the order of forward.

    Attributes:
        storages: (part, quantity, coefficient) of every storage.
        nodes: Operations that have a backward.
        instant: Instant that operations added from now on belong to in backward.
    """

    storages: list[tuple[Part, Quantity, int]] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    instant: str = ""

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

    def apply(
        self,
        name: str,
        inputs: Sequence[tuple[Value, Pass]],
        outputs: Value | Sequence[Value],
        saves: Sequence[Value] = (),
        weights: Sequence[Weight] = (),
        workspace: Sequence[tuple[Quantity, int]] = (),
    ) -> Value:
        """Record an operation and return its (first) output.

        Args:
            name: What formulas call it.
            inputs: Inputs with the way their gradients are made.
            outputs: Outputs, made by :meth:`value` or :meth:`view`.
            saves: Tensors kept until this operation's backward is done.
            weights: Parameters that it reads.
            workspace: Scratch memory of its backward.
        """
        made = (outputs,) if isinstance(outputs, Value) else tuple(outputs)
        needs = any(value.needs_gradient for value, _ in inputs) or any(w.trainable for w in weights)
        for value in made:
            value.needs_gradient = needs
        if needs:
            used = tuple((value, how) for value, how in inputs if value.needs_gradient)
            storages = tuple(dict.fromkeys(value.storage for value in saves))
            self.nodes.append(Node(name, used, made, storages, tuple(weights), tuple(workspace), self.instant))
        return made[0]

    def view(self, base: Value, width: int | None = None) -> Value:
        """Return another look at ``base``'s storage, ``width`` elements of it per unit."""
        coefficient = base.coefficient if width is None else width * base.element_bytes
        return Value(base.storage, base.quantity, coefficient, base.element_bytes, base.needs_gradient)

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
