"""What lies around the parts of a step, where nothing does: what ranks of several GPUs write their own events in the place of."""

from __future__ import annotations

from collections.abc import Sequence

from memplan.step.events.event_stream import EventStream
from memplan.step.tapes.taped_operations import Mode


class WholeModel:
    """Parts of a step that nothing lies around: the model is whole on each device."""

    copies_returned = False  # Whether what it returns is copied
    adds_tied = False  # Whether the gradients of a tied embedding and head are added up in that of the head
    sums_chunks = False  # Whether gradients of a loss that runs backward chunk by chunk are added up here
    visits = False  # Whether it is told where modules begin and end
    hands_over = False  # Whether gradients are taken as they are formed
    takes_gradients = False  # Whether they are stepped here as well

    def make_weights(self, sizes: Sequence[int], stream: EventStream) -> None:
        """Allocate what a rank stores of the weights, given the bytes of each."""
        stream.allocate_all(sizes)

    def wrap(self) -> None:
        """Write what is made once the model is there, before the first step."""

    def mode(self, mode: Mode, micro_step: int) -> Mode:
        """Return what becomes of weight gradients in a micro-step, given what does in the first one."""
        return "again" if micro_step else mode

    def micro_steps(self, count: int) -> Sequence[int]:
        """Return those of a step that are played: all, or those that stand for the rest where that takes long."""
        return range(count)

    def begin(self, micro_step: int) -> None:
        """Write what comes before a forward."""

    def enter(self, place: int) -> None:
        """Write what comes before the forward of a part: 0 is the embedding, the last one norm and head."""

    def leave(self, place: int) -> None:
        """Write what comes behind it."""

    def leave_head(self) -> None:
        """Write what comes behind the head's product."""

    def copy_returned(self, logits: Sequence[int]) -> None:
        """Write copies of what the model returns, given storages of its logits, which go then."""

    def enter_chunks(self) -> None:
        """Write what comes before the first chunk of such a loss."""

    def take_chunk(self, gradients: dict[str, int], *, several: bool, last: bool) -> None:
        """Write what becomes of a chunk's gradients of the head, where they are added up here."""

    def leave_chunks(self) -> None:
        """Write what comes behind all chunks."""

    def turn(self) -> None:
        """Write what comes before backward."""

    def reach_head(self) -> None:
        """Write what comes when backward has the gradient of the logits, before the head's product."""

    def enter_backward(self, place: int) -> None:
        """Write what comes before the backward of a part."""

    def leave_backward(self, place: int, gradients: dict[str, int]) -> None:
        """Write what comes behind it, and take what is reduced out of the gradients: names of weights, and their storages."""

    def visit(self, kind: str, name: str) -> None:
        """Write what comes as a module begins or ends, where that is told: the kind of its mark, and its name."""

    def use_up(self, name: str, gradient: int) -> None:
        """Write what becomes of the gradient of a weight, where gradients are taken."""

    def update(self, *, first: bool) -> None:
        """Write the events of the step of what was taken, which makes states where it is the first."""

    def stepped(self) -> None:
        """Write what comes behind the update."""


def first_and_last(count: int) -> Sequence[int]:
    """Return the first two micro-steps and the last: those between do what the second does."""
    return sorted({0, min(1, count - 1), count - 1})
