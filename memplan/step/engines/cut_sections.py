"""Parts of a model, cut where something happens beside their operations: gradients are formed, modules begin and end."""

from collections.abc import Sequence

from memplan.documents.frozen_values import dataclass
from memplan.step.playing.backward import play_backward
from memplan.step.playing.player import Player
from memplan.step.playing.recomputation import NOTHING_AGAIN, WITHOUT_MOMENT, Mark, Recomputation
from memplan.step.playing.section import Section
from memplan.step.tapes.moments import Instant, dominant

Segment = tuple[tuple[Instant, ...], Instant | None, Mark | None]
"""Moments of a part, then what happens beside its operations, and the moment at which it does; an end has none."""


@dataclass(frozen=True, slots=True)
class Segments:
    """A part of the model, cut where something happens beside its operations."""

    forward: tuple[Segment, ...] = ()  # Its forward
    backward: tuple[Segment, ...] = ()  # Its backward, with what is computed again for it


def segments(section: Section, recomputation: Recomputation = NOTHING_AGAIN, *, visits: bool = False) -> Segments:
    """Return a part cut where gradients have been formed, and modules begin and end where that is asked for."""
    player = Player(section.tape, "layer", section.entry, recomputation)
    marks: list[Mark] = []
    player.marked, player.visits = marks.append, visits
    player.forward(saves=True)
    forward = cut(player, marks)
    if not section.tape.nodes:
        return Segments(forward)
    marks.clear()
    player.instants = []
    player.region_ends()
    play_backward(player, section.output)
    return Segments(forward, cut(player, marks))


def cut(player: Player, marks: Sequence[Mark]) -> tuple[Segment, ...]:
    """Return what a player has played, cut at its marks."""
    parts: list[Segment] = []
    first = 0
    for mark in marks:
        ends = mark.kind in WITHOUT_MOMENT
        parts.append(
            (tuple(dominant(player.instants[first : mark.place])), None if ends else player.instants[mark.place], mark)
        )
        first = mark.place + (not ends)
    return (*parts, (tuple(dominant(player.instants[first:])), None, None))
