"""A tape played: what is alive at each moment of forward, and of what is computed again.

Source: pytorch torch/csrc/autograd/engine.cpp and input_buffer.cpp, torch/utils/checkpoint.py (v2.13.0).
"""

from collections.abc import Callable, Sequence
from typing import Literal

from memplan.step.playing.recomputation import Mark, Recomputation, Way, module_of
from memplan.step.tapes.event_recorder import EventRecorder
from memplan.step.tapes.linear_forms import ZERO, Form, Part, Quantity, Storage, single_form
from memplan.step.tapes.live_bytes import LiveBytes
from memplan.step.tapes.moments import BEHIND_REGION, Instant
from memplan.step.tapes.tape import FOREVER, Tape
from memplan.step.tapes.taped_operations import Mode, Node, Operation, Reduction, Sizes, Value, Weight

Sink = LiveBytes | EventRecorder
"""What a player tells of every storage: one counts bytes, the other writes events down."""


class Player:
    """Plays a tape: forward, and what checkpointing computes again; :func:`play_backward` plays backward.

    Args:
        mode: What becomes of weight gradients.
        entry: What the part is given; checkpointing saves it until backward is done.
        recomputation: What forward saves, and what is computed again.
        live: What is told of every storage: one that counts by default, or one that writes events down.

    Attributes:
        marked: Takes down marks; where there is one, gradients of weights leave as they are formed, and it gets each.
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
        self.marked: Callable[[Mark], None] | None = None
        self.visits = False
        self.between = False
        self.cache: set[int] = set()
        self.region: set[int] = set()
        self.region_left: Callable[[], object] = set  # Called where a region of autocast ends within forward
        packing = [index for index, item in enumerate(tape.operations) if item.node is not None and item.node.packs]
        self.first_packing = tape.operations[packing[0]].node if packing else None
        self.last_packing = packing[-1] if packing else -1
        self.to_recompute = recomputation.kind != "none" and bool(packing)
        self.entry = entry if self.to_recompute else None
        self.escaping = recomputation.kind == "none" or not recomputation.reentrant
        self.escaped: dict[int, int] = {}
        self.lingering: Sequence[Storage] = ()
        self.staying: tuple[int, ...] = ()

    # ---------------------------------------------------------------- forward
    def forward(self, *, saves: bool) -> None:
        """Play all operations, and save for backward what checkpointing says."""
        named = self._given()
        graph = saves and self.checkpointing == "none"
        unnamed_after = self._unnamed_after(graph)
        cached = self._cached() if saves and self.to_recompute else ()
        if self.entry is not None and saves and not self.tape.waits:
            self.live.retain(self.entry.storage)
        returned = self.tape.cached if self.tape.cache_stays and (graph or not saves) else set()
        self.live.retain_all(sorted(named & returned))
        called_with, instant = self.tape.called_with if cached else (), "forward"
        for index, operation in enumerate(self.tape.operations):
            if index == self.tape.region_end:
                self.live.release_all(named & self.tape.regional)
                named -= self.tape.regional
                self.region_left()
                instant = BEHIND_REGION
            self.between, instant = operation.between, self.tape.phases.get(index, instant)
            self._begin(index, "forward", instant)
            self._make(operation, instant, named)
            if saves and self._escapes(operation):
                self.live.retain_all(operation.node.attributes)  # type: ignore[union-attr]
            if graph:
                self._save(operation)
            elif index in cached:
                self.cache.update(operation.makes)
                self.live.retain_all(operation.makes)
                self.live.retain_all([own for own in operation.makes if own in called_with])
            self.live.retain_all([own for own in operation.makes if own in returned])
            self._forget(named, unnamed_after.get(index, ()))
            self.end(operation, "forward")
        self.live.release_all(named - self.tape.regional)
        self.region = named & self.tape.regional

    def saved_in_forward(self) -> set[int]:
        """Return the storages that stay behind forward, copies of weights aside."""
        if self.entry is None:
            return set(self.tape.saved_storages())
        cached = self._cached()
        made = {storage for index in cached for storage in self.tape.operations[index].makes}
        return {self.entry.storage, *made, *self.escaping_storages()}

    def _escapes(self, operation: Operation) -> bool:
        """Tell whether the graph of the loss has an operation's node, with its attributes, though it is computed again."""
        return self.escaping and operation.node is not None and bool(operation.node.attributes)

    def _cached(self) -> set[int]:
        """Return the indices of the operations whose results checkpointing saves."""
        called_with = set(range(len(self.tape.called_with)))  # the first ones make one each
        if self.checkpointing != "selective":
            return called_with
        products = [index for index, item in enumerate(self.tape.operations) if item.traits.product]
        matrices = [index for index in products if self.tape.operations[index].traits.matrices]
        if not self.recomputation.alternate:
            return set(products) | called_with
        batched = {index for index in products if self.tape.operations[index].traits.batched}
        return set(products) - set(matrices[1::2]) - batched | called_with

    def region_ends(self) -> Form:
        """Let go of what autocast has cast; return what goes with it."""
        if not self.region:
            return ZERO
        before = self.live.form()
        self.live.release_all(self.region)
        self.region = set()
        return before - self.live.form()

    def recompute(self, instant: str, returned: Sequence[int] = ()) -> None:
        """Play the operations again, up to where everything that backward needs is there.

        Args:
            returned: Storages of results that have a name when the function's own names for them go.
        """
        named, unnamed_after = self._given(), self._unnamed_after(graph=True)
        operations, whole = self.tape.operations, self.recomputation.whole
        self._set_aside(operations, named)
        last = operations[self.last_packing]
        stop = len(operations) if whole else self.last_packing + last.saves_last
        again: list[int] = []  # attributes of nodes of a graph that goes when all is computed again
        for index, operation in enumerate(operations[:stop]):
            if index == self.tape.stored_at:
                self.live.retain_all(sorted(self.tape.outlives))
            self.between = operation.between
            self._begin(index, "again", instant)
            self._make(operation, instant, named)
            self._save(operation)
            if operation.node is not None and self._escapes(operation):
                again += operation.node.attributes
                self.live.retain_all(operation.node.attributes)
            else:
                self.live.retain_all(operation.node.attributes if operation.node is not None else ())
                self._mark_saved(operation)
            if index == len(operations) - 1:
                self.live.retain_all(returned)
            self._forget(named, unnamed_after.get(index, ()))
            if whole or operation is not last:
                self.end(operation, "again")
        if not last.saves_last and not whole:
            self._begin(stop, "again", instant)
            self._save(last)
            self._mark_saved(last)
        for index in sorted(unnamed_after):  # frames go from the innermost on, as though all had returned
            self._forget(named, unnamed_after[index])
        self.staying = tuple(sorted(named & self.tape.regional)) if self.tape.region_stays else ()
        self.live.release_all(sorted(named.difference(self.staying)))
        self.live.release_all(again)

    def _begin(self, index: int, way: Way, instant: str) -> None:
        """Mark the module that begins with an operation."""
        if self.visits and (name := self.tape.entered.get(index) or module_of(self.tape.operations[index])):
            self.mark(way, name, instant)

    def mark(self, way: Way, name: str, instant: str) -> None:
        """Mark that a module begins, and note what is alive then."""
        assert self.marked is not None
        self.note(instant, "gather")
        self.marked(Mark(len(self.instants) - 1, way, name))

    def _mark_saved(self, operation: Operation) -> None:
        """Mark that the hooks of checkpointing hold a module's weights; a graph of its own has the parameters themselves."""
        if (
            self.visits
            and self.marked is not None
            and operation.weights
            and operation.node
            and not self.recomputation.reentrant
        ):
            self.marked(Mark(len(self.instants), "saved", module_of(operation)))

    def mark_unsaved(self, node: Node) -> None:
        """Mark that these hooks hold a module's weights no more."""
        if self.visits and self.marked is not None and node.weights:
            self.marked(Mark(len(self.instants), "unsaved", module_of(node)))

    def end(self, operation: Operation | Node, way: Way) -> None:
        """Mark the end of the module that an operation stands for."""
        if self.visits and self.marked is not None and operation.weights:
            kind: Literal["left forward", "left again", "left backward"] = f"left {way}"  # type: ignore[assignment]
            self.marked(Mark(len(self.instants), kind, module_of(operation)))

    def escaping_storages(self) -> tuple[int, ...]:
        """Return what nodes hold as attributes until the graph of the loss goes; a backward of its own has its own graph."""
        nodes = self.tape.nodes if self.escaping else []
        escaped = dict.fromkeys(self.escaped.get(own, own) for node in reversed(nodes) for own in node.attributes)
        escaped |= dict.fromkeys(self.tape.called_with if self.entry is not None and not self.escaping else ())
        return (*escaped, *sorted(self.tape.cached - escaped.keys())) if self.tape.cache_stays else tuple(escaped)

    def escaped_form(self) -> Form:
        """Return the bytes of these."""
        return sum((single_form(*self.live.storages[own]) for own in self.escaping_storages()), ZERO)

    def _set_aside(self, operations: Sequence[Operation], given: set[int]) -> None:
        """Keep what forward's nodes hold apart from what is computed again, unless it is given."""
        resident = [item.node.attributes for item in operations if item.node is not None and self._escapes(item)]
        for storage in {storage for saved in resident for storage in saved} - given:
            self.escaped[storage] = self.live.set_aside(storage)

    def reenter(self, output: Value) -> tuple[int, ...]:
        """Compute everything again before backward begins; return what that has names for until it ends."""
        if not self.to_recompute or self.entry is None:
            return ()
        self.to_recompute = False
        if self.tape.waits:
            self.live.retain(self.entry.storage)
        formed = [output.storage, *([] if self.tape.returned is None else [self.tape.returned.storage])]
        named = (self.gradients[id(output)], self.entry.storage, *self._zeros(), *formed)
        self.live.retain_all(named[:2])
        self.recompute(self.tape.nodes[-1].instant, formed)
        return (*named, *self.staying)

    def _zeros(self) -> tuple[int, ...]:
        """Make the gradient of zeros that a function is given for what it returns besides its output; nothing where it returns nothing."""
        # Source: ``PyNode::apply`` in torch/csrc/autograd/python_function.cpp (v2.13.0), which fills in gradients that
        # are undefined.
        value = self.tape.returned
        if value is None:
            return ()
        zeros = self.live.new(Part.TEMPORARIES, value.quantity, value.coefficient)
        self.live.retain(zeros)
        self.gradients[id(value)] = zeros
        return (zeros,)

    def _given(self) -> set[int]:
        """Retain the storages that are there before the first operation, and return them."""
        named = {storage for storage, last in self.tape.last_use.items() if last == FOREVER} | self.tape.given_until
        self.live.retain_all(named)
        return named

    def _unnamed_after(self, graph: bool) -> dict[int, list[int]]:
        """Return the storages that nothing names after each operation, by its index; results that nobody reads come first.

        Where a ``graph`` is built, it may name storages longer than forward does.
        """
        unread = {own: n for n, item in enumerate(self.tape.operations) if item.makes[1:] for own in item.makes}
        storages, uses = dict[int, list[int]](), self.tape.graph_use if graph else {}
        for storage, last_read in self.tape.last_use.items():
            if storage not in self.tape.regional:
                after = storages.setdefault(last := max(last_read, uses.get(storage, 0)), [])
                after.insert(0 if unread.get(storage) == last else len(after), storage)
        return storages

    def _make(self, operation: Operation, instant: str, named: set[int]) -> None:
        """Allocate what an operation makes; a result that selective checkpointing has saved is there already."""
        weights = operation.weights
        scales = (
            self.live.take([scale for w in weights if not w.decoded_alike for scale in w.scales * 2]) if weights else ()
        )
        decoded = self.decoded(weights, instant, operation.name) if weights else ()
        for weight in weights:
            if decoding := weight.decoding_again if weight.decoded_alike else weight.decoding:
                self.with_scratch(instant, operation.name, decoding)
        parts = self._taken_in_parts(operation.traits.decoding) if operation.traits.decoding else []
        scratch = temporaries(operation.traits.scratch)
        first = self.live.take(scratch if operation.traits.makes_last else ())
        saved = not self.cache.isdisjoint(operation.makes)
        for storage in operation.makes:
            if storage in self.cache:
                self.cache.remove(storage)
            else:
                self.live.retain(storage)
        if parts:
            self.note(instant, operation.name)
            self.live.give_back(parts[::-1])
        named.update(operation.makes)
        if operation.traits.product and not (operation.traits.own_workspace or saved):
            fused = len(weights) > 1 and not operation.traits.custom
            self.live.multiply(with_bias=fused or operation.traits.adds_bias)
        self.with_scratch(instant, operation.name, () if first else scratch)
        self.live.give_back(first)
        self.live.give_back(scales)
        self.live.give_back(decoded)

    def decoded(self, weights: Sequence[Weight], instant: str, name: str, *, again: bool = False) -> Sequence[Storage]:
        """Allocate the copies of weights that a product reads, for backward ``again``, operators of torch forming them."""
        parts: list[Storage] = []
        for weight in weights:
            alike = again or weight.decoded_alike
            parts += self._taken_in_parts(weight.decoding_parts_again if alike else weight.decoding_parts)
        decoded = self.live.take([(Part.TEMPORARIES, Quantity.ONE, w.copy_bytes) for w in weights if not w.copy_saved])
        if parts:
            self.note(instant, name)
            self.live.give_back(parts[::-1])
        return decoded

    def _taken_in_parts(self, sizes: Sequence[int]) -> list[Storage]:
        """Allocate temporaries in order, negative ones given back once the next is there; return those that are left, the first first."""
        staying: list[Storage] = []
        going: Sequence[Storage] = ()
        for size in sizes:
            taken = self.live.take([(Part.TEMPORARIES, Quantity.ONE, abs(size))])
            self.live.give_back(going)
            going = taken if size < 0 else ()
            staying += taken if size > 0 else ()
        return [*staying, *going]

    def _save(self, operation: Operation) -> None:
        if operation.node is not None:
            self.live.retain_all(operation.node.saved)

    def _forget(self, named: set[int], storages: Sequence[int]) -> None:
        """Drop the storages that nothing names any more."""
        for storage in storages:
            if storage in named:
                named.remove(storage)
                self.live.release(storage)

    # ---------------------------------------------------------------- moments
    def note(self, name: str, operation: str, reduces: Reduction | None = None) -> None:
        """Note what is alive now, unless that lies between what is at other moments; of two where one only adds, the larger."""
        if self.between:
            return
        if self.marked is None and self.instants and self.instants[-1].name == name:
            if reduces is None and not self.live.grown:
                return
            if self.instants[-1].reduces is None and not self.live.shrunk:
                self.instants.pop()
        self.instants.append(Instant(name, operation, self.live.form(), 0, reduces))
        self.live.noted()

    def with_scratch(self, instant: str, operation: str, scratch: Sequence[Storage]) -> None:
        """Note the moment at which an operation's scratch memory is there."""
        taken = self.live.take(scratch) if scratch else ()
        self.note(instant, operation)
        self.live.give_back(taken)


def temporaries(sizes: Sizes) -> list[Storage]:
    """Return sizes as storages of temporaries."""
    return [(Part.TEMPORARIES, *item) for item in sizes]
