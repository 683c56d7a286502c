"""The events of FSDP1's units where each matrix of an adapter is one of its own, inside its layer's.

Which unit is gathered, and let go of, as a module begins or ends is followed as for the closed forms
(:mod:`memplan.step.ranks.flat_adapters`).
"""

from collections.abc import Sequence

from memplan.step.collectives.gathered_units import UnitTensors
from memplan.step.events.around_step import Around, first_and_last, handed_over
from memplan.step.events.ranks.unit_events import UnitEvents
from memplan.step.ranks.flat_adapters import ROOT, FlatGathers, retained_by_hooks
from memplan.step.ranks.reduced_pass import Pass
from memplan.step.states.parallel_shards import numbered


class AdaptedUnits:
    """Gathers the units of a rank's step with adapters, module by module.

    Args:
        values: Values of the quantities that sizes are made of.
    """

    def __init__(self, units: UnitEvents, values: Sequence[int]) -> None:
        self._units, step = units, units.step
        self._adapters = {name.rpartition(".")[0]: UnitTensors(unit) for name, unit in step.adapters.items()}
        units.more += self._adapters.values()
        numbers = (number for run in step.taped.runs for number in range(run.first, run.first + run.count))
        layers = [numbered(step.inputs.spec.names.layer, number) for number in numbers]
        self._by_name = {ROOT: units.first, **dict(zip(layers, units.parts[1:-1], strict=True)), **self._adapters}
        self._retained = [retained_by_hooks(step).total_bytes(values)] * 2

    def around(self) -> Around:
        """Return what is written around the parts."""
        return Around(
            make_weights=self._units.make_weights,
            mode=handed_over,
            micro_steps=first_and_last,
            begin=self.begin,
            visit=self.visit,
            use_up=self.use_up,
            leave_backward=self.leave_backward,
            stepped=self._units.stepped,
        )

    def begin(self, micro_step: int) -> None:
        """Gather what the model itself has, and follow its modules anew."""
        units, by_name = self._units, self._by_name
        units.begin(micro_step)
        self._gathers = FlatGathers(
            units.step,
            Pass("first"),
            lambda name: units.gather(by_name[name]),
            lambda name: units.let_go(by_name[name]),
        )

    def visit(self, kind: str, name: str) -> None:
        """Gather what a module needs as it begins, or let go of it as it ends."""
        self._gathers.arrive(name, kind)

    def use_up(self, name: str, gradient: int) -> None:
        """Reduce the gradient of an adapter's matrix, whose unit is let go of before."""
        tensors = self._adapters[name.rpartition(".")[0]]
        added = self._units.together(tensors, [gradient])
        self._gathers.let_go(name.rpartition(".")[0])
        if self._units.is_last_micro_step:
            self._units.reduce(tensors, [tensors.flat])
        self._units.stream.free_all(added)

    def leave_backward(self, place: int, gradients: dict[str, int]) -> None:
        """Keep what hooks of a layer's frozen weights do, and let go of all at the end."""
        if place and not self._units.is_root(place):
            self._units.waiting += self._units.stream.allocate_all(size for size in self._retained if size)
        elif place == 0:
            self._units.end(gradients)
