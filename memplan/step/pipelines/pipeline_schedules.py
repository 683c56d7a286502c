"""In what order each rank of a pipeline runs its micro-batches through its stages.

Source:
    torch/distributed/pipelining/schedules.py (v2.13.0): ``_step_microbatches`` of GPipe and 1F1B, whose tables are not what
    they run, and ``_calculate_single_rank_operations`` of the others; ``_add_unshard_reshard`` and ``_add_reduce_grad``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from memplan.catalog.config_keys.parallel_keys import Parallel, Schedule
from memplan.documents.frozen_values import dataclass
from memplan.errors import InvalidFileError

Kind = Literal["forward", "backward", "gather", "release", "reduce"]
ONE_STAGE = ("gpipe", "1f1b")
MOST_GATHERED = 3
"""Stages of a rank whose weights are gathered at a time: those that it runs next (``max_active_stages``)."""


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that a rank does."""

    kind: Kind  # ``gather``, ``release`` and ``reduce`` are of a stage's weights and gradients
    stage: int  # Of the pipeline, from 0
    micro_batch: int = -1  # From 0; -1 where it is of none


def stages_of(rank: int, parallel: Parallel) -> tuple[int, ...]:
    """Return the stages that a rank has, the first one first."""
    return tuple(rank + parallel.pipeline * chunk for chunk in range(parallel.virtual))


def actions_of(rank: int, parallel: Parallel) -> tuple[Action, ...]:
    """Return what a rank does in a step, in order.

    Raises:
        InvalidFileError: A schedule that does not suit the numbers of stages and micro-batches.
    """
    refuse_numbers(parallel)
    plain = tuple(_ORDERS[parallel.order](rank, parallel))
    if parallel.order in ONE_STAGE:
        return *plain, Action("reduce", rank)
    return tuple(_reducing(_gathering(plain), parallel.together))


def refuse_numbers(parallel: Parallel) -> None:
    """Raise where a schedule does not suit the numbers of stages and micro-batches."""
    order, ranks, together = parallel.order, parallel.pipeline, parallel.together
    if order in ONE_STAGE and parallel.virtual > 1:
        raise InvalidFileError([f"parallel.schedule: {order} gives each rank one stage; use parallel.virtual: 1"])
    if order not in ONE_STAGE and parallel.virtual < 2:
        raise InvalidFileError([f"parallel.schedule: {order} gives each rank several stages; set parallel.virtual: 2"])
    if order == "1f1b" and together < ranks:
        raise InvalidFileError(
            [f"parallel.micro_batches: {order} over {ranks} ranks takes {ranks} at least, got {together}"]
        )
    rounds = max(1, together // ranks)
    if order == "interleaved" and together % rounds:
        near = min((n for n in range(1, 2 * together) if n % max(1, n // ranks) == 0), key=lambda n: abs(n - together))
        text = (
            f"{together} do not divide into {rounds} rounds of {order} over {ranks} ranks; the nearest that do: {near}"
        )
        raise InvalidFileError([f"parallel.micro_batches: {text}"])


# -------------------------------------------------------------------- orders
def _gpipe(rank: int, parallel: Parallel) -> Iterator[Action]:
    for kind in ("forward", "backward"):
        for number in range(parallel.together):
            yield Action(kind, rank, number)


def _one_forward_one_backward(rank: int, parallel: Parallel) -> Iterator[Action]:
    ahead = parallel.pipeline - rank
    for number in range(parallel.together + ahead - 1):
        if number < parallel.together:
            yield Action("forward", rank, number)
        if number >= ahead - 1:
            yield Action("backward", rank, number - ahead + 1)


def _interleaved(rank: int, parallel: Parallel) -> Iterator[Action]:
    """Yield rounds of micro-batches that pass a rank's stages one after another."""
    ranks, chunks, together = parallel.pipeline, parallel.virtual, parallel.together
    size = together // max(1, together // ranks)
    ahead = min((chunks - 1) * size + 2 * (ranks - 1 - rank), together * chunks)
    done: Counter[tuple[Kind, int]] = Counter()

    def action(kind: Kind, chunk: int) -> Action:
        stage = chunk * ranks + rank
        done[kind, stage] += 1
        return Action(kind, stage, done[kind, stage] - 1)

    for number in range(together * chunks + ahead):
        if number < together * chunks:
            yield action("forward", number // size % chunks)
        if number >= ahead:
            yield action("backward", chunks - 1 - (number - ahead) // size % chunks)


_ORDERS: dict[Schedule, Callable[[int, Parallel], Iterator[Action]]] = {
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "interleaved": _interleaved,
}


# -------------------------------------------------------------------- weights and gradients
def _gathering(actions: Sequence[Action]) -> Iterator[Action]:
    """Yield actions, each preceded by what gathers the weights of the stages that come next, and lets go of others'."""
    gathered: set[int] = set()
    for place, action in enumerate(actions):
        coming: list[int] = []
        for other in actions[place:]:
            if other.stage not in coming:
                coming.append(other.stage)
                if len(coming) == MOST_GATHERED:
                    break
        yield from (Action("release", stage) for stage in gathered.difference(coming))
        yield from (Action("gather", stage) for stage in coming if stage not in gathered)
        gathered = set(coming)
        yield action
    yield from (Action("release", stage) for stage in gathered)


def _reducing(actions: Iterator[Action], together: int) -> Iterator[Action]:
    """Yield actions, the last backward of each stage followed by the reduction of its gradients."""
    done: Counter[int] = Counter()
    for action in actions:
        yield action
        if action.kind == "backward":
            done[action.stage] += 1
            if done[action.stage] == together:
                yield Action("reduce", action.stage)
