"""Layers at which a step may be the fullest: of many that are alike, only a few need to be looked at."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from memplan.documents.frozen_values import dataclass
from memplan.model.spec import LayerRun
from memplan.step.tapes.linear_forms import Form


def last_places(
    runs: Iterable[tuple[int, int]], left: Mapping[int, Form], around: Form
) -> tuple[list[tuple[int, Form]], Form]:
    """Return the last place of each kind with what lies around it there, and what lies around when all have run.

    Forward only adds, so that no earlier place of a kind is fuller.

    Args:
        runs: Runs in order: the kind of its layers, and how many they are.
        left: What one of each kind leaves.
        around: What is there before the first.
    """
    below: dict[int, dict[int, int]] = {}
    counts: dict[int, int] = {}
    for kind, count in runs:
        before = counts.get(kind, 0)
        below.pop(kind, None)
        below[kind] = {**counts, kind: before + count - 1}
        counts[kind] = before + count

    def filled(counts: Mapping[int, int]) -> Form:
        return sum((left[kind] * count for kind, count in counts.items()), around)

    return [(kind, filled(counts)) for kind, counts in below.items()], filled(counts)


def layer_counts(runs: Iterable[tuple[int, LayerRun]]) -> dict[int, int]:
    """Return how many layers there are of each kind, given each run with its kind."""
    counts: dict[int, int] = {}
    for key, run in runs:
        counts[key] = counts.get(key, 0) + run.count
    return counts


@dataclass(frozen=True, slots=True)
class Place:
    """A layer whose backward may be the peak."""

    kind: tuple[int, int, int]  # The kind of its layer, the length of its run, and its place in that
    layer: int  # Its number
    below: Mapping[int, int]  # Layers of each kind that have not run backward yet
    formed: int  # Gradients that those above have left
    tables: bool = True  # Whether rotary tables are still there, which the layer or one below it needs


def ends(places: Sequence[Place], around_of: Callable[[Place], Form]) -> Iterator[Place]:
    """Yield the places that can be the fullest of their kind.

    One that lies midway between its neighbours of the same kind needs no more than the fuller of
    them, whatever the quantities are, since forms are linear. Layers that alternate are such.
    """
    kinds: dict[tuple[tuple[int, int, int], bool], list[Place]] = {}
    for place in places:
        kinds.setdefault((place.kind, place.tables), []).append(place)

    def is_midway(before: Place, here: Place, after: Place) -> bool:
        even = all(before.below[key] + after.below[key] == 2 * count for key, count in here.below.items())
        if even and before.formed + after.formed == 2 * here.formed:
            return True
        return around_of(before) + around_of(after) == around_of(here) * 2

    midway = {
        here.layer
        for group in kinds.values()
        for before, here, after in zip(group, group[1:], group[2:], strict=False)
        if is_midway(before, here, after)
    }
    return (place for place in places if place.layer not in midway)
