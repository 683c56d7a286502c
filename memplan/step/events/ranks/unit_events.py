"""The events of a rank's units: what gathers one, lets go of it, and reduces its gradients.

Each CUDA stream has memory of its own, which serves no other; what is gathered and reduced comes from streams beside the one that computes.

Source:
    ``FSDPParamGroup`` in torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, ``foreach_all_gather`` and
    ``foreach_reduce`` in _fsdp_collectives.py; ``_unshard``, ``_post_backward_hook`` and ``_reduce_grad`` in
    torch/distributed/fsdp/_runtime_utils.py (v2.13.0); ``DeviceCachingAllocator::get_free_block`` in
    c10/cuda/CUDACachingAllocator.cpp, which compares streams.
"""

from collections.abc import Iterable, Sequence

from memplan.catalog.config_keys.parallel_keys import Parallel
from memplan.step.collectives.gathered_units import Unit, UnitTensors
from memplan.step.events.event_stream import EventStream
from memplan.step.ranks.sharded_units import ShardedStep
from memplan.step.tapes.taped_operations import Mode
from memplan.units import ceil_div

COMPUTES, GATHERS, CASTS, REDUCES, AMONG_GROUPS = range(5)
"""Streams: that of all operators; of gathered weights, or the buffers they come in; of shards that are cast; of reductions; of those among groups."""


