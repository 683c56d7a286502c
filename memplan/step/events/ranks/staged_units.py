"""The units of one rank's stages of a pipeline: gathered by a stage's first forward or ahead of it, their gradients summed until its last backward.

Source:
    ``backward_maybe_with_nosync`` and ``perform_reduce_grad`` in torch/distributed/pipelining/stage.py; ``unshard`` and
    ``post_backward`` in torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py (v2.13.0).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from memplan.catalog.config_keys.parallel_keys import Parallel
from memplan.step.events.event_stream import EventStream
from memplan.step.events.ranks.chunked_units import ChunkedUnits
from memplan.step.events.ranks.gathered_events import AMONG_GROUPS
from memplan.step.pipelines.rank_memory import RankMemory
from memplan.step.states.parallel_shards import numbered


class StagedUnits(ChunkedUnits):
    """Units of a rank's stages, the last of which reduces the head by itself where its loss runs backward chunk by chunk.

    Args:
        rank: The rank.
        order: Names of its weights, module by module.
    """

    def __init__(self, stream: EventStream, rank: RankMemory, parallel: Parallel, order: Sequence[str]) -> None:
        super().__init__(stream, rank.step, parallel, rank.norm)
        self.sums_chunks = rank.step.chunked
        ends = accumulate(rank.sizes[stage] for stage in rank.own)
        layers = self._parts[1:-1]
        self.layers = {
            stage: range(end - rank.sizes[stage], end) for stage, end in zip(rank.own, ends, strict=True)
        }  # Numbers of each stage's layers
        self._units = {
            stage: [
                *([self._first] if stage == 0 else []),
                *[layers[number] for number in numbers],
                *([self._tail] if stage == rank.last else []),
            ]
            for stage, numbers in self.layers.items()
        }
        self._converts = rank.converts
        self._wide, self._order = rank.wide, {name: place for place, name in enumerate(order)}
        self._wholes: dict[int, dict[str, int]] = {}  # Whole gradients of each unit, by its identity

    def stage_of(self, name: str) -> int:
        """Return the stage that has the weight of a name."""
        names = self._step.inputs.spec.names
        for stage, numbers in self.layers.items():
            if name.startswith(tuple(f"{numbered(names.layer, number)}." for number in numbers)):
                return stage
        return min(self.layers) if name.startswith(f"{names.embedding}.") else max(self.layers)

    def enter_stage(self, stage: int, place: int) -> None:
        """Gather a unit that is not there yet, on streams of the stage's own (``FSDPCommContext`` of its root)."""
        self._backward, self._context = False, AMONG_GROUPS * stage
        unit = self._units[stage][place]
        self._gather(unit)
        self._copy_out(unit)

    def enter_back(self, stage: int, place: int) -> None:
        """Gather a unit that a loss has let go of."""
        self._backward = True
        self._gather(self._units[stage][place])
        self._copy_out(self._units[stage][place])

    def leave_stage(self, stage: int) -> None:
        """Let go of the last buffer, where a stage's forward is done, and of norm and head once a loss has let go of them."""
        if self._goes and self._units[stage][-1] is self._tail:
            self._let_go(self._tail)
        self._free_last_buffer()

    def forget(self) -> None:
        """Let go of what a pass has reduced that found out shapes."""
        self._stream.free_all([*self._reducing, *([self._head.share] if self._head.share >= 0 else [])])
        self._reducing, self._head.share = [], -1

    def gather_stage(self, stage: int) -> None:
        """Gather all units of a stage ahead, by the stream that computes (``unshard``); they are copied out when it runs."""
        for unit in self._units[stage]:
            cast = self._stream.allocate_all([unit.unit.cast_bytes] if unit.unit.cast_bytes else [])
            unit.buffer = self._stream.allocate_all([unit.unit.buffer_bytes])
            self._stream.free_all(cast)

    def wait_for(self, stage: int) -> None:
        """Copy out what is gathered of a stage."""
        self._backward = True
        for unit in self._units[stage]:
            if unit.buffer:
                self._copy_out(unit)

    def release(self, stage: int, place: int | None = None) -> None:
        """Let go of a stage's weights, or of those of one of its units."""
        units = self._units[stage]
        for unit in units if place is None else [units[place]]:
            self._let_go(unit)

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

    def _reduce_head(self, gradients: Sequence[int]) -> None:
        """Reduce the head's gradients, together with those of the norm that wait."""
        waiting = self._wholes.pop(id(self._tail), {})
        self._reduce(self._tail if waiting else self._head, [*gradients, *waiting.values()])

    def reduce(self, stage: int) -> None:
        """Reduce the gradients of a stage, unit by unit, each of whose weights is let go of before."""
        self._context = AMONG_GROUPS * stage
        for unit in self._units[stage]:
            self._let_go(unit)
            sums = self._wholes.pop(id(unit), {})
            names = sorted(sums, key=self._order.__getitem__, reverse=True)
            if not names:
                continue
            left, both = self._left_of(unit) if self.sums_chunks else unit, self._tail.share
            if left is self._norm and both >= 0:
                left.share = both  # what has been reduced together has the norm's
            self._reduce(left, [sums[name] for name in names])
            left.share = -1 if left.share == both else left.share
        self._stream.free_all([*self._reducing, *self._waiting])
        self._reducing, self._waiting = [], []
