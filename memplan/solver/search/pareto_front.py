"""The Pareto front of a search: its order, and the few combinations that are shown."""

from collections.abc import Iterable, Sequence

from memplan.documents.frozen_values import dataclass
from memplan.plan.planner import CompiledPlan
from memplan.solver.search.evidence_levels import Standing
from memplan.solver.search.space import PassChoice, StateChoice

FINE = 2**16

Class = tuple[int, int, int, int, int, int]
"""Rank of the evidence, quality risk, whether gradients are released at once (which rules out accumulating and
clipping), how coarse weights and optimizer states are (their bytes per element in units of
1 / FINE, negated), and whether optimizer states take host memory."""


TENTHS = 10


@dataclass(frozen=True, slots=True)
class Combination:
    """One combination that fits."""

    state: StateChoice
    way: PassChoice
    batch: int
    standing: Standing
    group: Class
    token_femtoseconds: int  # Estimated time per token, by which combinations are ordered
    step_picoseconds: int  # Estimated time of one optimizer step
    plan: CompiledPlan

    @property
    def objectives(self) -> tuple[int, ...]:
        """The objectives of the front, all minimised: those of its class, and time."""
        return (*self.group, self.token_femtoseconds)


def no_worse(other: Class, own: Class) -> bool:
    """Tell whether a class is at least as good as another in every objective."""
    return all(a <= b for a, b in zip(other, own, strict=True))


def ranked(combinations: Iterable[Combination]) -> list[Combination]:
    """Return a front, best first: evidence, then estimated time in tenths, then quality risk, then time exactly.

    Estimates that are less than a tenth of the fastest apart are taken to be equal.
    """
    front = list(combinations)
    fastest = min((item.token_femtoseconds for item in front), default=1)

    def key(item: Combination) -> tuple[object, ...]:
        status, risk, released, *coarse = item.group
        tenths = (item.token_femtoseconds - fastest) * TENTHS // max(fastest, 1)
        return status, tenths, risk, released, *coarse, item.token_femtoseconds

    return sorted(front, key=key)


def thinned(front: Sequence[Combination]) -> list[Combination]:
    """Return a front without what is faster than another by less than a tenth, and no better otherwise."""
    return [
        item
        for item in front
        if not any(
            other is not item
            and no_worse(other.group, item.group)
            and other.token_femtoseconds * TENTHS < item.token_femtoseconds * (TENTHS + 1)
            for other in front
        )
    ]


def best_few(front: Sequence[Combination], most: int) -> list[Combination]:
    """Return the first of a ranked front, with places for the least risk and the finest weights.

    The fastest and the finest that need no host memory have places too.

    Otherwise combinations that are alike and a little faster would crowd these out.
    """
    if len(front) <= most:
        return list(front)
    status = front[0].group[0]
    equal = [item for item in front if item.group[0] == status]
    least_risk = min(equal, key=lambda item: (item.group[1], *item.group[2:]))
    finest = min(equal, key=lambda item: item.group[3])
    alone = [item for item in equal if not item.group[5]] or [item for item in front if not item.group[5]] or front
    places = (front[0], alone[0], least_risk, finest, min(alone, key=lambda item: item.group[3]))
    wanted = [item for item in front if item in places][:most]
    others = [item for item in front if item not in wanted][: most - len(wanted)]
    return [item for item in front if item in wanted or item in others]
