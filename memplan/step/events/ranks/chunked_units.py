"""The events of units whose head is reduced by itself, as a loss runs backward chunk by chunk before the model does.

Source:
    ``ChunkedLossWrapper.__call__`` in torchtitan/components/loss.py (0.3.0); ``to_accumulated_grad_if_needed`` in
    torch/distributed/fsdp/_fully_shard/_fsdp_param.py (v2.13.0).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from memplan.catalog.config_keys.parallel_keys import Parallel
from memplan.step.collectives.gathered_units import Unit, UnitTensors
from memplan.step.events.event_stream import EventStream
from memplan.step.events.ranks.gathered_events import Units
from memplan.step.ranks.sharded_units import ShardedStep


class ChunkedUnits(Units):
    """Units of a rank's step with such a loss.

    Args:
        norm: What the final norm alone is in the unit of norm and head.
    """

    sums_chunks = True
    _comes_again = True

    def __init__(self, stream: EventStream, step: ShardedStep, parallel: Parallel, norm: Unit) -> None:
        super().__init__(stream, step, parallel)
        assert step.head is not None
        self._head, self._norm = UnitTensors(step.head), UnitTensors(norm)
        self._goes = False  # Whether norm and head go behind the norm, which a first pass over chunks leaves them to
        self._sums: dict[str, int] = {}  # Gradients of the head, added up over chunks

    def leave(self, place: int) -> None:
        """Let go of a layer, and of norm and head once a loss has let go of them."""
        super().leave(place)
        if self._goes and place == len(self._parts) - 1:
            self._let_go(self._tail)

    def enter_chunks(self) -> None:
        """Gather norm and head by the stream that computes, where they are not there."""
        stream, unit = self._stream, self._tail.unit
        if self._tail.whole:
            return
        stream.of("communication")
        cast = stream.allocate_all([unit.cast_bytes] if unit.cast_bytes else [])
        buffer = stream.allocate(unit.buffer_bytes)
        stream.free_all(cast)
        self._tail.whole = stream.allocate_all(unit.tensor_bytes)
        stream.free(buffer)

    def take_chunk(self, gradients: dict[str, int], *, several: bool, last: bool) -> None:
        """Add a chunk's gradients of the head to those in the dtype that they are reduced in, and reduce these at the last."""
        stream, step = self._stream, self._step
        stream.of("gradients")
        for name, gradient in gradients.items():
            if name in self._sums:
                stream.free(gradient)
                continue
            wide = stream.sizes[gradient] // step.inputs.setup.compute_bytes * step.reduced_width
            self._sums[name] = gradient
            if several and wide != stream.sizes[gradient]:
                self._sums[name] = stream.allocate(wide)
                stream.free(gradient)
        if last:
            self._reduce_head([*self._sums.values()])
            self._sums = {}

    def _reduce_head(self, gradients: Sequence[int]) -> None:
        """Reduce the head's gradients."""
        self._reduce(self._head, gradients)

    def leave_chunks(self) -> None:
        """Let go of norm and head, which later forwards do as soon as the norm has run (``set_reshard_after_forward``)."""
        self._let_go(self._tail)
        self._goes = True

    def _left_of(self, tensors: UnitTensors) -> UnitTensors:
        """Return what is reduced of a unit behind its backward: of norm and head the norm."""
        return self._norm if tensors is self._tail else tensors

    def _all(self) -> Iterable[UnitTensors]:
        """Return all units, each once."""
        return *super()._all(), self._head, self._norm
