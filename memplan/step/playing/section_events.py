"""A tape played as events: every allocation and every free, in order, with names local to the part that is played."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache

from memplan.documents.frozen_values import dataclass
from memplan.step.playing.backward import play_backward
from memplan.step.playing.player import Player
from memplan.step.playing.recomputation import NOTHING_AGAIN, Recomputation
from memplan.step.playing.section import Section, by_life
from memplan.step.tapes.event_recorder import NO_STORAGE, Codes, EventRecorder, Places, UsedUp
from memplan.step.tapes.linear_forms import Quantity, Storage
from memplan.step.tapes.reduction_workspaces import column_sum_bytes
from memplan.step.tapes.tape import Tape
from memplan.step.tapes.taped_operations import Mode, Reduction, Value

MOST_SECTIONS = 64
"""Parts whose events are remembered; only the plan that is shown asks for them."""


Visit = tuple[int, str, str]
"""A place among events at which a module begins or ends, with the kind of the mark and the name of the module."""

Visits = tuple[Visit, ...]


@dataclass(frozen=True, slots=True)
class SectionEvents:
    """What a part of the model allocates and frees."""

    storages: tuple[Storage | Reduction, ...]  # Sizes of what it allocates, as forms or as sums over rows
    forward: Codes  # Events of its forward
    region_end: Codes  # Those when the whole forward is done: weights that autocast has cast
    backward: Codes  # Events of its backward, what is computed again included
    entry: int  # What it is given, which another part has allocated and this one may free
    output: int  # What it hands on, which the part that is given it frees, unless ``keeps_output``
    keeps_output: bool
    arriving: int  # The gradient of its output, which another part has allocated and this one frees
    leaving: int  # The gradient of ``entry``, for the part before
    gradient_storages: tuple[tuple[str, int], ...]  # Name of each weight whose gradient stays -> its storage
    products: tuple[Places, Places]  # Places of libraries' first products, in forward and in backward
    used_up: UsedUp = ()  # Gradients that are used up within backward, and where among its events
    summed: UsedUp = ()  # Gradients that others add up, likewise
    escaped: tuple[int, ...] = ()  # What nodes hold as attributes until the graph of the loss goes
    # A result within that a library asks for a gradient of, and that gradient, which stay with that graph.
    leaf: tuple[int, ...] = ()
    # Results that nothing but names has: a model's until all layers have run, or a loss's until it returns; by quantity.
    named: tuple[tuple[Quantity, int], ...] = ()
    waits: bool = False
    cached: tuple[
        int, ...
    ] = ()  # Keys and values that a model returns, and nothing else keeps until its loss is formed
    # Where modules begin and end among events, in forward and in backward: the place, the kind of the mark and its name.
    visits: tuple[Visits, Visits] = ((), ())
    left: tuple[int, ...] = ()  # The place among events of forward where a region of autocast ends, if it does within
    returned: int = NO_STORAGE  # What its function returns besides its output, and forward alone frees

    def holding(self, storage: int) -> SectionEvents:
        """Return the same without what frees one storage, which a loop's own name keeps alive."""
        forward, region_end, backward = (
            tuple([code for code in codes if code != 2 * storage + 1])
            for codes in (self.forward, self.region_end, self.backward)
        )
        left = tuple([place - self.forward[:place].count(2 * storage + 1) for place in self.left])
        return replace(self, forward=forward, region_end=region_end, backward=backward, left=left)

    def sizes(self, values: Sequence[int]) -> list[int]:
        """Return the bytes of each storage, given the values of the quantities."""
        return [_size(storage, values) for storage in self.storages]


def _size(storage: Storage | Reduction, values: Sequence[int]) -> int:
    if isinstance(storage, Reduction):
        return column_sum_bytes(storage.times * values[storage.quantity], storage.columns)
    _, quantity, coefficient = storage
    return coefficient * values[quantity]


