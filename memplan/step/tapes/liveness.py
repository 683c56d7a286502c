"""A tape played: what is alive at each moment of forward, of what is computed again, and of backward.

Source: pytorch torch/csrc/autograd/engine.cpp and input_buffer.cpp, torch/utils/checkpoint.py (v2.13.0).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import ge, itemgetter
from typing import Literal

from memplan.step.tapes.linear_forms import WIDTH, ZERO, Form, Part, Quantity, add_forms, with_totals
from memplan.step.tapes.reduction_workspaces import column_sum_bytes
from memplan.step.tapes.tape import FOREVER, SAME, VIEW, Mode, Node, Operation, Reduction, Tape, Value, Weight

Checkpointing = Literal["none", "selective", "full"]


@dataclass(frozen=True, slots=True)
class Instant:
    """A point of a step: the bytes alive there, as far as the tape knows them.

    Attributes:
        communication: How many of the form's constant temporaries are gathered weights and reduced
            gradients of several GPUs.
        reduces: A sum over rows that runs there, whose partial sums are no linear form.
    """

    name: str
    operation: str
    form: Form
    communication: int = 0
    reduces: Reduction | None = None

    def around(self, form: Form, name: str = "", operation: str = "") -> Instant:
        """Return the point with ``form`` alive besides, under another name where one is given."""
        return Instant(
            name or self.name,
            operation or self.operation,
            add_forms(form, self.form),
            self.communication,
            self.reduces,
        )

    def partial_bytes(self, values: Sequence[int]) -> int:
        """Return the partial sums that are there, given the values of the quantities."""
        if self.reduces is None:
            return 0
        return column_sum_bytes(self.reduces.times * values[self.reduces.quantity], self.reduces.columns)


@dataclass(frozen=True, slots=True)
class Played:
    """What a part of the model has alive in forward and in backward.

    Attributes:
        forward: Moments of its forward, with what it is given.
        kept: What forward leaves for backward.
        carried: What stays besides until the whole forward ends: weights that autocast has cast.
        backward: Moments of its backward, what is computed again for it included; the first one has the
            gradient of its output, and all that forward left.
    """

    forward: list[Instant]
    kept: Form
    carried: Form
    backward: list[Instant]


def play(
    tape: Tape, output: Value, mode: Mode, entry: Value | None = None, checkpointing: Checkpointing = "none"
) -> Played:
    """Return what is alive while a part runs forward, then backward from the gradient of ``output``.

    Args:
        tape: The operations.
        output: The value whose gradient comes in.
        mode: What becomes of weight gradients.
        entry: What the part is given; checkpointing holds it until backward is done.
        checkpointing: What forward keeps.
    """
    player = _Player(tape, mode, entry, checkpointing)
    player.forward(keeps=True)
    forward, player.instants = player.instants, []
    carried = player.region_ends()
    kept = tuple(player.live)
    if tape.nodes:
        player.start(output)
        for node in reversed(tape.nodes):
            player.run(node)
    return Played(dominant(forward), kept, carried, dominant(player.instants))


def play_forward(tape: Tape) -> Played:
    """Return the moments of a forward that keeps nothing, as under ``no_grad``."""
    player = _Player(tape, "first", None, "none")
    player.forward(keeps=False)
    return Played(dominant(player.instants), ZERO, player.region_ends(), [])


class _Player:
    """Live bytes while a tape is played, with reference counts of storages."""

    def __init__(self, tape: Tape, mode: Mode, entry: Value | None, checkpointing: Checkpointing) -> None:
        self.tape, self.mode, self.checkpointing = tape, mode, checkpointing
        self.live = list(ZERO)
        self.storages = list(tape.storages)
        self.references: dict[int, int] = {}
        self.gradients: dict[int, int] = {}
        self.views: set[int] = set()
        self.instants: list[Instant] = []
        self.cache: set[int] = set()
        self.region: set[int] = set()
        self.graphs = False
        packing = [index for index, item in enumerate(tape.operations) if item.node is not None and item.node.packs]
        self.first_packing = tape.operations[packing[0]].node if packing else None
        self.last_packing = packing[-1] if packing else -1
        self.to_recompute = checkpointing != "none" and bool(packing)
        self.entry = entry if self.to_recompute else None

    # ---------------------------------------------------------------- forward
    def forward(self, *, keeps: bool) -> None:
        """Play all operations, and keep for backward what checkpointing says."""
        named = self._given()
        self.graphs = keeps and self.checkpointing == "none"
        if self.entry is not None and keeps:
            self.hold(self.entry.storage)
        for index, operation in enumerate(self.tape.operations):
            self._make(operation, "forward", named)
            if keeps and self.checkpointing == "none":
                self._save(operation)
            elif keeps and self.checkpointing == "selective" and operation.product and self.to_recompute:
                self.cache.update(operation.makes)
                self._hold_all(operation.makes)
            self._forget(named, index)
        self._drop_all(named - self.tape.regional)
        self.region = named & self.tape.regional

    def region_ends(self) -> Form:
        """Let go of what autocast has cast; return what goes with it."""
        before = tuple(self.live)
        self._drop_all(self.region)
        self.region = set()
        return tuple(map(int.__sub__, before, self.live))

    def recompute(self, instant: str) -> None:
        """Play the operations again, up to where everything that backward needs is there."""
        named, self.graphs = self._given(), True
        last = self.tape.operations[self.last_packing]
        stop = self.last_packing + last.keeps_last
        for index, operation in enumerate(self.tape.operations[:stop]):
            self._make(operation, instant, named)
            self._save(operation)
            self._forget(named, index)
        if not last.keeps_last:
            self._save(last)
        self._drop_all(named)

    def _given(self) -> set[int]:
        named = {storage for storage, last in self.tape.last_use.items() if last == FOREVER}
        self._hold_all(named)
        return named

    def _make(self, operation: Operation, instant: str, named: set[int]) -> None:
        """Allocate what an operation makes; a result that selective checkpointing has kept is there already."""
        copies = sum(w.copy_bytes for w in operation.weights if not w.copy_kept)
        decoding = sum(w.decoding_bytes for w in operation.weights)
        if decoding:
            self.with_scratch(instant, operation.name, [(Part.TEMPORARIES, Quantity.ONE, copies + decoding)])
        for storage in operation.makes:
            if storage in self.cache:
                self.cache.remove(storage)
            else:
                self.hold(storage)
        named.update(operation.makes)
        scratch = [(Part.TEMPORARIES, *item) for item in operation.scratch]
        if copies:
            scratch.append((Part.TEMPORARIES, Quantity.ONE, copies))
        self.with_scratch(instant, operation.name, scratch)

    def _save(self, operation: Operation) -> None:
        if operation.node is not None:
            self._hold_all(operation.node.saved)

    def _forget(self, named: set[int], index: int) -> None:
        """Drop the storages that nothing names after the operation with that index."""
        held = self.tape.graph_use if self.graphs else {}
        gone = {s for s in named if max(self.tape.last_use[s], held.get(s, 0)) <= index} - self.tape.regional
        self._drop_all(gone)
        named -= gone

    def _hold_all(self, storages: Iterable[int]) -> None:
        for storage in storages:
            self.hold(storage)

    def _drop_all(self, storages: Iterable[int]) -> None:
        for storage in storages:
            self.drop(storage)

    # ---------------------------------------------------------------- backward
    def start(self, output: Value) -> None:
        """Begin backward with the gradient of ``output``."""
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

    def note(self, name: str, operation: str, reduces: Reduction | None = None) -> None:
        self.instants.append(Instant(name, operation, tuple(self.live), reduces=reduces))

    def run(self, node: Node) -> None:
        """Run the backward of one operation; the first that needs what was not kept has it computed again."""
        arrived = [g for g in (self.gradients.pop(id(value), None) for value in node.outputs) if g is not None]
        if arrived:
            self.form(node, arrived)
        else:
            self.release(node)

    def release(self, node: Node) -> None:
        """Let go of what a node has kept, and after the last that kept something of what checkpointing holds."""
        if self.to_recompute:
            return
        self._drop_all(node.saved)
        if node is not self.first_packing:
            return
        self._drop_all(self.cache)
        self.cache = set()
        if self.entry is not None:
            self.drop(self.entry.storage)

    def form(self, node: Node, arrived: list[int]) -> None:
        """Form the gradients of a node's inputs and weights."""
        # A product with codes asks for what it kept only once its input's gradient is there (memplan/trace/reference/weight_storage.py).
        late = any(w.coded for w in node.weights)
        if not late:
            self.recompute_for(node)
        if decoding := sum(w.copy_bytes + w.decoding_bytes for w in node.weights if w.decoding_bytes):
            self.with_scratch(node.instant, node.name, [(Part.TEMPORARIES, Quantity.ONE, decoding)])
        formed: list[tuple[Value, int]] = []
        for value, how in node.inputs:
            if how is SAME:
                self.hold(arrived[0])
                formed.append((value, arrived[0]))
            else:
                size = value.gradient_coefficient or value.coefficient
                formed.append((value, self.new(value.quantity, size, self.gradient_part(value))))
                if how is VIEW:
                    self.views.add(formed[-1][1])
        if decoded := sum(w.copy_bytes for w in node.weights if not w.copy_kept):
            self.with_scratch(node.instant, node.name, [(Part.TEMPORARIES, Quantity.ONE, decoded)])
        if late:
            self.recompute_for(node)
        self.finish(node, arrived, formed)

    def recompute_for(self, node: Node) -> None:
        """Compute again what was not kept, where a node is the first to need any of it."""
        if node.packs and self.to_recompute:
            self.recompute(node.instant)
            self.to_recompute = False

    def finish(self, node: Node, arrived: list[int], formed: list[tuple[Value, int]]) -> None:
        """Form the gradients of a node's weights, then let go of what it kept and hand its gradients on."""
        scratch = [(Part.TEMPORARIES, *item) for item in node.workspace]
        trained = [w for w in node.weights if w.trainable]
        for weight in trained:
            self.add(Part.GRADIENTS, Quantity.ONE, weight.formed_bytes)
        again = self.checkpointing != "none"
        uncast = [(Part.TEMPORARIES, quantity, -size) for quantity, size in node.casts] if again else []
        self.with_scratch(node.instant, node.name, [*scratch, *uncast], None if again else node.reduces)
        for weight in trained:
            if weight.coded:
                self.store(node, weight)
        self.release(node)
        if again and (node.reduces is not None or node.casts):
            # What was computed again is let go as it is unpacked; other saved tensors after gradients are reduced.
            self.with_scratch(node.instant, node.name, scratch, node.reduces)
        self._drop_all(arrived)
        for weight in trained:
            if not weight.coded:
                self.store(node, weight)
        for value, gradient in formed:
            self.accumulate(node, value, gradient)

    def with_scratch(
        self,
        instant: str,
        operation: str,
        scratch: list[tuple[Part, Quantity, int]],
        reduces: Reduction | None = None,
    ) -> None:
        """Note the moment at which an operation's scratch memory is there."""
        for item in scratch:
            self.add(*item)
        self.note(instant, operation, reduces)
        for part, quantity, coefficient in scratch:
            self.add(part, quantity, -coefficient)

    def store(self, node: Node, weight: Weight) -> None:
        """Keep, add or use up a weight's gradient, which has just been formed."""
        mode = (
            "first"
            if weight.delayed
            else "again"
            if weight.shared and self.mode != "layer"
            else weight.own_mode(self.mode)
        )
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
    """Return, for each name, the instants that can be the fullest: none of them is below another in every quantity.

    One with partial sums is below another only where that has the same.
    """
    groups: dict[str, list[Instant]] = {}
    for instant in instants:
        groups.setdefault(instant.name, []).append(instant)
    return [instant for group in groups.values() for instant in _highest(group)]


def _highest(instants: Sequence[Instant]) -> list[Instant]:
    """Return the instants of one name that none of the others covers."""
    distinct = {(with_totals(instant.form), instant.reduces): instant for instant in reversed(instants)}
    chosen: list[tuple[Form, Reduction | None]] = []
    for key in sorted(distinct, key=itemgetter(0), reverse=True):
        total, own = key
        if not any((own is None or own == other) and all(map(ge, form, total)) for form, other in chosen):
            chosen.append(key)
    return [distinct[key] for key in chosen]
