"""The events of units around the parts of a step: gathered before they run, let go of behind, their gradients reduced.

Source:
    ``pre_forward``, ``post_forward``, ``pre_backward`` and ``post_backward`` in
    torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, ``_pre_forward``, ``_post_forward``, ``_pre_backward_hook`` and
    ``_post_backward_hook`` in torch/distributed/fsdp/_runtime_utils.py (v2.13.0).
"""

from collections.abc import Callable, Iterator

from memplan.step.collectives.gathered_units import UnitTensors
from memplan.step.events.around_step import Around, first_and_last
from memplan.step.events.ranks.chunked_gradients import ChunkedHead
from memplan.step.events.ranks.unit_events import UnitEvents
from memplan.step.ranks.forwards_alone import gathers_tail_again
from memplan.step.ranks.lone_head import goes_before_norm
from memplan.step.ranks.stored_head import names_in_units
from memplan.step.states.parallel_shards import in_layers, numbered


class GatheredParts:
    """Gathers the units of a rank's step as its parts run.

    Args:
        head: What adds up gradients of a head that is reduced by itself; None where it is reduced with its unit.
    """

    def __init__(self, units: UnitEvents, head: ChunkedHead | None) -> None:
        self._units, self._step, self._parts, self._head = units, units.step, units.parts, head
        tensors = in_layers(units.step.inputs.states.tensors)
        self._apart = {name for name, entry in tensors if entry.tensor.role == "expert_matrix"}
        self._refers = False  # Whether a model runs whose units these are not
        self._lone = goes_before_norm(self._step)  # Whether a frozen head is a unit alone

    def around(self) -> Around:
        """Return what is written around the parts."""
        units = self._units
        return Around(
            make_weights=units.make_weights,
            mode=units.mode,
            micro_steps=first_and_last,
            begin=units.begin,
            enter=self.enter,
            leave=self.leave,
            evaluated=self.evaluated,
            leave_head=self.leave_head,
            refer=self.refer,
            turn=self.turn,
            reach_head=self.reach_head,
            enter_backward=self.enter_backward,
            leave_backward=self.leave_backward,
            visit=self.visit if self._lone else None,
            visits_layers=False,
            stepped=units.stepped,
            sums=self._head,
        )

    # ---------------------------------------------------------------- forward
    def enter(self, place: int) -> None:
        """Gather a layer, or an end that is a unit of its own."""
        if self._refers:
            return
        if not (self._lone and place == len(self._parts) - 1):
            self._units.take(self._parts[place])
        if self._step.prefetches and place < len(self._parts) - 1:
            self._units.gather(self._parts[place + 1])

    def leave(self, place: int) -> None:
        """Let go of it, if it does not stay."""
        if self._refers:
            return
        stays = self._step.stays or (self._step.last_stays and place == len(self._parts) - 2)
        if not self._units.is_root(place) and not stays and place < len(self._parts) - 1:
            self._units.let_go(self._parts[place])
        if self._head is not None and place == len(self._parts) - 1:
            self._head.leave()

    def evaluated(self, batches: int) -> Iterator[int]:
        """Yield the first of a batch and the next, which finds what no backward has let go of."""
        for batch in range(max(batches, 2)):
            self._units.begin(0)
            yield batch
            self._units.free_last_buffer()
            if self._step.root_again or self._step.head_by_hand:
                self._units.let_go(self._units.tail)

    def leave_head(self) -> None:
        """Let go of the last buffer, where the loss is formed outside the model."""
        if not self._step.loss_inside:
            self._units.free_last_buffer()

    def refer(self, play: Callable[[], None]) -> None:
        """Write the forward of a reference model: all of it is gathered before, or its units are the model's."""
        units, own = self._units, self._step.reference
        units.free_last_buffer()
        whole = UnitTensors(own) if own else None
        if whole:
            units.take(whole)
        self._refers = whole is not None
        play()
        self._refers = False
        units.free_last_buffer()
        if whole:
            units.let_go(whole)

    # ---------------------------------------------------------------- backward
    def turn(self) -> None:
        """Let go of the last buffer, and gather the last layer ahead."""
        self._units.backward = True
        self._units.free_last_buffer()
        if self._step.root_again:  # let go of behind forward
            self._units.let_go(self._units.first)
            self._units.take(self._units.first)
        if self._at_once and self._prefetches("pre"):
            self._units.gather(self._parts[-2])

    def reach_head(self) -> None:
        """Gather the last layer ahead, where backward reaches the model only now."""
        if self._prefetches("pre") and self._step.hooks_outputs:
            self._units.gather(self._parts[-2])

    def enter_backward(self, place: int) -> None:
        """Gather a unit that is not there yet, and the next one ahead."""
        step = self._step
        unreached = step.apart and place == 0 and step.taped.leaf is None and not step.first.reduced_bytes
        if (place < len(self._parts) - 1 or self._head is not None) and not unreached:
            self._units.take(self._parts[place])
        if self._prefetches("pre") and 0 < place < len(self._parts) - 1:
            self._units.gather(self._parts[place - 1])
        units = self._units
        if place == 0 and not units.rest and (gathers_tail_again(step) or (step.leaves_tail and not units.micro_step)):
            units.gather(units.tail)  # the last unit of a forward without gradients, as if backward were to run it next

    def visit(self, kind: str, name: str) -> None:
        """Gather a head that is a unit alone behind the norm, and let go of it before the norm's backward."""
        if name != self._step.inputs.spec.names.head or self._refers:
            return
        if kind == "forward":
            self._units.take(self._units.tail)
        elif kind == "left backward":
            self._units.let_go(self._units.tail)

    def leave_backward(self, place: int, gradients: dict[str, int]) -> None:
        """Put a unit's gradients together, let go of its weights, and reduce; those of the root go at the end."""
        tensors, last = self._parts[place], self._units.is_last_micro_step
        if self._units.is_root(place) and place:
            return
        names = self._names(place, gradients) if last or self._units.is_flat else []
        resident = self._step.stays and not last
        for group in reversed(tensors.groups):
            apart = group is not tensors.groups[0]
            own = [gradients.pop(name) for name in names if len(tensors.groups) == 1 or (name in self._apart) == apart]
            added = self._units.together(group, own) if self._units.is_flat else []
            own = [group.flat] if self._units.is_flat else own
            if not resident:
                self._units.let_go(group)
            if self._prefetches("post") and place > 1:
                self._units.gather(self._parts[place - 1])
            if last and own:
                left = group if self._head is None else self._head.left_of(group)
                self._units.reduce(left, own, joins=group is not tensors.groups[-1])
            self._units.stream.free_all(added)
        if place == 0:
            self._units.end(gradients)

    # ---------------------------------------------------------------- units
    @property
    def _at_once(self) -> bool:
        """Whether backward reaches what the root returns, and gathers the last layer, as it begins."""
        step = self._step
        if self._head is not None:  # gathers norm and head itself
            return False
        if step.flat:
            return not step.begins_behind_loss
        within = step.taped.head.logits is None and step.hooks_outputs
        return (step.root_again and not step.loss_on_both_sides) or within or step.stays

    def _prefetches(self, when: str) -> bool:
        """Tell whether the next unit is gathered before, or behind, the backward of one."""
        if self._step.stays:
            return False
        return when == "pre" if self._step.flat is None else self._step.flat.backward_prefetch == when

    def _names(self, place: int, gradients: dict[str, int]) -> list[str]:
        """Return the weights of a part that have gradients: all that are left, for the root, but for those of its own unit beside the ends'."""
        inputs, names = self._step.inputs, self._step.inputs.spec.names
        prefix = f"{numbered(names.layer, place - 1)}."
        if 0 < place < len(self._parts) - 1:
            return [name for name in gradients if name.startswith(prefix)]
        own = "" if self._units.rest is None else names_in_units(inputs.spec, inputs.setup)
        others = (names.embedding, names.layer.partition("{}")[0]) if place else ()
        return [name for name in gradients if name.startswith(own) and not name.startswith(others)]
