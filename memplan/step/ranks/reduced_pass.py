"""What becomes of a unit's gradients in one forward and backward of a rank that holds shards."""

from collections.abc import Iterator
from dataclasses import dataclass

from memplan.step.collectives.gathered_units import Unit
from memplan.step.tapes.taped_operations import Mode

COPYING, REDUCTION = "copy into the buffer of the reduction", "reduction"
"""What runs as a unit's gradients are reduced."""


@dataclass(frozen=True, slots=True)
class Pass:
    """What becomes of gradients in one forward and backward."""

    mode: Mode  # What becomes of those that are kept; ``again`` adds to them
    reduces: bool = True  # Whether whole gradients are reduced, and not kept whole until a later micro-step's are
    beside: bool = False  # Whether there are whole gradients of earlier micro-steps, which are added to

    def formed(self, whole: int) -> int:
        """Return the gradients that there are once a unit has formed its own, besides those from before."""
        return 0 if self.beside else whole

    def scattered(self, unit: Unit, whole: int) -> int:
        """Return the same when they have been reduced."""
        return unit.kept_bytes + unit.narrow_bytes + unit.last_bytes - whole * self.beside

    def reductions(self, unit: Unit, whole: int) -> Iterator[tuple[str, int, int]]:
        """Yield the moments of a unit's reduction: what runs, gradients besides those from before, and what is there of communication.

        Its groups are reduced one after the other, the last first; those that are still to come are gathered yet.

        Args:
            whole: Its gradients as they are formed.
        """
        if not unit.groups:
            yield COPYING, self.formed(whole), unit.reduced_bytes
            yield REDUCTION, self.scattered(unit, whole), unit.reduced_bytes
            return
        done = reduced = 0
        for number in reversed(range(len(unit.groups))):
            own, rest = unit.groups[number], unit.groups[:number]
            waiting, gathered = sum(one.formed_bytes for one in rest), sum(one.gathered_bytes for one in rest)
            reduced += own.reduced_bytes
            formed = own.formed_bytes + own.reordered_bytes
            yield COPYING, done + waiting + self.formed(formed), reduced + gathered
            yield REDUCTION, done + waiting + self.scattered(own, own.formed_bytes), reduced + gathered
            done += self.left(own, own.formed_bytes)

    def left(self, unit: Unit, whole: int) -> int:
        """Return what a unit leaves besides what was there before."""
        if not self.reduces:
            return self.formed(whole)
        new = self.mode == "first" or self.beside
        return unit.left_bytes * new + unit.waiting_bytes(new=new) - whole * self.beside
