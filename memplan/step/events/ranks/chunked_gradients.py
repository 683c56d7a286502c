"""The events of a head that is reduced by itself, as a loss runs backward chunk by chunk before the model does.

Source:
    ``ChunkedLossWrapper.__call__`` in torchtitan/components/loss.py (0.3.0); ``to_accumulated_grad_if_needed`` in
    torch/distributed/fsdp/_fully_shard/_fsdp_param.py (v2.13.0).
"""

from collections.abc import Callable, Mapping

from memplan.step.collectives.gathered_units import Unit, UnitTensors
from memplan.step.events.ranks.unit_events import UnitEvents


class ChunkedHead:
    """Adds up a head's gradients over chunks, and has them reduced.

    Args:
        norm: What the final norm alone is in the unit of norm and head.
        waiting: Returns gradients of the norm that wait, and are reduced with those of the head.

    Attributes:
        norm: What there is of that.
    """

    def __init__(
        self, units: UnitEvents, norm: Unit, waiting: Callable[[], Mapping[str, int]] = dict[str, int]
    ) -> None:
        assert units.step.head is not None
        self._units, self._waiting = units, waiting
        self._head, self.norm = UnitTensors(units.step.head), UnitTensors(norm)
        units.more += self._head, self.norm
        self._goes = False  # Whether norm and head go behind the norm, which a first pass over chunks leaves them to
        self._sums: dict[str, int] = {}
        self._waits: list[int] = []  # What its groups reduce among them

    def leave(self) -> None:
        """Let go of norm and head behind their forward, once a loss has let go of them."""
        if self._goes:
            self._units.let_go(self._units.tail)

    def enter_chunks(self) -> None:
        """Gather norm and head by the stream that computes, where they are not there."""
        stream, tail = self._units.stream, self._units.tail
        if tail.whole:
            return
        stream.of("communication")
        cast = stream.allocate_all([tail.unit.cast_bytes] if tail.unit.cast_bytes else [])
        buffer = stream.allocate(tail.unit.buffer_bytes)
        stream.free_all(cast)
        tail.whole = stream.allocate_all(tail.unit.tensor_bytes)
        stream.free(buffer)

    def take_chunk(self, gradients: dict[str, int], *, several: bool, last: bool) -> None:
        """Add a chunk's gradients of the head to those in the dtype that they are reduced in, and reduce these at the last."""
        stream, step = self._units.stream, self._units.step
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
            waiting, before = self._waiting(), len(self._units.waiting)
            self._units.reduce(self._units.tail if waiting else self._head, [*self._sums.values(), *waiting.values()])
            self._waits = self._units.waiting[before:]
            self._sums = {}

    def leave_chunks(self) -> None:
        """Let go of norm and head, which later forwards do as soon as the norm has run (``set_reshard_after_forward``)."""
        self._units.let_go(self._units.tail)
        self._goes = True

    def left_of(self, tensors: UnitTensors) -> UnitTensors:
        """Return what is reduced of a unit behind its backward: of norm and head the norm, whose unit waits for that alone then.

        Source: ``_all_reduce_state`` in torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py (v2.13.0).
        """
        if tensors is not self._units.tail:
            return tensors
        for storage in self._waits:
            self._units.waiting.remove(storage)
            self._units.stream.free(storage)
        self._waits = []
        return self.norm

    def forget(self) -> None:
        """Let go of what has been reduced of the head."""
        self._units.stream.free_all([self._head.share] if self._head.share >= 0 else [])
        self._head.share = -1
