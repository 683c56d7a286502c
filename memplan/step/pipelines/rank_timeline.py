"""What a rank of a pipeline holds before each thing that it does: micro-batches, weights, gradients, and what has a name; ranks as rows.

Source:
    ``_step_microbatches`` of each schedule in torch/distributed/pipelining/schedules.py and ``forward_one_chunk`` and
    ``backward_one_chunk`` in stage.py (v2.13.0): the plain schedules are one function whose variables hold the last
    output and the last gradient that was sent until others take their names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from operator import ge

from memplan.catalog.config_keys.parallel_keys import Parallel
from memplan.documents.frozen_values import dataclass
from memplan.step.pipelines.pipeline_schedules import ONE_STAGE, Action, actions_of, layers_of_stages, stages_of


@dataclass(frozen=True, slots=True)
class Tail:
    """Norm and head of the last stage, where chunks of the loss run backward within forward and reduce gradients."""

    gathered: bool = False  # Whether their weights are gathered: the loss lets go of them
    summed: bool = False  # Whether whole gradients of the norm wait to be reduced
    head: bool = False  # Whether the head's have been reduced, by themselves
    both: bool = False  # Whether both have been reduced together, into a tensor that stays for the norm's
    pending: int = 0  # Whether the buffer of a reduction is still there: 1 of the head's, 2 of both

    def behind_loss(self) -> Tail:
        """Return what there is when a loss is known."""
        return Tail(False, False, True, self.both or self.summed, 2 if self.summed else 1)


@dataclass(frozen=True, slots=True)
class StageStates:
    """What there is before an action; tuples have one number for each of a rank's stages."""

    pairs: tuple[int, ...]  # Micro-batches that have run forward and not backward
    waiting: tuple[int, ...]  # Those whose gradients of weights are still to be formed
    gathered: tuple[bool, ...]  # Whether the stage's weights are gathered
    buffered: tuple[bool, ...]  # Whether they still lie in the buffers that they were gathered into
    summed: tuple[bool, ...]  # Whether it has formed whole gradients
    reduced: tuple[bool, ...]  # Whether these have been reduced
    outputs: int  # Outputs of micro-batches that are done, which still have a name
    gradients: int  # Gradients of inputs that have been sent, likewise
    tail: Tail  # Norm and head


@lru_cache(maxsize=256)
def moments_of(rank: int, parallel: Parallel) -> tuple[tuple[Action, StageStates], ...]:
    """Return what a rank does with what there is before: of what is done alike, where no stage has fewer in flight."""
    alike: dict[tuple[object, ...], dict[tuple[int, ...], tuple[Action, StageStates]]] = {}
    for action, resident in _all_moments(rank, parallel):
        rest = (action.kind, action.stage, replace(resident, pairs=(), waiting=()))
        alike.setdefault(rest, {}).setdefault((*resident.pairs, *resident.waiting), (action, resident))
    return tuple(result[most] for result in alike.values() for most in _highest(result))


def _highest(counts: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the counts that no other one covers."""
    chosen: list[tuple[int, ...]] = []
    for own in sorted(counts, reverse=True):
        if not any(all(map(ge, other, own)) for other in chosen):
            chosen.append(own)
    return chosen


def _all_moments(rank: int, parallel: Parallel) -> Iterator[tuple[Action, StageStates]]:
    """Yield all that a rank does in a step, each with what there is before."""
    own, named = stages_of(rank, parallel), parallel.order in ONE_STAGE
    place = {stage: index for index, stage in enumerate(own)}
    pairs, waiting = [0] * len(own), [0] * len(own)
    gathered, summed, reduced, buffered = ([False] * len(own) for _ in range(4))
    newest, sent = -1, 0
    done: set[int] = set()
    tail, last = Tail(), parallel.pipeline * parallel.virtual - 1
    for action in actions_of(rank, parallel):
        index = place[action.stage]
        resident = StageStates(
            pairs=tuple(pairs),
            waiting=tuple(waiting),
            gathered=tuple(gathered),
            buffered=tuple(buffered),
            summed=tuple(summed),
            reduced=tuple(reduced),
            outputs=int(newest in done),
            gradients=sent,
            tail=tail,
        )
        yield action, resident
        buffered[index] = action.kind == "gather"
        if action.kind == "forward":
            pairs[index] += 1
            gathered[index] = True
            newest = action.micro_batch if named else -1
            tail = tail.behind_loss() if action.stage == last else tail
        elif action.kind in ("backward", "input"):
            pairs[index] -= 1
            waiting[index] += action.kind == "input"
            summed[index] = summed[index] or action.kind == "backward"
            done.add(action.micro_batch)
            if action.stage == last:
                tail = replace(tail, gathered=True, summed=True)
            sent = int(action.stage > 0 and parallel.order == "1f1b")
            if parallel.order == "gpipe" and action.micro_batch == parallel.together - 1:
                sent = int(action.stage > 0)
        elif action.kind == "weight":
            waiting[index] -= 1
            summed[index] = True
        elif action.kind in ("gather", "release"):
            gathered[index] = action.kind == "gather"
            if action.stage == last:
                tail = replace(tail, gathered=gathered[index])
        else:
            reduced[index], gathered[index] = True, False


def most_pairs(rank: int, parallel: Parallel) -> int:
    """Return the most micro-batches whose activations a rank holds at a time, counted for each of its stages."""
    return max(sum(resident.pairs) + (action.kind == "forward") for action, resident in moments_of(rank, parallel))


@dataclass(frozen=True, slots=True)
class RankRow:
    """One rank of a pipeline."""

    rank: int  # From 0
    stages: tuple[int, ...]  # Of the pipeline that it has
    layers: tuple[int, ...]  # Of each of these
    embedding: bool  # Whether it has the embedding
    head: bool  # Whether it has final norm and head
    pairs: int  # Most micro-batches in flight at a time, counted for each of its stages
    persistent_bytes: int  # What it keeps between steps
    instant: str  # When it needs most
    requested_bytes: int  # What it requests then
    device_bytes: int  # What its GPU holds then


def rank_row(
    rank: int, parallel: Parallel, layers: int, persistent_bytes: int, instant: str, requested: int, device: int
) -> RankRow:
    """Return the row of a rank.

    Args:
        rank: From 0.
        persistent_bytes: What it keeps between steps.
        instant: When it needs most.
        requested: Bytes that it requests then.
        device: Bytes that its GPU holds then.
    """
    sizes, own = layers_of_stages(layers, parallel), stages_of(rank, parallel)
    resident, pairs = tuple(sizes[stage] for stage in own), most_pairs(rank, parallel)
    ends = 0 in own, len(sizes) - 1 in own
    return RankRow(rank, own, resident, *ends, pairs, persistent_bytes, instant, requested, device)
