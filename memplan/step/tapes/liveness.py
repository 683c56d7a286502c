"""A tape played: what is alive at each moment of forward, of what is computed again, and of backward.

Source: pytorch torch/csrc/autograd/engine.cpp and input_buffer.cpp, torch/utils/checkpoint.py (v2.13.0).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from memplan.step.tapes.event_recorder import EventRecorder
from memplan.step.tapes.linear_forms import ZERO, Form, Part, Quantity, Storage, scratch_pieces, single_form
from memplan.step.tapes.live_bytes import LiveBytes
from memplan.step.tapes.played import BEHIND_REGION, Instant
from memplan.step.tapes.tape import FOREVER, Tape
from memplan.step.tapes.taped_operations import OVER, SAME, VIEW, Node, Operation, Reduction, Sizes, Value
from memplan.step.tapes.taped_weight import Mode, Weight

Checkpointing = Literal["none", "selective", "full"]

Sink = LiveBytes | EventRecorder
"""What a player tells of every storage: one counts bytes, the other writes events down."""


class Recomputation(NamedTuple):
    """What forward saves of a part, and how the rest is computed again.

    Attributes:
        kind: ``none`` saves what backward needs, ``full`` the part's input, ``selective`` results of products besides.
        alternate: Whether ``selective`` leaves out every second product of two matrices.
        whole: Whether the part is computed again to its end, and not only as far as backward needs it
            (``early_stop=False`` of torch/utils/checkpoint.py).
        reentrant: Whether it is computed again, whole, before a backward of its own (``CheckpointFunction`` in
            torch/utils/checkpoint.py), which has names for the part's input, its output and the gradient of that.
    """

    kind: Checkpointing
    alternate: bool = False
    whole: bool = False
    reentrant: bool = False


NOTHING_AGAIN = Recomputation("none")


class Mark(NamedTuple):
    """Something that happens beside the operations of a part, for whom others have to follow it.

    Attributes:
        place: The moment, among those that are noted.
        kind: A weight's gradient leaves; a module begins, or has ended, in forward, in what is computed again, in backward;
            what is computed again has saved a module's weights.
        name: The weight, or the module.
    """

    place: int
    kind: Literal["gradient", "forward", "again", "backward", "saved", "left forward", "left again", "left backward"]
    name: str


Way = Literal["forward", "again", "backward"]
"""How a module runs."""

WITHOUT_MOMENT = ("saved", "left forward", "left again", "left backward")
"""Kinds of marks that stand between two moments."""

ACTIVATION = "activation"
"""Name of an operation that is a module without weights, as a norm may be."""


def module_of(operation: Operation | Node) -> str:
    """Return the module that an operation stands for: its weights', one without weights, or none."""
    if operation.weights:
        return operation.weights[0].name.rpartition(".")[0]
    return ACTIVATION if operation.name == ACTIVATION or operation.name.startswith("norm ") else ""


