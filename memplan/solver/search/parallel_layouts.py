"""Several GPUs: one search for each way of sharing the work, and the front of what all of them find."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from memplan.catalog.training_config import Parallel
from memplan.solver.search.best_first import Miss, Outcome, Search
from memplan.solver.search.pareto_front import Class, Found, no_worse, ranked
from memplan.solver.search.space import Space
from memplan.step.states.parallel_shards import is_sharded


def spaces(space: Space, parallels: Sequence[Parallel]) -> Iterator[Space]:
    """Yield the combinations that each way of sharing the work leaves of a space, where it leaves any."""
    for parallel in parallels:
        found = shared_out(space, parallel)
        if all(found.axes):
            yield found


def shared_out(space: Space, parallel: Parallel) -> Space:
    """Return the part of a space that may be planned under ``parallel``; what else contradicts it is left out later."""
    base = replace(space.base, parallel=parallel)
    if parallel.data == 1:
        return replace(space, base=base)
    plain = replace(
        space,
        base=base,
        weights=tuple(choice for choice in space.weights if not choice.coded),
        gradients=space.gradients if len(space.gradients) == 1 else (None,),
        lifetimes=tuple(life for life in space.lifetimes if life == "step"),
        offloads=tuple(place for place in space.offloads if place == "none"),
    )
    if not is_sharded(parallel):
        return plain
    return replace(
        plain,
        weights=tuple(choice for choice in plain.weights if not choice.loss_scaling),
        masters=tuple(master for master in plain.masters if master == "none"),
        losses=tuple(loss for loss in plain.losses if loss != "chunked"),
    )


def joined(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the front of several searches together: what none of them beats."""
    first = outcomes[0]
    if len(outcomes) == 1:
        return first
    best: dict[Class, Found] = {}
    for found in (found for outcome in outcomes for found in outcome.found):
        other = best.get(found.group)
        if other is None or found.token_femtoseconds < other.token_femtoseconds:
            best[found.group] = found
    kept = [found for found in best.values() if not any(_beats(other, found) for other in best.values())]
    return replace(
        first,
        found=tuple(ranked(kept)),
        considered=sum(outcome.considered for outcome in outcomes),
        compiled=sum(outcome.compiled for outcome in outcomes),
    )


def _beats(other: Found, own: Found) -> bool:
    """Tell whether another combination is no worse in any respect."""
    better = no_worse(other.group, own.group) and other.token_femtoseconds <= own.token_femtoseconds
    return other is not own and better


def nearest_miss(searches: Sequence[Search]) -> Miss | None:
    """Return the combination of all searches that needs the least memory, or None where nothing is allowed."""
    found = [miss for search in searches if (miss := search.nearest_miss()) is not None]
    return min(found, key=lambda miss: miss.plan.upper_bytes, default=None)
