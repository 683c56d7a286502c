"""Backward through a tape: what is alive at each of its instants.

Source: pytorch torch/csrc/autograd/engine.cpp and input_buffer.cpp (v2.13.0).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import ge

from memplan.forms import WIDTH, ZERO, Form, Part, Quantity, with_totals
from memplan.tape import SAME, VIEW, Mode, Node, Tape, Value, Weight


@dataclass(frozen=True, slots=True)
class Instant:
    """A point of backward: the bytes alive there, as far as the tape knows them.

    Attributes:
        communication: How many of the form's constant temporaries are gathered weights and reduced
            gradients of several GPUs.
    """

    name: str
    operation: str
    form: Form
    communication: int = 0


def play_backward(tape: Tape, output: Value, mode: Mode, held: Sequence[Value] = ()) -> list[Instant]:
    """Return the instants of backward through ``tape``, from the gradient of ``output`` on.

    The first instant has everything saved and that gradient; each further one is the fullest
    moment of one operation's backward.

    Args:
        tape: The operations.
        output: The value whose gradient comes in.
        mode: What becomes of weight gradients.
        held: Values that something outside keeps alive throughout.
    """
    player = _Player(tape, mode)
    player.start(output, held)
    for node in reversed(tape.nodes):
        player.run(node)
    return player.instants


class _Player:
    """Live bytes during backward, with reference counts of storages."""

    def __init__(self, tape: Tape, mode: Mode) -> None:
        self.tape = tape
        self.mode = mode
        self.live = list(ZERO)
        self.storages = list(tape.storages)
        self.references: dict[int, int] = {}
        self.gradients: dict[int, int] = {}
        self.views: set[int] = set()
        self.instants: list[Instant] = []

    def start(self, output: Value, held: Sequence[Value]) -> None:
        for node in self.tape.nodes:
            for storage in node.saved:
                self.hold(storage)
        for value in held:
            self.hold(value.storage)
        self.gradients[id(output)] = self.new(output.quantity, output.coefficient, self.gradient_part(output))
        self.note("", "start")

    def gradient_part(self, value: Value) -> Part:
        """Gradients of logits are logits; other gradients of activations are temporaries."""
        return Part.LOGITS if self.storages[value.storage][0] is Part.LOGITS else Part.TEMPORARIES

    def new(self, quantity: Quantity, coefficient: int, part: Part) -> int:
        self.storages.append((part, quantity, coefficient))
        self.hold(len(self.storages) - 1)
        return len(self.storages) - 1

    def hold(self, storage: int) -> None:
        count = self.references.get(storage, 0)
        if count == 0:
            part, quantity, coefficient = self.storages[storage]
            self.live[part * WIDTH + quantity] += coefficient
        self.references[storage] = count + 1

    def drop(self, storage: int) -> None:
        self.references[storage] -= 1
        if self.references[storage] == 0:
            part, quantity, coefficient = self.storages[storage]
            self.live[part * WIDTH + quantity] -= coefficient

    def add(self, part: Part, quantity: Quantity, coefficient: int) -> None:
        self.live[part * WIDTH + quantity] += coefficient

    def note(self, name: str, operation: str) -> None:
        self.instants.append(Instant(name, operation, tuple(self.live)))

    def run(self, node: Node) -> None:
        arrived = [g for g in (self.gradients.pop(id(value), None) for value in node.outputs) if g is not None]
        if not arrived:
            for storage in node.saved:
                self.drop(storage)
            return
        if decoding := sum(w.copy_bytes + w.decoding_bytes for w in node.weights if w.decoding_bytes):
            self.with_scratch(node, [(Part.TEMPORARIES, Quantity.ONE, decoding)])
        formed: list[tuple[Value, int]] = []
        for value, how in node.inputs:
            if how is SAME:
                self.hold(arrived[0])
                formed.append((value, arrived[0]))
            else:
                formed.append((value, self.new(value.quantity, value.coefficient, self.gradient_part(value))))
                if how is VIEW:
                    self.views.add(formed[-1][1])
        self.finish(node, arrived, formed)

    def finish(self, node: Node, arrived: list[int], formed: list[tuple[Value, int]]) -> None:
        scratch = [(Part.TEMPORARIES, *item) for item in node.workspace]
        decoded = sum(w.copy_bytes for w in node.weights if not w.copy_kept)
        trained = [w for w in node.weights if w.trainable]
        if decoded:
            self.with_scratch(node, [(Part.TEMPORARIES, Quantity.ONE, decoded)])
        for weight in trained:
            self.add(Part.GRADIENTS, Quantity.ONE, weight.formed_bytes)
        self.with_scratch(node, scratch)
        for weight in trained:
            if weight.coded:
                self.store(node, weight)
        for storage in (*node.saved, *arrived):
            self.drop(storage)
        for weight in trained:
            if not weight.coded:
                self.store(node, weight)
        for value, gradient in formed:
            self.accumulate(node, value, gradient)

    def with_scratch(self, node: Node, scratch: list[tuple[Part, Quantity, int]]) -> None:
        """Note the instant at which an operation's scratch memory is there."""
        for item in scratch:
            self.add(*item)
        self.note(node.instant, node.name)
        for part, quantity, coefficient in scratch:
            self.add(part, quantity, -coefficient)

    def store(self, node: Node, weight: Weight) -> None:
        """Keep, add or use up a weight's gradient, which has just been formed."""
        mode = "first" if weight.delayed else "again" if weight.shared else self.mode
        if extra := weight.storing_bytes(mode):
            self.add(Part.GRADIENTS, Quantity.ONE, extra)
            self.note(node.instant, f"{weight.name} gradient")
            self.add(Part.GRADIENTS, Quantity.ONE, -extra)
        kept = weight.gradient_bytes if mode == "first" else 0
        self.add(Part.GRADIENTS, Quantity.ONE, kept - weight.formed_bytes)

    def accumulate(self, node: Node, value: Value, gradient: int) -> None:
        """Add a gradient to what the value has already, in place where nobody else holds that."""
        previous = self.gradients.get(id(value))
        if previous is None:
            self.gradients[id(value)] = gradient
            return
        if self.references[previous] > 1 or previous in self.views:
            total = self.new(value.quantity, value.coefficient, self.gradient_part(value))
            self.note(node.instant, f"{node.name} sum")
            self.drop(previous)
            self.gradients[id(value)] = total
        self.drop(gradient)


def dominant(instants: Sequence[Instant]) -> list[Instant]:
    """Return the instants that can be the fullest: none of them is below another in every quantity."""
    totals = sorted(((with_totals(instant.form), index) for index, instant in enumerate(instants)), reverse=True)
    kept: list[tuple[Form, int]] = []
    for total, index in totals:
        if not any(all(map(ge, other, total)) for other, _ in kept):
            kept.append((total, index))
    return [instants[index] for _, index in kept]
