"""Parallel layouts: one search for each, and the Pareto front of all of them together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from memplan.catalog.config_keys.parallel_keys import Parallel
from memplan.solver.search.best_first import Miss, Outcome, Search
from memplan.solver.search.pareto_front import Class, Combination, no_worse, ranked
from memplan.solver.search.space import Space
from memplan.step.states.parallel_shards import is_sharded


def spaces_by_layout(space: Space, parallels: Sequence[Parallel]) -> Iterator[Space]:
    """Yield the part of a space that each parallel layout allows, where it allows any."""
    for parallel in parallels:
        narrowed = under_layout(space, parallel)
        if all(narrowed.axes):
            yield narrowed


def under_layout(space: Space, parallel: Parallel) -> Space:
    """Return the part of a space that can be planned under a parallel layout; other contradictions are left out later."""
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


def joint_outcome(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the Pareto front of several searches together."""
    first = outcomes[0]
    if len(outcomes) == 1:
        return first
    best: dict[Class, Combination] = {}
    for combination in (combination for outcome in outcomes for combination in outcome.front):
        other = best.get(combination.group)
        if other is None or combination.token_femtoseconds < other.token_femtoseconds:
            best[combination.group] = combination
    undominated = [own for own in best.values() if not any(_dominates(other, own) for other in best.values())]
    return replace(
        first,
        front=tuple(ranked(undominated)),
        considered=sum(outcome.considered for outcome in outcomes),
        compiled=sum(outcome.compiled for outcome in outcomes),
    )


def _dominates(other: Combination, own: Combination) -> bool:
    """Tell whether another combination is no worse in any objective."""
    better = no_worse(other.group, own.group) and other.token_femtoseconds <= own.token_femtoseconds
    return other is not own and better


def nearest_miss(searches: Sequence[Search]) -> Miss | None:
    """Return the combination of all searches that needs the least memory, or None where none is allowed."""
    misses = [miss for search in searches if (miss := search.nearest_miss()) is not None]
    return min(misses, key=lambda miss: miss.plan.upper_bytes, default=None)
