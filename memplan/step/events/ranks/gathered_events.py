"""The events of units around the parts of a step: gathered before they run, let go of behind, their gradients reduced.

Each CUDA stream has memory of its own, which serves no other; what is gathered and reduced comes from streams beside the one that computes.

Source:
    ``FSDPParamGroup`` in torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, ``foreach_all_gather`` and
    ``foreach_reduce`` in _fsdp_collectives.py; ``_unshard``, ``_post_backward_hook`` and ``_reduce_grad`` in
    torch/distributed/fsdp/_runtime_utils.py (v2.13.0); ``DeviceCachingAllocator::get_free_block`` in
    c10/cuda/CUDACachingAllocator.cpp, which compares streams.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from memplan.catalog.config_keys.parallel_keys import Parallel
from memplan.step.collectives.gathered_units import Unit, UnitTensors
from memplan.step.events.event_stream import EventStream
from memplan.step.events.whole_model import WholeModel, first_and_last
from memplan.step.ranks.sharded_units import ShardedStep
from memplan.step.states.parallel_shards import in_layers, numbered
from memplan.step.tapes.taped_operations import Mode
from memplan.step.tower.tower_settings import is_of_tower
from memplan.units import ceil_div

COMPUTES, GATHERS, CASTS, REDUCES, AMONG_GROUPS = range(5)
"""Streams: that of all operators; of gathered weights, or the buffers they come in; of shards that are cast; of reductions; of those among groups."""


class Units(WholeModel):
    """Units of a rank's step.

    Args:
        stream: Where events are written to.
        step: The rank's step.
        parallel: How several GPUs train; groups that each have everything reduce among them on a stream of its own.
    """

    _comes_again = False  # Whether norm and head have gone behind forward, and are gathered again
    _context = 0  # What the numbers of streams begin behind, where there are several roots

    def __init__(self, stream: EventStream, step: ShardedStep, parallel: Parallel) -> None:
        self._stream, self._step, self._flat = stream, step, step.flat is not None
        self._first = UnitTensors(step.first)
        self._tail = UnitTensors(step.tail) if step.apart else self._first
        runs = zip(step.units, step.taped.runs, strict=True)
        layers = [UnitTensors(unit) for unit, run in runs for _ in range(run.count)]
        self._parts = [self._first, *layers, self._tail]
        self._rest = UnitTensors(step.rest) if step.rest else None
        tensors = in_layers(step.inputs.states.tensors)
        self._apart = {name for name, entry in tensors if entry.tensor.role == "expert_matrix"}
        # A rank alone divides its gradients by what a stack sets (``foreach_reduce``).
        self._divides = step.inputs.setup.stack.model_code == "torchtitan"
        self._last_buffer: list[int] = []  # In forward it lives until the next unit has been copied out of its own
        self._reducing: list[int] = []  # What a reduction reads, until the next one
        self._waiting: list[int] = []  # What groups reduce among them, until the end of backward
        self._micro_step, self._backward = 0, False
        self._ranks, self._casts_on = parallel.shards, AMONG_GROUPS if parallel.replicate > 1 else REDUCES

    def make_weights(self, sizes: Sequence[int], stream: EventStream) -> None:
        """Allocate the rank's shards; a flat tensor is put together on the device, of what is moved there, before it is cut.

        Source:
            ``_init_param_handle_from_module`` in torch/distributed/fsdp/_init_utils.py, ``flatten_tensors`` and ``shard`` in
            _flat_param.py (v2.13.0).
        """
        if not self._flat:
            stream.allocate_all(sizes)
            return
        left = sum(sizes)
        for unit in [*[tensors.unit for tensors in self._parts[1:-1]], self._step.first, *self._step.adapters.values()]:
            moved = stream.allocate_all(unit.tensor_bytes)
            whole = stream.allocate(sum(unit.tensor_bytes))
            shard = min(unit.kept_bytes or ceil_div(sum(unit.tensor_bytes), self._ranks), left)
            stream.allocate(shard)
            stream.free_all([whole, *moved])
            left -= shard
        stream.allocate(left)  # scales of codes, which no rank shares

    # ---------------------------------------------------------------- forward
    def mode(self, mode: Mode, micro_step: int) -> Mode:
        """Return ``again`` where micro-steps add to whole gradients; what is reduced, or put together, is formed anew."""
        if micro_step and self._step.reduces_last and not self._flat:
            return "again"
        return "first" if mode == "filled" else mode

    def micro_steps(self, count: int) -> Sequence[int]:
        """Return the micro-steps that are played."""
        return first_and_last(count)

    def begin(self, micro_step: int) -> None:
        """Gather what the model itself has, which stays to the end of backward."""
        self._micro_step, self._backward = micro_step, False
        for tensors in [*([self._rest] if self._rest else []), *([] if self._step.apart else [self._first])]:
            self._gather(tensors)
            self._copy_out(tensors)

    def enter(self, place: int) -> None:
        """Gather a layer, or an end that is a unit of its own."""
        tensors = self._parts[place]
        self._gather(tensors)
        self._copy_out(tensors)
        if self._step.prefetches and place < len(self._parts) - 1:
            self._gather(self._parts[place + 1])

    def leave(self, place: int) -> None:
        """Let go of it, if it does not stay."""
        stays = self._step.stays or (self._step.last_stays and place == len(self._parts) - 2)
        if not self._is_root(place) and not stays and place < len(self._parts) - 1:
            self._let_go(self._parts[place])

    def leave_head(self) -> None:
        """Let go of the last buffer, where the loss is formed outside the model."""
        if not self._step.loss_inside:
            self._free_last_buffer()

    def _free_last_buffer(self) -> None:
        self._stream.free_all(self._last_buffer)
        self._last_buffer = []

    # ---------------------------------------------------------------- backward
    def turn(self) -> None:
        """Let go of the last buffer, and gather the last layer ahead."""
        self._backward = True
        self._free_last_buffer()
        if self._step.root_again:  # let go of behind forward
            self._let_go(self._first)
            self._gather(self._first)
            self._copy_out(self._first)
        if self._at_once and self._prefetches("pre"):
            self._gather(self._parts[-2])

    def reach_head(self) -> None:
        """Gather the last layer ahead, where backward reaches the model only now."""
        if self._prefetches("pre"):
            self._gather(self._parts[-2])

    def enter_backward(self, place: int) -> None:
        """Gather a unit that is not there yet, and the next one ahead."""
        tensors = self._parts[place]
        if place < len(self._parts) - 1 or self._comes_again:
            self._gather(tensors)
            self._copy_out(tensors)
        if self._prefetches("pre") and 0 < place < len(self._parts) - 1:
            self._gather(self._parts[place - 1])

    def leave_backward(self, place: int, gradients: dict[str, int]) -> None:
        """Put a unit's gradients together, let go of its weights, and reduce; those of the root go at the end."""
        tensors, last = self._parts[place], self._is_last_micro_step
        if self._is_root(place) and place:
            return
        names = self._names(place, gradients) if last or self._flat else []
        resident = self._step.stays and not last
        for group in reversed(tensors.groups):
            apart = group is not tensors.groups[0]
            own = [gradients.pop(name) for name in names if len(tensors.groups) == 1 or (name in self._apart) == apart]
            added = self._together(group, own) if self._flat else []
            own = [group.flat] if self._flat else own
            if not resident:
                self._let_go(group)
            if self._prefetches("post") and place > 1:
                self._gather(self._parts[place - 1])
            if last and own:
                self._reduce(self._left_of(group), own, joins=group is not tensors.groups[-1])
            self._stream.free_all(added)
        if place == 0:
            self._end(gradients, last=last)

    def stepped(self) -> None:
        """Let go of the rank's share of all gradients, unless it is filled with zeros."""
        units = () if self._step.inputs.setup.leaves_gradients else self._all()
        for group in (group for tensors in units for group in tensors.groups):
            self._stream.free_all([] if group.share < 0 else [group.share])
            group.share = -1

    def _end(self, gradients: dict[str, int], *, last: bool) -> None:
        """End a backward: what the root has besides is reduced, and all that is gathered goes."""
        if self._rest is not None:
            self._let_go(self._rest)
            if last and gradients:
                self._reduce(self._rest, [gradients.pop(name) for name in [*gradients]])
        self._stream.free_all([*self._reducing, *self._waiting])
        self._reducing, self._waiting = [], []
        for tensors in self._all():
            self._let_go(tensors)

    # ---------------------------------------------------------------- units
    @property
    def _at_once(self) -> bool:
        """Whether backward reaches what the root returns, and gathers the last layer, as it begins."""
        step = self._step
        if self._comes_again:
            return False
        if step.flat:
            return not step.begins_behind_loss
        return (step.root_again and not step.loss_on_both_sides) or step.taped.head.logits is None or step.stays

    def _left_of(self, tensors: UnitTensors) -> UnitTensors:
        """Return what is reduced of a unit behind its backward: all of it."""
        return tensors

    @property
    def _is_last_micro_step(self) -> bool:
        """Whether gradients of this micro-step are reduced."""
        steps = self._step.inputs.setup.config.gradient_accumulation_steps
        return not self._step.reduces_last or self._micro_step == steps - 1

    def _is_root(self, place: int) -> bool:
        return self._parts[place] is self._first and not self._step.apart

    def _all(self) -> Iterable[UnitTensors]:
        """Return all units, each once."""
        units = *self._parts, *([self._rest] if self._rest else [])
        return {id(tensors): tensors for tensors in units}.values()

    def _prefetches(self, when: str) -> bool:
        """Tell whether the next unit is gathered before, or behind, the backward of one."""
        if self._step.stays:
            return False
        return when == "pre" if self._step.flat is None else self._step.flat.backward_prefetch == when

    def _names(self, place: int, gradients: dict[str, int]) -> list[str]:
        """Return the weights of a part that have gradients: all that are left, for the root."""
        if self._is_root(place) or (self._step.apart and place == 0):
            return [name for name in gradients if self._rest is None or not self._of_rest(name)]
        names = self._step.inputs.spec.names
        if place == len(self._parts) - 1:
            others = names.embedding, names.layer.partition("{}")[0]
            return [name for name in gradients if not name.startswith(others)]
        prefix = f"{numbered(names.layer, place - 1)}."
        return [name for name in gradients if name.startswith(prefix)]

    def _of_rest(self, name: str) -> bool:
        """Tell whether a weight is in the root's own unit beside those of the ends."""
        return name.startswith(f"{self._step.inputs.spec.names.positions}.") or is_of_tower(name)

    def _gather(self, tensors: UnitTensors) -> None:
        """Gather a unit into its buffers, in backward the last group first, or in place; nothing where it is there."""
        for group in reversed(tensors.groups) if self._backward else tensors.groups:
            if not (group.whole or group.buffer):
                self._gather_group(group)

    def _gather_group(self, tensors: UnitTensors) -> None:
        stream, unit, gathers = self._stream, tensors.unit, GATHERS + self._context
        if self._flat:
            cast = [stream.allocate(unit.copying_bytes, CASTS)] if unit.copying_bytes else []
            tensors.whole = [stream.allocate(unit.gathered_bytes, gathers)]
        else:
            cast = [stream.allocate(unit.cast_bytes, gathers)] if unit.cast_bytes and unit.buffer_bytes else []
            tensors.buffer = [stream.allocate(unit.buffer_bytes, gathers)]
        stream.free_all(cast)

    def _copy_out(self, tensors: UnitTensors) -> None:
        """Copy a unit out of its buffers, tensor by tensor; pieces of some are put in order from copies."""
        for group in [] if self._flat else [group for group in tensors.groups if not group.whole]:
            if group.unit.copying_bytes and not group.unit.buffer_bytes:
                self._cast_alone(group)
                continue
            times = 1 + bool(group.unit.reordered_bytes)
            made = self._stream.allocate_all(size for size in group.unit.tensor_bytes for _ in range(times))
            group.whole = made[::times]
            self._stream.free_all(made[1::times] if times > 1 else [])
            if self._backward:
                self._stream.free_all(group.buffer)
            else:
                self._free_last_buffer()
                self._last_buffer = group.buffer
            group.buffer = []

    def _cast_alone(self, tensors: UnitTensors) -> None:
        """Cast and copy a unit tensor by tensor, as one rank alone does: a cast goes when the next is there."""
        stream, cast = self._stream, list[int]()
        for size in tensors.unit.tensor_bytes:
            last, cast = cast, [stream.allocate(size)]
            stream.free_all(last)
            tensors.whole.append(stream.allocate(size))
        stream.free_all([*cast, *tensors.buffer])
        tensors.buffer = []

    def _let_go(self, tensors: UnitTensors) -> None:
        for group in reversed(tensors.groups):
            self._stream.free_all(group.whole)
            group.whole = []

    # ---------------------------------------------------------------- gradients
    def _together(self, tensors: UnitTensors, gradients: Sequence[int]) -> list[int]:
        """Put a flat tensor's gradients together in one; return it where it is added to that of micro-steps before, which autograd holds it through."""
        stream = self._stream
        stream.of("gradients")
        flat = stream.allocate(tensors.unit.reduced_bytes)
        stream.free_all(gradients)
        stream.of("temporaries")
        if tensors.flat < 0:
            tensors.flat = flat
            return []
        return [flat]

    def _last(self, unit: Unit, gradients: Sequence[int]) -> list[int]:
        """Return the last matrix's gradient, which a variable holds, as it is formed or as chunks are added up."""
        width = self._step.inputs.setup.compute_bytes
        sizes = unit.last_bytes, unit.last_bytes // width * self._step.reduced_width
        return [one for one in gradients if self._stream.sizes[one] in sizes][-1:]

    def _in_order(self, gradients: Sequence[int]) -> tuple[list[int], list[int]]:
        """Put pieces of gradients in order, one by one; return these copies, and the gradient that a variable holds."""
        stream, copies = self._stream, list[int]()
        for number, gradient in enumerate(gradients):
            copies.append(stream.allocate(stream.sizes[gradient]))
            stream.free_all(gradients[number - 1 : number] if number else [])
        return copies, [*gradients[-1:]]

    def _reduce(self, tensors: UnitTensors, gradients: Sequence[int], *, joins: bool = False) -> None:
        """Reduce a group's gradients to the rank's share of them; what it reads joins that of the unit's group before."""
        stream, unit, retained = self._stream, tensors.unit, list[int]()
        stream.of("communication")
        if not (self._flat or joins):
            stream.free_all(self._reducing)
            self._reducing = []
        if unit.reordered_bytes:
            gradients, retained = self._in_order(gradients)
        if self._flat:
            given = [stream.allocate(unit.narrow_bytes - unit.cast_bytes, REDUCES + self._context)] * (
                unit.narrow_bytes > unit.cast_bytes
            )
            reduced = unit.cast_bytes or unit.kept_bytes
        else:
            self._reducing = [*self._reducing, stream.allocate(unit.reduced_bytes)]
            given = [] if retained else self._last(unit, gradients)
            stream.free_all(one for one in gradients if one not in given)
            reduced = unit.narrow_bytes or unit.kept_bytes
        stream.of("gradients")
        shard = stream.allocate(reduced, REDUCES + self._context)
        if self._divides and not unit.buffer_bytes:
            stream.free(stream.allocate(unit.reduced_bytes, REDUCES + self._context))
        wait = self._waiting.append if unit.waiting_bytes(new=tensors.share < 0) else stream.free  # for other groups
        if reduced != unit.kept_bytes:
            wide = stream.allocate(unit.kept_bytes, self._casts_on + self._context)
            wait(shard)
            shard, wait = wide, stream.free
        stream.free_all([*given, *retained, *(gradients if self._flat else ())])
        tensors.flat = -1
        stream.of("temporaries")
        if tensors.share >= 0:
            wait(shard)  # added to what micro-steps before have left
        else:
            tensors.share = shard
