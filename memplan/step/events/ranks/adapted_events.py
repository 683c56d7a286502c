"""The events of FSDP1's units where each matrix of an adapter is one of its own, inside its layer's.

Which unit is gathered, and let go of, as a module begins or ends is followed as for the closed forms
(:mod:`memplan.step.ranks.flat_adapters`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from memplan.catalog.config_keys.parallel_keys import Parallel
from memplan.step.collectives.gathered_units import UnitTensors
from memplan.step.events.event_stream import EventStream
from memplan.step.events.ranks.gathered_events import Units
from memplan.step.ranks.flat_adapters import ROOT, FlatGathers, retained_by_hooks
from memplan.step.ranks.reduced_pass import Pass
from memplan.step.ranks.sharded_units import ShardedStep
from memplan.step.states.parallel_shards import numbered
from memplan.step.tapes.taped_operations import Mode


class AdaptedUnits(Units):
    """Units of a rank's step with adapters.

    Args:
        values: Values of the quantities that sizes are made of.
    """

    visits = True
    hands_over = True

    def __init__(self, stream: EventStream, step: ShardedStep, parallel: Parallel, values: Sequence[int]) -> None:
        super().__init__(stream, step, parallel)
        self._adapters = {name.rpartition(".")[0]: UnitTensors(unit) for name, unit in step.adapters.items()}
        numbers = (number for run in step.taped.runs for number in range(run.first, run.first + run.count))
        layers = [numbered(step.inputs.spec.names.layer, number) for number in numbers]
        self._by_name = {ROOT: self._first, **dict(zip(layers, self._parts[1:-1], strict=True)), **self._adapters}
        self._retained = [retained_by_hooks(step).total_bytes(values)] * 2

    def mode(self, mode: Mode, micro_step: int) -> Mode:
        """Have every gradient handed over as it is formed."""
        del mode, micro_step
        return "layer"

    def begin(self, micro_step: int) -> None:
        """Gather what the model itself has, and follow its modules anew."""
        super().begin(micro_step)
        self._gathers = FlatGathers(self._step, Pass("first"), self.gather, self.let_go_of)

    def enter(self, place: int) -> None:
        """Wait for what runs to ask for it."""

    leave = enter_backward = enter

    def turn(self) -> None:
        """Gather nothing ahead of the head."""

    reach_head = turn

    def visit(self, kind: str, name: str) -> None:
        """Gather what a module needs as it begins, or let go of it as it ends."""
        self._gathers.arrive(name, kind)

    def use_up(self, name: str, gradient: int) -> None:
        """Reduce the gradient of an adapter's matrix, whose unit is let go of before."""
        tensors = self._adapters[name.rpartition(".")[0]]
        added = self._together(tensors, [gradient])
        self._gathers.let_go(name.rpartition(".")[0])
        if self._is_last_micro_step:
            self._reduce(tensors, [tensors.flat])
        self._stream.free_all(added)

    def leave_backward(self, place: int, gradients: dict[str, int]) -> None:
        """Keep what hooks of a layer's frozen weights do, and let go of all at the end."""
        if place and not self._is_root(place):
            self._waiting += self._stream.allocate_all(size for size in self._retained if size)
        elif place == 0:
            self._end(gradients, last=self._is_last_micro_step)

    def gather(self, name: str) -> None:
        """Gather a unit, if it is not there."""
        self._gather(self._by_name[name])

    def let_go_of(self, name: str) -> None:
        """Let go of a unit."""
        self._let_go(self._by_name[name])

    def _all(self) -> Iterable[UnitTensors]:
        """Return all units, each once."""
        return *super()._all(), *self._adapters.values()