class UnitEvents:
    """Writes what becomes of the units of a rank's step, whichever is gathered when.

    Args:
        parallel: How several GPUs train; groups that each have everything reduce among them on a stream of its own.

    Attributes:
        parts: Units of embedding, layers, and norm and head; an end that is no unit of its own is the root.
        more: Units within others, which go as these do.
        backward: Whether groups of a unit are gathered in the order of backward.
        context: What the numbers of streams begin behind, where there are several roots.
        micro_step: Number of the micro-step.
        waiting: What groups reduce among them, or hooks retain, until the end of backward.
    """

    def __init__(self, stream: EventStream, step: ShardedStep, parallel: Parallel) -> None:
        self.stream, self.step, self.is_flat = stream, step, step.flat is not None
        self.first = UnitTensors(step.first)
        self.tail = UnitTensors(step.tail) if step.apart else self.first
        runs = zip(step.units, step.taped.runs, strict=True)
        layers = [UnitTensors(unit) for unit, run in runs for _ in range(run.count)]
        self.parts = [self.first, *layers, self.tail]
        self.rest = UnitTensors(step.rest) if step.rest else None
        self.more: list[UnitTensors] = []
        # A rank alone divides its gradients by what a stack sets (``foreach_reduce``).
        self._divides = step.inputs.setup.stack.model_code == "torchtitan"
        self._last_buffer: list[int] = []  # In forward it lives until the next unit has been copied out of its own
        self._reducing: list[int] = []  # What a reduction reads, until the next one
        self.waiting: list[int] = []
        self.micro_step, self.backward, self.context = 0, False, 0
        self._ranks, self._casts_on = parallel.shards, AMONG_GROUPS if parallel.replicate > 1 else REDUCES

    def make_weights(self, stream: EventStream, sizes: Sequence[int]) -> None:
        """Allocate the rank's shards; a flat tensor is put together on the device, of what is moved there, before it is cut.

        Source:
            ``_init_param_handle_from_module`` in torch/distributed/fsdp/_init_utils.py, ``flatten_tensors`` and ``shard`` in
            _flat_param.py (v2.13.0).
        """
        if not self.is_flat:
            stream.allocate_all(sizes)
            return
        left = sum(sizes)
        for unit in [*[tensors.unit for tensors in self.parts[1:-1]], self.step.first, *self.step.adapters.values()]:
            moved = stream.allocate_all(unit.tensor_bytes)
            whole = stream.allocate(sum(unit.tensor_bytes))
            shard = min(unit.kept_bytes or ceil_div(sum(unit.tensor_bytes), self._ranks), left)
            stream.allocate(shard)
            stream.free_all([whole, *moved])
            left -= shard
        stream.allocate(left)  # scales of codes, which no rank shares

    def mode(self, mode: Mode, micro_step: int) -> Mode:
        """Return ``again`` where micro-steps add to whole gradients; what is reduced, or put together, is formed anew."""
        if micro_step and self.step.reduces_last and not self.is_flat:
            return "again"
        return "first" if mode == "filled" else mode

    def begin(self, micro_step: int) -> None:
        """Gather what the model itself has, which stays to the end of backward."""
        self.micro_step, self.backward = micro_step, False
        before = [self.tail] if self.step.called_before else []
        for tensors in [*([self.rest] if self.rest else []), *(before if self.step.apart else [self.first])]:
            self.take(tensors)

    def stepped(self) -> None:
        """Let go of the rank's share of all gradients, unless it is filled with zeros."""
        units = () if self.step.inputs.setup.leaves_gradients else self._all()
        for group in (group for tensors in units for group in tensors.groups):
            self.stream.free_all([] if group.share < 0 else [group.share])
            group.share = -1

    def end(self, gradients: dict[str, int]) -> None:
        """End a backward: what the root has besides is reduced, and all that is gathered goes."""
        if self.rest is not None:
            self.let_go(self.rest)
            if self.is_last_micro_step and gradients:
                self.reduce(self.rest, [gradients.pop(name) for name in [*gradients]])
        self.end_reductions()
        for tensors in self._all():
            self.let_go(tensors)
        self.stream.free_all(self.tail.buffer)  # which nothing waited for, if it is there
        self.tail.buffer = []

    def end_reductions(self) -> None:
        """Let go of what reductions have read, and of what waits."""
        self.stream.free_all([*self._reducing, *self.waiting])
        self._reducing, self.waiting = [], []

    @property
    def is_last_micro_step(self) -> bool:
        """Whether gradients of this micro-step are reduced."""
        steps = self.step.inputs.setup.config.gradient_accumulation_steps
        return not self.step.reduces_last or self.micro_step == steps - 1

    def is_root(self, place: int) -> bool:
        """Tell whether a part is in the root's unit."""
        return self.parts[place] is self.first and not self.step.apart

    def _all(self) -> Iterable[UnitTensors]:
        """Return all units, each once."""
        units = *self.parts, *([self.rest] if self.rest else []), *self.more
        return {id(tensors): tensors for tensors in units}.values()

    # ---------------------------------------------------------------- weights
    def take(self, tensors: UnitTensors) -> None:
        """Gather a unit that is not there yet, and copy it out of its buffers; a head that a loss gathers comes whole, where operators compute."""
        # ``DTensor.full_tensor`` in torch/distributed/tensor/_api.py (v2.13.0)
        if tensors is self.tail and self.step.head_by_hand:
            self.stream.of("communication")
            tensors.whole = tensors.whole or self.stream.allocate_all(tensors.unit.tensor_bytes)
            self.stream.of("temporaries")
            return
        self.gather(tensors)
        self.copy_out(tensors)

    def free_last_buffer(self) -> None:
        """Let go of the buffer that the last unit of a forward came in."""
        self.stream.free_all(self._last_buffer)
        self._last_buffer = []

    def gather(self, tensors: UnitTensors) -> None:
        """Gather a unit into its buffers, in backward the last group first, or in place; nothing where it is there."""
        self.stream.of("communication")
        for group in reversed(tensors.groups) if self.backward else tensors.groups:
            if not (group.whole or group.buffer):
                self._gather_group(group)
        self.stream.of("temporaries")

    def _gather_group(self, tensors: UnitTensors) -> None:
        stream, unit, gathers = self.stream, tensors.unit, GATHERS + self.context
        if self.is_flat:
            cast = [stream.allocate(unit.copying_bytes, CASTS)] if unit.copying_bytes else []
            tensors.whole = [stream.allocate(unit.gathered_bytes, gathers)]
        else:
            cast = [stream.allocate(unit.cast_bytes, gathers)] if unit.cast_bytes and unit.buffer_bytes else []
            tensors.buffer = [stream.allocate(unit.buffer_bytes, gathers)]
        stream.free_all(cast)

    def copy_out(self, tensors: UnitTensors) -> None:
        """Copy a unit out of its buffers, tensor by tensor; pieces of some are put in order from copies."""
        self.stream.of("communication")
        for group in [] if self.is_flat else [group for group in tensors.groups if not group.whole]:
            if group.unit.copying_bytes and not group.unit.buffer_bytes:
                self._cast_alone(group)
                continue
            times = 1 + bool(group.unit.reordered_bytes)
            made = self.stream.allocate_all(size for size in group.unit.tensor_bytes for _ in range(times))
            group.whole = made[::times]
            self.stream.free_all(made[1::times] if times > 1 else [])
            if self.backward:
                self.stream.free_all(group.buffer)
            else:
                self.free_last_buffer()
                self._last_buffer = group.buffer
            group.buffer = []
        self.stream.of("temporaries")

    def _cast_alone(self, tensors: UnitTensors) -> None:
        """Cast and copy a unit tensor by tensor, as one rank alone does: a cast goes when the next is there."""
        stream, cast = self.stream, list[int]()
        for size in tensors.unit.tensor_bytes:
            last, cast = cast, [stream.allocate(size)]
            stream.free_all(last)
            tensors.whole.append(stream.allocate(size))
        stream.free_all([*cast, *tensors.buffer])
        tensors.buffer = []

    def let_go(self, tensors: UnitTensors) -> None:
        """Let go of a unit's weights."""
        for group in reversed(tensors.groups):
            self.stream.free_all(group.whole)
            group.whole = []

    # ---------------------------------------------------------------- gradients
    def together(self, tensors: UnitTensors, gradients: Sequence[int]) -> list[int]:
        """Put a flat tensor's gradients together in one; return it where it is added to that of micro-steps before, which autograd holds it through."""
        stream = self.stream
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
        width = self.step.inputs.setup.compute_bytes
        sizes = unit.last_bytes, unit.last_bytes // width * self.step.reduced_width
        return [one for one in gradients if self.stream.sizes[one] in sizes][-1:]

    def _in_order(self, gradients: Sequence[int]) -> tuple[list[int], list[int]]:
        """Put pieces of gradients in order, one by one; return these copies, and the gradient that a variable holds."""
        # ``zip`` hands its first tuple out again at every second turn only, and has the gradient in it until then.
        stream, copies = self.stream, list[int]()
        for first in range(0, len(gradients), 2):
            stream.free_all(gradients[max(0, first - 2) : first])
            copies += stream.allocate_all(stream.sizes[one] for one in gradients[first : first + 2])
        stream.free_all(gradients[len(copies) - 2 : -1] if len(copies) % 2 == 0 else [])
        return copies, [*gradients[-1:]]

    def reduce(self, tensors: UnitTensors, gradients: Sequence[int], *, joins: bool = False) -> None:
        """Reduce a group's gradients to the rank's share of them; what it reads joins that of the unit's group before."""
        stream, unit, retained = self.stream, tensors.unit, list[int]()
        stream.of("communication")
        if not (self.is_flat or joins):
            stream.free_all(self._reducing)
            self._reducing = []
        if unit.reordered_bytes:
            gradients, retained = self._in_order(gradients)
        if self.is_flat:
            given = [stream.allocate(unit.narrow_bytes - unit.cast_bytes, REDUCES + self.context)] * (
                unit.narrow_bytes > unit.cast_bytes
            )
            reduced = unit.cast_bytes or unit.kept_bytes
        else:
            self._reducing = [*self._reducing, stream.allocate(unit.reduced_bytes)]
            given = [] if retained else self._last(unit, gradients)
            stream.free_all(one for one in gradients if one not in given)
            reduced = unit.narrow_bytes or unit.kept_bytes
        stream.of("gradients")
        shard = stream.allocate(reduced, REDUCES + self.context)
        if self._divides and not unit.buffer_bytes:
            stream.free(stream.allocate(unit.reduced_bytes, REDUCES + self.context))
        wait = self.waiting.append if unit.waiting_bytes(new=tensors.share < 0) else stream.free  # for other groups
        if reduced != unit.kept_bytes:
            wide = stream.allocate(unit.kept_bytes, self._casts_on + self.context)
            wait(shard)
            shard, wait = wide, stream.free
        stream.free_all([*given, *retained, *(gradients if self.is_flat else ())])
        tensors.flat = -1
        stream.of("temporaries")
        if tensors.share >= 0:
            wait(shard)  # added to what micro-steps before have left
        else:
            tensors.share = shard
