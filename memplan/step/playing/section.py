"""A part of the model on tape, played once for every way that it may run."""

from collections.abc import Collection
from dataclasses import dataclass, field

from memplan.step.playing.backward import play_backward
from memplan.step.playing.player import Player
from memplan.step.playing.recomputation import NOTHING_AGAIN, Recomputation
from memplan.step.tapes.linear_forms import ZERO, Form, Part, Quantity, Storage, single_form
from memplan.step.tapes.live_bytes import LiveBytes
from memplan.step.tapes.moments import Played, dominant
from memplan.step.tapes.tape import Tape
from memplan.step.tapes.taped_operations import Mode, Value

TURNED = ("mul cos", "mul sin", "mul complex", "rotary")
"""Beginnings of what operations are called that read rotary tables."""

COPIED = ("spread table", "cast table")
"""What forms a table of a layer's own out of one that it is given, which backward has no need of."""

SavedTensor = tuple[str, Quantity, int, Part]
"""Operation that saves it first, and its size."""


def play(
    tape: Tape, output: Value, mode: Mode, entry: Value | None = None, recomputation: Recomputation = NOTHING_AGAIN
) -> Played:
    """Return what is alive while a part runs forward, then backward from the gradient of ``output``."""
    live = LiveBytes(tape.storages)
    player = Player(tape, mode, entry, recomputation, live)
    retained = {output.storage, *player.saved_in_forward()}
    live.storages[: len(tape.storages)] = by_life(tape, retained)
    player.forward(saves=True)
    live.storages[: len(tape.storages)] = by_life(tape, {*retained, *tape.saved_storages()})
    forward, player.instants = player.instants, []
    carried = player.region_ends()
    saved = player.live.form()
    if tape.nodes:
        play_backward(player, output)
    return Played(dominant(forward), saved, carried, dominant(player.instants), player.escaped_form())


def play_forward(tape: Tape) -> Played:
    """Return the moments of a forward that saves nothing, as under ``no_grad``."""
    player = forward_player(tape)
    player.forward(saves=False)
    return Played(dominant(player.instants), ZERO, player.region_ends(), [])


def forward_player(tape: Tape) -> Player:
    """Return what plays such a forward."""
    return Player(tape, "first", None, NOTHING_AGAIN, LiveBytes(by_life(tape, ())))


def by_life(tape: Tape, retained: Collection[int]) -> list[Storage]:
    """Return the storages of a tape: those that stay for backward are activations, others temporaries, as are copies of weights."""
    copies = {storage for item in tape.operations if item.name == "cast weight" for storage in item.makes}
    lives = (
        Part.ACTIVATIONS if own in retained and own not in copies else Part.TEMPORARIES
        for own in range(len(tape.storages))
    )
    return [
        (part if part not in (Part.ACTIVATIONS, Part.TEMPORARIES) else life, quantity, size)
        for (part, quantity, size), life in zip(tape.storages, lives, strict=True)
    ]


@dataclass(slots=True, eq=False)
class Section:
    """One part of the model on tape, which nothing is added to any more: its input and its output."""

    tape: Tape
    entry: Value
    output: Value
    _played: dict[tuple[Mode, Recomputation], Played] = field(default_factory=dict)
    _evaluated: list[Played] = field(default_factory=list)
    _left: dict[Mode, int] = field(default_factory=dict)
    _saved: tuple[SavedTensor, ...] | None = None

    @property
    def gradients(self) -> int:
        """Gradients of its weights."""
        return sum(w.gradient_bytes for node in self.tape.nodes for w in node.weights if w.trainable and not w.shared)

    @property
    def turns(self) -> bool:
        """Whether its backward turns something by rotary tables that it is given, or a function of it is given them."""
        if any(operation.name in COPIED for operation in self.tape.operations):
            return False
        return any(node.name.startswith(TURNED) for node in self.tape.nodes)

    def left(self, mode: Mode) -> int:
        """Return the gradients of its weights that backward adds to those that are there."""
        if mode not in self._left:
            weights = (w for node in self.tape.nodes for w in node.weights if w.trainable and not w.shared)
            left = "joins-again" if mode == "joins-again" else "first"
            sizes = sum(w.gradient_bytes for w in weights if w.own_mode(mode) == left)
            self._left[mode] = -sizes if mode == left == "joins-again" else sizes  # what has waited goes
        return self._left[mode]

    @property
    def saved_tensors(self) -> tuple[SavedTensor, ...]:
        """What it saves for backward, tensor by tensor."""
        if self._saved is None:
            self._saved = tuple(self.tape.saved_tensors())
        return self._saved

    def least_saved(self, recomputation: Recomputation = NOTHING_AGAIN) -> Form:
        """Return what it saves for backward at least: where it is computed again its input, and results of products."""
        if recomputation.kind == "none":
            return self.tape.saved_form()
        products = [operation for operation in self.tape.operations if operation.traits.product]
        retains = recomputation.kind == "selective" and not recomputation.alternate
        results = {storage for operation in products if retains for storage in operation.makes}
        storages = self.tape.storages
        return sum((single_form(*storages[storage]) for storage in {self.entry.storage, *results}), ZERO)

    def recomputed(self) -> Form:
        """Return what is alive at least as it is computed again: its input, and what all operations but the last that saves have saved.

        The last one that saves has a moment as it runs, unless it lies between others; nothing is said then.
        """
        saving = [item for item in self.tape.operations if item.node is not None and item.node.packs]
        if not saving or saving[-1].between or self.tape.waits:
            return ZERO
        saved = {storage for item in saving[:-1] if item.node is not None for storage in item.node.saved}
        return sum((single_form(*self.tape.storages[own]) for own in {self.entry.storage, *saved}), ZERO)

    def played(self, mode: Mode, recomputation: Recomputation = NOTHING_AGAIN) -> Played:
        """Return what is alive while it runs forward and backward."""
        key = (mode, recomputation)
        if key not in self._played:
            self._played[key] = play(self.tape, self.output, mode, self.entry, recomputation)
        return self._played[key]

    def evaluated(self) -> Played:
        """Return what is alive while it runs forward and saves nothing."""
        if not self._evaluated:
            self._evaluated.append(play_forward(self.tape))
        return self._evaluated[0]
