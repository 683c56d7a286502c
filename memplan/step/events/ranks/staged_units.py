"""The units of one rank's stages of a pipeline: gathered by a stage's first forward or ahead of it, their gradients summed until its last backward.

Source:
    ``backward_maybe_with_nosync`` and ``perform_reduce_grad`` in torch/distributed/pipelining/stage.py; ``unshard`` and
    ``post_backward`` in torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py (v2.13.0).
"""

from collections.abc import Sequence
from itertools import accumulate

from memplan.step.collectives.gathered_units import UnitTensors
from memplan.step.events.around_step import Around
from memplan.step.events.ranks.chunked_gradients import ChunkedHead
from memplan.step.events.ranks.unit_events import AMONG_GROUPS, UnitEvents
from memplan.step.pipelines.rank_memory import RankMemory
from memplan.step.states.parallel_shards import in_layers, numbered


class StagedUnits:
    """Units of a rank's stages, the last of which reduces the head by itself where its loss runs backward chunk by chunk.

    Args:
        rank: The rank.
        order: Names of its weights, module by module.

    Attributes:
        sums: Adds up the head's gradients over chunks; None where they are reduced with the norm's.
        layers: Numbers of each stage's layers.
    """

    def __init__(self, events: UnitEvents, rank: RankMemory, order: Sequence[str]) -> None:
        self._events, self._stream, self._names = events, events.stream, events.step.inputs.spec.names
        self.sums = ChunkedHead(events, rank.norm, self._waiting_with_head) if rank.step.chunked else None
        ends = accumulate(rank.sizes[stage] for stage in rank.own)
        layers = events.parts[1:-1]
        self.layers = {stage: range(end - rank.sizes[stage], end) for stage, end in zip(rank.own, ends, strict=True)}
        self._units = {
            stage: [
                *([events.first] if stage == 0 else []),
                *[layers[number] for number in numbers],
                *([events.tail] if stage == rank.last else []),
            ]
            for stage, numbers in self.layers.items()
        }
        tensors = in_layers(events.step.inputs.states.tensors)
        self._apart = {name for name, entry in tensors if entry.tensor.role == "expert_matrix"}
        self._converts = rank.converts
        self._wide, self._order = rank.wide, {name: place for place, name in enumerate(order)}
        self._wholes: dict[int, dict[str, int]] = {}  # Whole gradients of each unit, by its identity

    def around(self) -> Around:
        """Return what is written around the passes of a step; what is within them stages tell."""
        return Around(make_weights=self._events.make_weights, stepped=self._events.stepped, sums=self.sums)

    def stage_of(self, name: str) -> int:
        """Return the stage that has the weight of a name."""
        names = self._names
        for stage, numbers in self.layers.items():
            if name.startswith(tuple(f"{numbered(names.layer, number)}." for number in numbers)):
                return stage
        return min(self.layers) if name.startswith(f"{names.embedding}.") else max(self.layers)

    def enter_stage(self, stage: int, place: int) -> None:
        """Gather a unit that is not there yet, on streams of the stage's own (``FSDPCommContext`` of its root)."""
        self._events.backward, self._events.context = False, AMONG_GROUPS * stage
        self._events.take(self._units[stage][place])

    def enter_back(self, stage: int, place: int) -> None:
        """Gather a unit that a loss has let go of."""
        self._events.backward = True
        self._events.take(self._units[stage][place])

    def leave_stage(self, stage: int) -> None:
        """Let go of the last buffer, where a stage's forward is done, and of norm and head once a loss has let go of them."""
        if self.sums is not None and self._units[stage][-1] is self._events.tail:
            self.sums.leave()
        self._events.free_last_buffer()

    def forget(self) -> None:
        """Let go of what a pass has reduced that found out shapes."""
        self._events.end_reductions()
        if self.sums is not None:
            self.sums.forget()

    def gather_stage(self, stage: int) -> None:
        """Gather all units of a stage ahead, by the stream that computes (``unshard``); they are copied out when it runs."""
        for group in (group for unit in self._units[stage] for group in unit.groups):
            cast = self._stream.allocate_all([group.unit.cast_bytes] if group.unit.cast_bytes else [])
            group.buffer = self._stream.allocate_all([group.unit.buffer_bytes])
            self._stream.free_all(cast)

    def wait_for(self, stage: int) -> None:
        """Copy out what is gathered of a stage."""
        self._events.backward = True
        for unit in self._units[stage]:
            if any(group.buffer for group in unit.groups):
                self._events.copy_out(unit)

    def release(self, stage: int, place: int | None = None) -> None:
        """Let go of a stage's weights, or of those of one of its units."""
        units = self._units[stage]
        for unit in units if place is None else [units[place]]:
            self._events.let_go(unit)

    def add(self, stage: int, place: int, gradients: dict[str, int]) -> None:
        """Keep a unit's first gradients, or add later ones: each is cast first where they are summed in another dtype."""
        stream, unit = self._stream, self._units[stage][place]
        sums = self._wholes.setdefault(id(unit), {})
        stream.of("gradients")
        for name in sorted(gradients, key=self._order.__getitem__):
            if name not in sums:
                sums[name] = gradients[name]
                if not self._converts:
                    continue
                sums[name] = stream.allocate(stream.sizes[gradients[name]] * self._wide)
            stream.free(gradients[name])

    def _waiting_with_head(self) -> dict[str, int]:
        """Return gradients of the norm that wait, which are reduced together with those of the head."""
        return self._wholes.pop(id(self._events.tail), {})

    def reduce(self, stage: int) -> None:
        """Reduce the gradients of a stage, group by group, each of whose weights is let go of before."""
        self._events.context = AMONG_GROUPS * stage
        for unit in self._units[stage]:
            sums = self._wholes.pop(id(unit), {})
            names = sorted(sums, key=self._order.__getitem__, reverse=True)
            for group in unit.groups:
                self._events.let_go(group)
                apart = group is not unit.groups[0]
                own = [name for name in names if len(unit.groups) == 1 or (name in self._apart) == apart]
                if own:
                    self._reduce(group, [sums[name] for name in own], joins=group is not unit.groups[-1])
        self._events.end_reductions()

    def _reduce(self, group: UnitTensors, gradients: list[int], *, joins: bool) -> None:
        left, both = group if self.sums is None else self.sums.left_of(group), self._events.tail.share
        if left is not group and both >= 0:
            left.share = both  # what has been reduced together has the norm's
        self._events.reduce(left, gradients, joins=joins)
        left.share = -1 if left.share == both else left.share