@lru_cache(maxsize=MOST_SECTIONS)
def section_events(
    section: Section,
    mode: Mode,
    recomputation: Recomputation = NOTHING_AGAIN,
    *,
    visits: bool = False,
    received: bool = False,
) -> SectionEvents:
    """Return what a part allocates and frees in forward, and in backward from the gradient of its output.

    Args:
        mode, recomputation: What becomes of weight gradients; what forward saves, and what is computed again.
        visits: Whether it is told where modules begin and end; ``received``: whether the gradient of its output stays.
    """
    tape, entry, output = section.tape, section.entry, section.output
    player, recorder = _player(section, mode, recomputation, received)
    player.visits, begun, ended = visits, list[Visit](), list[Visit]()
    player.marked = (lambda mark: begun.append((len(recorder.codes), mark.kind, mark.name))) if visits else None
    forward, in_forward, region_end, left = _forward(player, recorder, saves=True)
    player.marked = (lambda mark: ended.append((len(recorder.codes), mark.kind, mark.name))) if visits else None
    arriving = play_backward(player, output) if tape.nodes else NO_STORAGE
    leaving = player.gradients.get(id(entry), NO_STORAGE)
    backward, in_backward = recorder.cut()
    escaped, leaf = player.escaping_storages(), _leaf(player, output)
    cached = () if tape.cache_stays else tuple(sorted(tape.cached - tape.saved_storages().keys()))
    backward += recorder.rest([leaving, *recorder.gradient_storages.values(), *escaped, *leaf])
    events = SectionEvents(
        storages=tuple(recorder.storages),
        forward=tuple([2 * player.escaped.get(code >> 1, code >> 1) + (code & 1) for code in forward]),
        region_end=region_end,
        backward=backward,
        entry=entry.storage,
        output=output.storage,
        keeps_output=recorder.keeps_output,
        arriving=arriving,
        leaving=leaving,
        gradient_storages=tuple(recorder.gradient_storages.items()),
        products=(in_forward, in_backward),
        used_up=recorder.used_up(),
        summed=recorder.summed(),
        escaped=escaped,
        leaf=leaf,
        named=_named(tape, tape.saved_storages()),
        waits=tape.waits,
        cached=cached,
        left=left,
        returned=_returned(tape, forward),
        visits=(tuple(begun), tuple(ended)),
    )
    return _holding(events, {*leaf, *cached, *[storage for _, storage in events.named]})


def _named(tape: Tape, saved: Container[int] = ()) -> tuple[tuple[Quantity, int], ...]:
    """Return what nothing but names has of a tape's results, by quantity; a graph has what is saved."""
    return tuple([(value.quantity, value.storage) for value in tape.named if value.storage not in saved])


def _player(section: Section, mode: Mode, recomputation: Recomputation, received: bool) -> tuple[Player, EventRecorder]:
    """Return what plays a part, and what writes it down; what stays for backward is activations, as where bytes are counted."""
    tape, output = section.tape, section.output.storage
    recorder = EventRecorder(tape.storages, section.entry.storage, output, received=received)
    player = Player(tape, mode, section.entry, recomputation, recorder)
    retained = {output, *player.saved_in_forward(), *tape.saved_storages()}
    recorder.storages[:] = by_life(tape, retained)
    return player, recorder


def _forward(player: Player, recorder: EventRecorder, *, saves: bool) -> tuple[Codes, Places, Codes, tuple[int, ...]]:
    """Play forward; return its events, the places of its products, the events at the end of the whole forward, and where the region ends."""
    left = list[int]()
    player.region_left = lambda: left.append(len(recorder.codes))
    player.forward(saves=saves)
    recorder.end_of_forward()
    forward, products = recorder.cut()
    player.region_ends()
    return forward, products, recorder.cut()[0], tuple(left)


def _holding(events: SectionEvents, storages: Iterable[int]) -> SectionEvents:
    """Return events without what frees some storages."""
    for storage in storages:
        events = events.holding(storage)
    return events


def _returned(tape: Tape, forward: Codes) -> int:
    """Return what the function of a part returns besides its output, where forward frees it."""
    own = NO_STORAGE if tape.returned is None else tape.returned.storage
    return own if 2 * own + 1 in forward else NO_STORAGE


def _leaf(player: Player, output: Value) -> tuple[int, ...]:
    """Return a leaf within a part, or what it hands on where no node has made that, and its gradient."""
    leaves = [value for value in (player.tape.leaf, output) if value is not None and id(value) in player.gradients]
    return (player.gradients[id(leaves[0])], leaves[0].storage) if leaves and player.tape.nodes else ()


@lru_cache(maxsize=MOST_SECTIONS)
def forward_events(section: Section) -> SectionEvents:
    """Return what a part allocates and frees in a forward that saves nothing, as under ``no_grad``."""
    tape, entry, output = section.tape, section.entry, section.output
    recorder = EventRecorder(by_life(tape, ()), entry.storage, output.storage)
    player = Player(tape, "first", None, NOTHING_AGAIN, recorder)
    forward, in_forward, region_end, left = _forward(player, recorder, saves=False)
    events = SectionEvents(
        storages=tuple(recorder.storages),
        forward=forward,
        region_end=region_end,
        backward=(),
        entry=entry.storage,
        output=output.storage,
        keeps_output=recorder.keeps_output,
        arriving=NO_STORAGE,
        leaving=NO_STORAGE,
        gradient_storages=(),
        products=(in_forward, ()),
        named=_named(tape),
        cached=tuple(sorted(tape.cached)),
        left=left,
        returned=_returned(tape, forward),
    )
    return _holding(events, {*tape.cached, *[storage for _, storage in events.named]})
