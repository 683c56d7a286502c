"""What is written around the parts of a step: functions of whoever shares a model among GPUs, which write nothing where it is whole."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from memplan.documents.frozen_values import dataclass
from memplan.step.events.event_stream import EventStream, UseUp
from memplan.step.tapes.taped_operations import Mode


class HeadSums(Protocol):
    """Adds up the gradients of a head whose loss runs backward chunk by chunk, before the model does."""

    def enter_chunks(self) -> None:
        """Write what comes before the first chunk."""

    def take_chunk(self, gradients: dict[str, int], *, several: bool, last: bool) -> None:
        """Write what becomes of a chunk's gradients of the head."""

    def leave_chunks(self) -> None:
        """Write what comes behind all chunks."""


def _nothing(*_: object) -> None:
    """Write nothing."""


def _added(mode: Mode, micro_step: int) -> Mode:
    """Add gradients of later micro-steps to those of the first."""
    return "again" if micro_step else mode


def _as_it_is(play: Callable[[], None]) -> None:
    """Write what is given."""
    play()


@dataclass(frozen=True, slots=True)
class Around:
    """What is written around the parts of a step, whose places are 0 for the embedding to the last for norm and head."""

    # Allocates what a rank stores of the weights, given the bytes of each.
    make_weights: Callable[[EventStream, Sequence[int]], object] = EventStream.allocate_all
    wrap: Callable[[], None] = _nothing  # Once the model is there, before the first step
    # Returns what becomes of weight gradients in a micro-step, given what does in the first one.
    mode: Callable[[Mode, int], Mode] = _added
    # Returns those micro-steps of a step that are played: all, or those that stand for the rest where that takes long.
    micro_steps: Callable[[int], Sequence[int]] = range
    begin: Callable[[int], None] = _nothing  # Before a forward, whose micro-step is given
    enter: Callable[[int], None] = _nothing  # Before the forward of a part
    leave: Callable[[int], None] = _nothing  # Behind it
    # Yields the batches of an evaluation, around each of which is written what comes before and behind, given their number.
    evaluated: Callable[[int], Iterable[int]] = range
    leave_head: Callable[[], None] = _nothing  # Behind the head's product
    # Copies what the model returns, given storages of its logits, which go then; None where it is not copied.
    copy_returned: Callable[[Sequence[int]], None] | None = None
    # Around the forward of a reference model, given what writes that.
    refer: Callable[[Callable[[], None]], None] = _as_it_is
    turn: Callable[[], None] = _nothing  # Before backward
    reach_head: Callable[[], None] = _nothing  # When backward has the gradient of the logits, before the head's product
    enter_backward: Callable[[int], None] = _nothing  # Before the backward of a part
    # Behind it; takes what is reduced out of the gradients: names of weights, and their storages.
    leave_backward: Callable[[int, dict[str, int]], None] = _nothing
    # As a module begins or ends, given the kind of its mark, and its name; None where nobody is told.
    visit: Callable[[str, str], None] | None = None
    visits_layers: bool = True  # Whether it is told of modules within layers too
    use_up: UseUp | None = None  # Takes gradients as they are formed; None where they stay
    # Steps what was taken, making states where it is the first step; None where gradients are stepped as on one GPU.
    update: Callable[..., Any] | None = None
    stepped: Callable[[], None] = _nothing  # Behind the update
    sums: HeadSums | None = None  # Where gradients of a loss that runs backward chunk by chunk are added up here
    adds_tied: bool = False  # Whether the gradients of a tied embedding and head are added up in that of the head


def handed_over(mode: Mode, micro_step: int) -> Mode:
    """Have every gradient handed over as it is formed."""
    del mode, micro_step
    return "layer"


def first_and_last(count: int) -> Sequence[int]:
    """Return the first two micro-steps and the last: those between do what the second does."""
    return sorted({0, min(1, count - 1), count - 1})