class Player:
    """Plays a tape: forward, what checkpointing computes again, and backward.

    Args:
        tape: The operations.
        mode: What becomes of weight gradients.
        entry: What the part is given; checkpointing saves it until backward is done.
        recomputation: What forward saves, and what is computed again.
        live: What is told of every storage: one that counts by default, or one that writes events down.

    Attributes:
        marks: Where it is a list, gradients of weights leave as they are formed, and it gets each one.
        visits: Whether it gets the beginnings and ends of modules too.
    """

    def __init__(
        self, tape: Tape, mode: Mode, entry: Value | None, recomputation: Recomputation, live: Sink | None = None
    ) -> None:
        self.tape, self.mode, self.recomputation = tape, mode, recomputation
        self.checkpointing = recomputation.kind
        self.live: Sink = live or LiveBytes(tape.storages)
        self.gradients: dict[int, int] = {}
        self.views: set[int] = set()
        self.instants: list[Instant] = []
        self.marks: list[Mark] | None = None
        self.visits = False
        self.cache: set[int] = set()
        self.region: set[int] = set()
        packing = [index for index, item in enumerate(tape.operations) if item.node is not None and item.node.packs]
        self.first_packing = tape.operations[packing[0]].node if packing else None
        self.last_packing = packing[-1] if packing else -1
        self.to_recompute = recomputation.kind != "none" and bool(packing)
        self.entry = entry if self.to_recompute else None
        self.escaping = recomputation.kind == "none" or not recomputation.reentrant
        self.escaped: dict[int, int] = {}

    # ---------------------------------------------------------------- forward
    def forward(self, *, saves: bool) -> None:
        """Play all operations, and save for backward what checkpointing says."""
        named = self._given()
        graph = saves and self.checkpointing == "none"
        unnamed_after = self._unnamed_after(graph)
        cached = self._cached() if saves and self.checkpointing == "selective" and self.to_recompute else ()
        if self.entry is not None and saves:
            self.live.retain(self.entry.storage)
        instant = "forward"
        for index, operation in enumerate(self.tape.operations):
            if index == self.tape.region_end:
                self.live.release_all(named & self.tape.regional)
                named -= self.tape.regional
                instant = BEHIND_REGION
            self._begin(index, "forward", instant)
            self._make(operation, instant, named)
            if graph or (saves and self._escapes(operation)):
                self._save(operation)
            elif index in cached:
                self.cache.update(operation.makes)
                self.live.retain_all(operation.makes)
            self._forget(named, unnamed_after.get(index, ()))
            self._end(operation, "forward")
        self.live.release_all(named - self.tape.regional)
        self.region = named & self.tape.regional

    def _escapes(self, operation: Operation) -> bool:
        """Tell whether an operation saves its tensors though it is computed again."""
        return self.escaping and operation.node is not None and operation.node.traits.escapes

    def _cached(self) -> set[int]:
        """Return the indices of the operations whose results selective checkpointing saves."""
        products = [index for index, item in enumerate(self.tape.operations) if item.traits.product]
        matrices = [index for index in products if self.tape.operations[index].traits.matrices]
        return set(products) - set(matrices[1::2] if self.recomputation.alternate else ())

    def region_ends(self) -> Form:
        """Let go of what autocast has cast; return what goes with it."""
        if not self.region:
            return ZERO
        before = self.live.form()
        self.live.release_all(self.region)
        self.region = set()
        return before - self.live.form()

    def recompute(self, instant: str) -> None:
        """Play the operations again, up to where everything that backward needs is there."""
        named, unnamed_after = self._given(), self._unnamed_after(graph=True)
        operations, whole = self.tape.operations, self.recomputation.whole
        self._set_aside(operations, named)
        last = operations[self.last_packing]
        stop = len(operations) if whole else self.last_packing + last.saves_last
        for index, operation in enumerate(operations[:stop]):
            self._begin(index, "again", instant)
            self._make(operation, instant, named)
            if not self._escapes(operation):
                self._save(operation)
                self._mark_saved(operation)
            self._forget(named, unnamed_after.get(index, ()))
            if whole or operation is not last:
                self._end(operation, "again")
        if not last.saves_last and not whole:
            self._begin(stop, "again", instant)
            self._save(last)
            self._mark_saved(last)
        self.live.release_all(named)

    def _begin(self, index: int, way: Way, instant: str) -> None:
        """Mark the module that begins with an operation."""
        if self.visits and (name := self.tape.entered.get(index) or module_of(self.tape.operations[index])):
            self._mark(way, name, instant)

    def _mark(self, way: Way, name: str, instant: str) -> None:
        assert self.marks is not None
        self.note(instant, "gather")
        self.marks.append(Mark(len(self.instants) - 1, way, name))

    def _mark_saved(self, operation: Operation) -> None:
        """Mark that the hooks of checkpointing hold a module's weights; a graph of its own has the parameters themselves."""
        if (
            self.visits
            and self.marks is not None
            and operation.weights
            and operation.node
            and not self.recomputation.reentrant
        ):
            self.marks.append(Mark(len(self.instants), "saved", module_of(operation)))

    def _end(self, operation: Operation | Node, way: Way) -> None:
        """Mark the end of the module that an operation stands for."""
        if self.visits and self.marks is not None and operation.weights:
            kind: Literal["left forward", "left again", "left backward"] = f"left {way}"  # type: ignore[assignment]
            self.marks.append(Mark(len(self.instants), kind, module_of(operation)))

    def escaping_storages(self) -> tuple[int, ...]:
        """Return what nodes hold as attributes until the graph of the loss goes; a backward of its own has its own graph."""
        nodes = [node for node in self.tape.nodes if node.traits.escapes] if self.escaping else []
        return tuple(dict.fromkeys(self.escaped.get(own, own) for node in reversed(nodes) for own in node.saved))

    def escaped_form(self) -> Form:
        """Return the bytes of these."""
        return sum((single_form(*self.live.storages[own]) for own in self.escaping_storages()), ZERO)

    def _set_aside(self, operations: Sequence[Operation], given: set[int]) -> None:
        """Keep what forward's nodes hold apart from what is computed again, unless it is given."""
        held = [item.node.saved for item in operations if item.node is not None and self._escapes(item)]
        for storage in {storage for saved in held for storage in saved} - given:
            self.escaped[storage] = self.live.set_aside(storage)

    def reenter(self, output: Value) -> tuple[int, ...]:
        """Compute everything again before backward begins; return what that has names for until it ends."""
        if not self.to_recompute or self.entry is None:
            return ()
        self.to_recompute = False
        named = (self.gradients[id(output)], self.entry.storage, output.storage)
        self.live.retain_all(named[:2])
        self.recompute(self.tape.nodes[-1].instant)
        self.live.retain(output.storage)
        return named

    def _given(self) -> set[int]:
        """Return the storages that are there before the first operation."""
        named = {storage for storage, last in self.tape.last_use.items() if last == FOREVER} | self.tape.given_until
        self.live.retain_all(named)
        return named

    def _unnamed_after(self, graph: bool) -> dict[int, list[int]]:
        """Return, for the index of an operation, the storages that nothing names after it.

        Args:
            graph: Whether a graph is built, which may name storages longer than forward does.
        """
        uses, regional = self.tape.graph_use if graph else {}, self.tape.regional
        storages: dict[int, list[int]] = {}
        for storage, last in self.tape.last_use.items():
            if storage not in regional:
                storages.setdefault(max(last, uses.get(storage, 0)), []).append(storage)
        return storages

    def _make(self, operation: Operation, instant: str, named: set[int]) -> None:
        """Allocate what an operation makes; a result that selective checkpointing has saved is there already."""
        decoded = self._decoded(operation.weights, instant, operation.name)
        for weight in operation.weights:
            if decoding := weight.decoding_again if weight.decoded_alike else weight.decoding:
                self.with_scratch(instant, operation.name, decoding)
        for storage in operation.makes:
            if storage in self.cache:
                self.cache.remove(storage)
            else:
                self.live.retain(storage)
        named.update(operation.makes)
        if operation.traits.product and not operation.traits.escapes:  # bitsandbytes has a workspace of its own
            self.live.multiply(with_bias=len(operation.weights) > 1)
        scratch = _temporaries(operation.traits.scratch)
        if decoded:
            scratch += [scale for w in operation.weights if not w.decoded_alike for scale in w.scales * 2]
        self.with_scratch(instant, operation.name, scratch)
        self.live.give_back(decoded)

    def _decoded(self, weights: Sequence[Weight], instant: str, name: str) -> Sequence[Storage]:
        """Allocate the copies of weights that a product reads, operators of torch forming them from temporaries."""
        parts = [(Part.TEMPORARIES, Quantity.ONE, size) for weight in weights for size in weight.decoding_parts]
        temporaries = self.live.take(parts)
        decoded = self.live.take([(Part.TEMPORARIES, Quantity.ONE, w.copy_bytes) for w in weights if not w.copy_saved])
        if parts:
            self.note(instant, name)
            self.live.give_back(temporaries)
        return decoded

    def _save(self, operation: Operation) -> None:
        if operation.node is not None:
            self.live.retain_all(operation.node.saved)

    def _forget(self, named: set[int], storages: Sequence[int]) -> None:
        """Drop the storages that nothing names any more."""
        for storage in storages:
            if storage in named:
                named.remove(storage)
                self.live.release(storage)

    # ---------------------------------------------------------------- backward
    def backward(self, output: Value) -> int:
        """Play backward from the gradient of ``output``; return its storage."""
        arriving = self.start(output)
        named = self.reenter(output) if self.recomputation.reentrant else ()
        for node in reversed(self.tape.nodes):
            self.run(node)
        if self.marks is not None and self.visits and self.gradients:  # what the part was given needs one
            self.marks.append(Mark(len(self.instants), "left backward", ""))
        self.live.release_all(named)
        return arriving

    def start(self, output: Value) -> int:
        """Begin backward with the gradient of ``output``; return its storage."""
        arriving = self.live.arrive(self.gradient_part(output), output.quantity, output.coefficient)
        self.gradients[id(output)] = arriving
        self.note("", "start")
        if self.visits:
            self._mark("backward", "", self.tape.nodes[-1].instant)
        return arriving

    def gradient_part(self, value: Value) -> Part:
        """Gradients of logits are logits; other gradients of activations are temporaries."""
        return Part.LOGITS if self.live.storages[value.storage][0] is Part.LOGITS else Part.TEMPORARIES

    def note(self, name: str, operation: str, reduces: Reduction | None = None) -> None:
        """Note what is alive now."""
        self.instants.append(Instant(name, operation, self.live.form(), 0, reduces))

    def run(self, node: Node) -> None:
        """Run the backward of one operation; the first that needs what was not saved has it computed again."""
        arrived = [g for g in [self.gradients.pop(id(value), None) for value in node.outputs] if g is not None]
        if arrived:
            if self.visits and (name := module_of(node)):
                self._mark("backward", name, node.instant)
            self.form(node, arrived)
            if node.inputs:
                self._end(node, "backward")
        else:
            self.unsave(node)

    def unsave(self, node: Node) -> None:
        """Let go of what a node has saved, and after the last that saved something of what checkpointing did."""
        if self.to_recompute:
            return
        if not node.traits.escapes:
            self.live.release_all(node.saved)
        if node is not self.first_packing:
            return
        self.live.release_all(self.cache)
        self.cache = set()
        if self.entry is not None:
            self.live.release(self.entry.storage)

    def form(self, node: Node, arrived: list[int]) -> None:
        """Form the gradients of a node's inputs and weights."""
        # A product with codes asks for what it saved only once its input's gradient is there (memplan/trace/reference/weight_storage.py).
        late = any(w.coded for w in node.weights) and not node.traits.packs
        if not late:
            self.recompute_for(node)
        early = self._taken(node) if node.traits.forms_last else []
        first = self.weight_gradients(node) if node.weight_first else []
        if first:
            self.live.multiply()
        decoded = self._decoded(node.weights, node.instant, node.name)
        for weight in node.weights:
            if again := weight.decoding_again:
                self.with_scratch(node.instant, node.name, again)
        formed = self.input_gradients(node, arrived)
        if node.inputs and any(weight.coded or not node.traits.custom for weight in node.weights):
            self.live.multiply()
        if decoded:
            self.note(node.instant, node.name)
        self.live.give_back(decoded)
        if late:
            self.recompute_for(node)
        self.finish(node, arrived, formed, first or self.weight_gradients(node), early)

    def weight_gradients(self, node: Node) -> list[tuple[Weight, int]]:
        """Form the gradients of a node's weights; return them with their storages."""
        trained = [weight for weight in node.weights if weight.trainable]
        if made := node.traits.made[len(node.traits.made) - len(trained) :]:
            self.live.retain_all(value.storage for value in made)
            return [(weight, value.storage) for weight, value in zip(trained, made, strict=True)]
        return [(weight, self.live.new(Part.GRADIENTS, Quantity.ONE, weight.formed_bytes)) for weight in trained]

    def input_gradients(self, node: Node, arrived: list[int]) -> list[tuple[Value, int]]:
        """Form the gradients of a node's inputs; return them with their storages."""
        formed: list[tuple[Value, int]] = []
        made = iter(node.traits.made)
        for value, how in node.inputs:
            if how is OVER:
                over = next(made, value).storage
                self.live.retain(over)
                formed.append((value, over))
            elif how is SAME:
                self.live.retain(arrived[0])
                formed.append((value, arrived[0]))
            else:
                size = value.gradient_coefficient or value.coefficient
                formed.append((value, self.live.new(self.gradient_part(value), value.quantity, size)))
                if how is VIEW:
                    self.views.add(formed[-1][1])
        return formed

    def recompute_for(self, node: Node) -> None:
        """Compute again what was not saved, where a node is the first to need any of it."""
        if node.packs and self.to_recompute:
            self.recompute(node.instant)
            self.to_recompute = False

    def finish(
        self,
        node: Node,
        arrived: list[int],
        formed: list[tuple[Value, int]],
        trained: list[tuple[Weight, int]],
        early: Sequence[Storage] = (),
    ) -> None:
        """Let go of what a node saved once gradients are formed, store those of its weights, and hand the others on."""
        reduces = node.traits.reduces
        # What was computed again is let go as it is unpacked; other saved tensors after gradients are reduced.
        again = self.checkpointing != "none" and not self.recomputation.reentrant
        late = again and (reduces is not None or bool(node.traits.casts))
        taken = early or self._taken(node)
        uncast = self.live.take(_temporaries([(q, -size) for q, size in node.traits.casts]) if again else [])
        self._note_sums(node, None if again else reduces)
        self.live.give_back(uncast)
        if not late:
            self.live.give_back(taken)
        for weight, gradient in trained:
            if weight.coded:
                self.store(node, weight, gradient)
        if not again:
            self.live.release_all(arrived)  # a function of torch returns before its node lets go of what it saved
        self.unsave(node)
        if late:
            self._note_sums(node, reduces)
            self.live.give_back(taken)
        if again:
            self.live.release_all(arrived)
        for weight, gradient in trained:
            if not weight.coded:
                self.store(node, weight, gradient)
        for value, gradient in formed:
            self.accumulate(node, value, gradient)

    def with_scratch(self, instant: str, operation: str, scratch: Sequence[Storage]) -> None:
        """Note the moment at which an operation's scratch memory is there."""
        taken = self.live.take(scratch)
        self.note(instant, operation)
        self.live.give_back(taken)

    def _taken(self, node: Node) -> Sequence[Storage]:
        """Allocate what a backward takes for itself; a function written in Python multiplies when it has that."""
        taken = self.live.take(_temporaries(node.traits.workspace))
        if node.traits.custom and any(weight.is_matrix for weight in node.weights):
            self.live.multiply()
        return taken

    def _note_sums(self, node: Node, reduces: Reduction | None) -> None:
        """Note what is alive while a node forms the sum over rows that it may have."""
        if reduces is not None:
            self.live.reduce(reduces)
        self.note(node.instant, node.name, reduces)

    def store(self, node: Node, weight: Weight, formed: int) -> None:
        """Store, add or use up a weight's gradient, which has just been formed."""
        if self.marks is not None and not weight.delayed:
            self.note(node.instant, f"{weight.name} gradient")
            self.marks.append(Mark(len(self.instants) - 1, "gradient", weight.name))
            self.live.release(formed)
            return
        mode = weight.own_mode(self.mode)
        if weight.delayed:
            mode = "first"
        elif weight.shared and self.mode != "layer":
            mode = "again"
        if isinstance(self.live, EventRecorder):
            self.live.store(weight, mode, formed)
            return
        stored = weight.gradient_bytes if mode == "first" else 0
        stays: int | None = formed
        if stored != weight.formed_bytes or weight.converted:
            stays = self.live.new(Part.GRADIENTS, Quantity.ONE, stored) if stored else None
        if extra := weight.storing_bytes(mode):
            rest = extra - (stored if stays != formed else 0)
            taken = self.live.take(scratch_pieces(rest, weight.own_bytes if self.mode == "layer" else rest))
            self.note(node.instant, f"{weight.name} gradient")
            self.live.give_back(taken)
        if stays is not None:
            self.live.keep(weight.name, stays)
        if weight.summed:
            self.live.hand_on(weight.name, formed)
        elif stays != formed:
            self.live.release(formed)

    def accumulate(self, node: Node, value: Value, gradient: int) -> None:
        """Add a gradient to what the value has already, in place where nobody else refers to that."""
        previous = self.gradients.get(id(value))
        if previous is None:
            self.gradients[id(value)] = gradient
            return
        if self.live.is_shared(previous) or previous in self.views:
            total = self.live.new(self.gradient_part(value), value.quantity, value.coefficient)
            self.note(node.instant, f"{node.name} sum")
            self.live.release(previous)
            self.gradients[id(value)] = total
        self.live.release(gradient)


def _temporaries(sizes: Sizes) -> list[Storage]:
    """Return sizes as storages of temporaries."""
    return [(Part.TEMPORARIES, *item) for item in sizes]
