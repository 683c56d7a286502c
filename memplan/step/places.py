"""Layers at which a step may be the fullest: of many that are alike, only a few need to be looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from memplan.model.spec import LayerRun
from memplan.step.tapes.linear_forms import Form, add_forms, scale_form
from memplan.step.tapes.liveness import Played


def last_places(parts: Iterable[tuple[Played, int, Form]], around: Form) -> tuple[list[tuple[Played, Form]], Form]:
    """Return the last place of each part with what lies around it there, and what lies around when all have run.

    Forward only adds, so that no earlier place of a part is fuller.

    Args:
        parts: Parts in order: how often each runs in a row, and what it leaves each time.
        around: What is there before the first.
    """
    kinds: dict[int, tuple[Played, Form]] = {}
    below: dict[int, dict[int, int]] = {}
    counts: dict[int, int] = {}
    for part, count, left in parts:
        key = id(part)
        kinds[key] = part, left
        before = counts.get(key, 0)
        below.pop(key, None)
        below[key] = {**counts, key: before + count - 1}
        counts[key] = before + count

    def filled(counts: Mapping[int, int]) -> Form:
        return add_forms(around, *(scale_form(kinds[key][1], count) for key, count in counts.items()))

    return [(kinds[key][0], filled(counts)) for key, counts in below.items()], filled(counts)


def layer_counts(runs: Iterable[tuple[int, LayerRun]]) -> dict[int, int]:
    """Return how many layers there are of each kind, given each run with its kind."""
    counts: dict[int, int] = {}
    for key, run in runs:
        counts[key] = counts.get(key, 0) + run.count
    return counts


@dataclass(frozen=True, slots=True)
class Place:
    """A layer whose backward may be the peak.

    Attributes:
        kind: Its section, and its place in its run.
        layer: Its number.
        below: Layers of each section that have not run backward yet.
        formed: Gradients that those above have left.
    """

    kind: tuple[int, int, int]
    layer: int
    below: Mapping[int, int]
    formed: int


def ends(places: Sequence[Place], around_of: Callable[[Place], Form]) -> Iterator[Place]:
    """Yield the places that can be the fullest of their kind.

    One that lies midway between its neighbours of the same kind needs no more than the fuller of
    them, whatever the quantities are, since forms are linear. Layers that alternate are such.
    """
    kinds: dict[tuple[int, int, int], list[Place]] = {}
    for place in places:
        kinds.setdefault(place.kind, []).append(place)

    def is_midway(before: Place, here: Place, after: Place) -> bool:
        even = all(before.below[key] + after.below[key] == 2 * count for key, count in here.below.items())
        if even and before.formed + after.formed == 2 * here.formed:
            return True
        return add_forms(around_of(before), around_of(after)) == scale_form(around_of(here), 2)

    midway = {
        here.layer
        for group in kinds.values()
        for before, here, after in zip(group, group[1:], group[2:], strict=False)
        if is_midway(before, here, after)
    }
    return (place for place in places if place.layer not in midway)
