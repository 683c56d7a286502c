"""Backward of a tape: gradients of its nodes, from the last to the first, and what is alive at each moment.

Source: pytorch torch/csrc/autograd/engine.cpp and input_buffer.cpp, torch/utils/checkpoint.py (v2.13.0).
"""

from collections.abc import Sequence

from memplan.step.playing.player import Player, temporaries
from memplan.step.playing.recomputation import Mark, module_of
from memplan.step.tapes.event_recorder import NO_STORAGE, EventRecorder
from memplan.step.tapes.linear_forms import Part, Quantity, Storage
from memplan.step.tapes.live_bytes import LiveBytes
from memplan.step.tapes.taped_operations import OVER, SAME, VIEW, Mode, Node, Reduction, Value, Weight


def play_backward(player: Player, output: Value) -> int:
    """Play backward from the gradient of ``output``; return its storage.

    Args:
        player: What has played forward; it notes the moments, and has the gradients of what the tape was given.
    """
    return _Backward(player).play(output)


class _Backward:
    """Backward of what a player has played forward."""

    def __init__(self, player: Player) -> None:
        self.player, self.live = player, player.live

    def play(self, output: Value) -> int:
        """Play backward from the gradient of ``output``; return its storage."""
        arriving = self.start(output)
        named = self.player.reenter(output) if self.player.recomputation.reentrant else ()
        for node in reversed(self.player.tape.nodes):
            self.run(node)
        if (
            self.player.marked is not None and self.player.visits and self.player.gradients
        ):  # what the part was given needs one
            self.player.marked(Mark(len(self.player.instants), "left backward", ""))
        self.live.release_all(named)
        return arriving

    def start(self, output: Value) -> int:
        """Begin backward with the gradient of ``output``; return its storage."""
        arriving = NO_STORAGE
        if output.needs_gradient:
            arriving = self.live.arrive(self.gradient_part(output), output.quantity, output.coefficient)
            self.player.gradients[id(output)] = arriving
        for value, size in self.player.tape.awaited:
            self.player.gradients[id(value)] = self.live.new(self.gradient_part(value), value.quantity, size)
        if self.player.to_recompute:
            self.player.lingering = self.live.take(temporaries(self.player.tape.lingers or ()))
        self.player.note("", "start")
        if self.player.visits:
            self.player.mark("backward", "", self.player.tape.nodes[-1].instant)
        return arriving

    @property
    def _unpacks(self) -> bool:
        """Whether hooks of checkpointing hold what nodes have saved."""
        return self.player.checkpointing != "none" and not self.player.recomputation.reentrant

    def gradient_part(self, value: Value) -> Part:
        """Gradients of logits are logits; other gradients of activations are temporaries."""
        return Part.LOGITS if self.live.storages[value.storage][0] is Part.LOGITS else Part.TEMPORARIES

    def run(self, node: Node) -> None:
        """Run the backward of one operation; the first that needs what was not saved has it computed again."""
        arrived = [g for g in [self.player.gradients.pop(id(value), None) for value in node.outputs] if g is not None]
        if arrived:
            if self.player.visits and (name := module_of(node)):
                self.player.mark("backward", name, node.instant)
            self.player.between = node.between
            self.form(node, arrived)
            if not self.player.to_recompute:
                self.live.give_back(self.player.lingering)
                self.player.lingering = ()
            if node.inputs:
                self.player.end(node, "backward")
        else:
            self.unsave(node)
            self.end_checkpoint(node)

    def unsave(self, node: Node) -> None:
        """Let go of what a node has saved."""
        if self.player.to_recompute:
            return
        # Variables that a checkpoint's hooks have unpacked go in the reverse order of their names.
        unpacked = self._unpacks and not node.traits.custom
        self.live.release_all(reversed(node.saved) if unpacked else node.saved)

    def end_checkpoint(self, node: Node) -> None:
        """Let go of what checkpointing has saved, after the last node that saved something."""
        if self.player.to_recompute or node is not self.player.first_packing:
            return
        self.live.release_all(self.player.cache)
        self.player.cache = set()
        if self.player.entry is not None and self.player.tape.lingers is None:
            self.live.release(self.player.entry.storage)
        if self.player.entry is not None and self.player.escaping:
            self.live.release_all(self.player.tape.called_with)

    def form(self, node: Node, arrived: list[int]) -> None:
        """Form the gradients of a node's inputs and weights."""
        # A product with codes asks for what it saved only once its input's gradient is there (memplan/trace/reference/weight_storage.py).
        late = any(w.coded for w in node.weights) and not node.traits.packs
        if not late:
            self.recompute_for(node)
        wide = node.traits.sums_last or (node.traits.forms_last and node.traits.reduces is not None)
        if wide and isinstance(self.live, EventRecorder):
            self._cast_wide(self.live, node, node.traits.reduces, arrived)
            return
        early = self._taken(node) if node.traits.forms_last else []
        if node.traits.gone:
            self.player.with_scratch(node.instant, node.name, temporaries(node.traits.gone))
        first = self.weight_gradients(node) if node.weight_first else []
        if first:
            self.live.multiply()
        decoded = self.player.decoded(node.weights, node.instant, node.name, again=True) if node.weights else ()
        for weight in node.weights:
            if again := weight.decoding_again:
                self.player.with_scratch(node.instant, node.name, again)
        formed = self.input_gradients(node, arrived)
        alone = not (node.traits.custom and node.traits.workspace)  # a product, and nothing before it
        if node.inputs and any(weight.coded or (alone and weight.is_matrix) for weight in node.weights):
            self.live.multiply()
        if decoded:
            self.player.note(node.instant, node.name)
        self.live.give_back(decoded)
        if late:
            self.recompute_for(node)
        self.finish(node, arrived, formed, first or self.weight_gradients(node), early)

    def _cast_wide(self, live: EventRecorder, node: Node, reduces: Reduction | None, arrived: list[int]) -> None:
        """Write the events of a product whose gradients are wide: the last input's is formed first, the first's summed and cast first."""
        # Source: ``mul_tensor_backward``, whose results are cast by ``validate_outputs`` in
        # torch/csrc/autograd/engine.cpp (v2.13.0).
        quantity, size = node.traits.workspace[0]
        wide = [live.new(Part.TEMPORARIES, quantity, size) for _ in node.inputs]
        if self._unpacks:
            self.unsave(node)
        formed = []
        for value, _ in node.inputs:
            gradient, own = wide.pop(), size
            if reduces is not None and value.quantity is Quantity.ONE:
                whole, own = gradient, size // reduces.columns * value.width
                gradient = live.new(Part.TEMPORARIES, Quantity.ONE, own)
                live.reduce(reduces)
                live.release(whole)
            if own != value.coefficient:
                whole, gradient = gradient, live.new(Part.TEMPORARIES, value.quantity, value.coefficient)
                live.release(whole)
            formed.append((value, gradient))
        live.release_all(arrived)
        if not self._unpacks:
            self.unsave(node)
        self.end_checkpoint(node)
        if self._unpacks:
            self.player.mark_unsaved(node)
        self._accumulate_all(node, formed)

    def weight_gradients(self, node: Node) -> list[tuple[Weight, int]]:
        """Form the gradients of a node's weights; return them with their storages."""
        trained = [weight for weight in node.weights if weight.trainable]
        if made := node.traits.made[len(node.traits.made) - len(trained) :]:
            self.live.retain_all(value.storage for value in made)
            return [(weight, value.storage) for weight, value in zip(trained, made, strict=True)]
        return [
            (weight, self.live.new(self.formed_part(weight), Quantity.ONE, weight.formed_bytes)) for weight in trained
        ]

    def formed_part(self, weight: Weight) -> Part:
        """A gradient is one once it is stored; one that is cast, added or waits for another is a temporary."""
        stays = not weight.delayed and weight.stays(self.mode_of(weight))
        return Part.GRADIENTS if stays else Part.TEMPORARIES

    def mode_of(self, weight: Weight) -> Mode:
        """Return how a weight's gradient fares."""
        if weight.delayed:
            return "first"
        if weight.shared and self.player.mode != "layer":
            return "again"
        return weight.own_mode(self.player.mode)

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
                    self.player.views.add(formed[-1][1])
        return formed

    def recompute_for(self, node: Node) -> None:
        """Compute again what was not saved, where a node is the first to need any of it."""
        if node.packs and self.player.to_recompute:
            hooked = self.player.entry if self.player.tape.lingers is not None else None
            self.live.retain_all(() if hooked is None else (hooked.storage,))
            self.player.recompute(node.instant)
            if hooked is not None and hooked.storage in self.player.tape.saved_storages():
                self.live.release(hooked.storage)  # its hook sees that what was computed again has it
            self.player.to_recompute = False

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
        # What was computed again is let go as it is unpacked, which a function in Python has names for; other saved tensors
        # after gradients are reduced.
        again = self._unpacks
        late = again and not node.traits.custom and (reduces is not None or bool(node.traits.casts))
        taken = early or self._taken(node)
        taken = (
            taken[::-1] if node.traits.custom else taken
        )  # a function in Python lets go of its names from the first on
        unsummed = [(value.quantity, -value.coefficient) for value, _ in node.inputs[1:] if node.traits.sums_last]
        later = self.live.take(temporaries(unsummed))
        uncast = self.live.take(temporaries([(q, -size) for q, size in node.traits.casts]) if again else [])
        self._note_sums(node, None if late else reduces)
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
        self.live.give_back(later)
        if again:
            self.live.release_all(arrived)
        self.end_checkpoint(node)
        if again:
            self.player.mark_unsaved(node)
        if not node.traits.stores_weights_first:
            self._accumulate_all(node, formed)
        for weight, gradient in reversed(trained) if node.traits.stores_weights_first else trained:
            if not weight.coded:
                self.store(node, weight, gradient)
        if node.traits.stores_weights_first:
            self._accumulate_all(node, formed)

    def _accumulate_all(self, node: Node, formed: Sequence[tuple[Value, int]]) -> None:
        for value, gradient in formed:
            self.accumulate(node, value, gradient)

    def _taken(self, node: Node) -> Sequence[Storage]:
        """Allocate what a backward takes for itself; a function written in Python multiplies when it has that."""
        workspace = temporaries(node.traits.workspace)
        taken = [*self.live.take(workspace[:1])]
        used = self.live.take(temporaries(node.traits.used_up))
        taken += self.live.take(workspace[1:])
        self.live.give_back(used)
        if node.traits.custom and any(weight.is_matrix for weight in node.weights):
            self.live.multiply()
        return taken

    def _note_sums(self, node: Node, reduces: Reduction | None) -> None:
        """Note what is alive while a node forms the sum over rows that it may have."""
        if reduces is not None:
            self.live.reduce(reduces)
        self.player.note(node.instant, node.name, reduces)

    def store(self, node: Node, weight: Weight, formed: int) -> None:
        """Store, add or use up a weight's gradient, which has just been formed."""
        if self.player.marked is not None and not weight.delayed and not isinstance(self.live, EventRecorder):
            self.player.note(node.instant, f"{weight.name} gradient")
            self.player.marked(Mark(len(self.player.instants) - 1, "gradient", weight.name))
            self.live.release(formed)
            return
        mode = self.mode_of(weight)
        if isinstance(self.live, EventRecorder):
            self.live.store(weight, mode, formed)
            return
        if mode in ("joins", "joins-again"):
            self.join(node, weight, formed, stays=mode == "joins")
            return
        made, extra = weight.made_bytes(mode), weight.storing_bytes(mode)
        stays: int | None = formed if mode == "first" else None
        if extra and weight.fullest_as_cast(mode):
            self.player.with_scratch(node.instant, f"{weight.name} gradient", temporaries([(Quantity.ONE, extra)]))
            extra = 0
        if mode == "first" and made:
            waits = weight.delayed and not weight.stays_summed(weight.own_mode(self.player.mode))
            stays = self.live.new(Part.TEMPORARIES if waits else Part.GRADIENTS, Quantity.ONE, made)
        if extra:
            used = made if mode == "layer" else 0
            taken = self.live.take(
                [(Part.GRADIENTS, Quantity.ONE, used), (Part.TEMPORARIES, Quantity.ONE, extra - made)]
            )
            self.player.note(node.instant, f"{weight.name} gradient")
            self.live.give_back(taken)
        if stays is not None:
            self.live.keep(weight.name, stays)
        if weight.summed:
            self.live.hand_on(weight.name, formed)
        elif stays != formed:
            self.live.release(formed)

    def join(self, node: Node, weight: Weight, formed: int, *, stays: bool) -> None:
        """Add a weight's gradient to one that waits, in place where that is a plain tensor: that of a product is a view of its transpose.

        Args:
            stays: Whether the sum waits in its turn, or is stored; it is added to what is there otherwise, and goes.
        """
        if size := weight.joining_bytes(product=node.traits.product):
            self.player.with_scratch(node.instant, f"{weight.name} gradient", [(Part.GRADIENTS, Quantity.ONE, size)])
        self.live.release(formed)
        if not stays and isinstance(self.live, LiveBytes):
            self.live.add(Part.GRADIENTS, Quantity.ONE, -weight.gradient_bytes)

    def accumulate(self, node: Node, value: Value, gradient: int) -> None:
        """Add a gradient to what the value has already, in place where nobody else refers to that, and it is a plain tensor.

        Source: ``accumulate`` in torch/csrc/autograd/input_buffer.cpp (v2.13.0), whose ``can_accumulate_inplace`` leaves subclasses out.
        """
        previous = self.player.gradients.get(id(value))
        if previous is None:
            self.player.gradients[id(value)] = gradient
            return
        if self.player.tape.sums_anew or self.live.is_shared(previous) or previous in self.player.views:
            total = self.live.new(self.gradient_part(value), value.quantity, value.coefficient)
            self.player.note(node.instant, f"{node.name} sum")
            self.live.release(previous)
            self.player.gradients[id(value)] = total
        self.live.release(gradient)
