"""Which layers each stage of a pipeline has, and in what order each rank runs its micro-batches through its stages."""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Literal

from memplan.catalog.config_keys.parallel_keys import Parallel, Schedule
from memplan.documents.frozen_values import dataclass
from memplan.errors import CannotAnswerError, InvalidFileError
from memplan.model.model import Model
from memplan.model.parameter_tensors import inventory_of
from memplan.training.resolved import TrainingSetup

Kind = Literal["forward", "backward", "input", "weight", "gather", "release", "reduce"]
V_SHAPED = ("zbv", "dualpipev")
"""Schedules that give a rank one stage of the first half and its mirror image of the second."""
ONE_STAGE = ("gpipe", "1f1b")
IN_ROUNDS = ("interleaved", "interleaved-zero-bubble")
"""Schedules that run as many micro-batches as ranks, or nearly, through each stage in turn."""
MOST_GATHERED = 3
"""Stages of a rank whose weights are gathered at a time: those that it runs next (``max_active_stages``)."""


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that a rank does."""

    # ``input`` is the part of backward that forms the gradient of a stage's input, ``weight`` the rest; ``gather``,
    # ``release`` and ``reduce`` are of a stage's weights and gradients.
    kind: Kind
    stage: int  # Of the pipeline, from 0
    micro_batch: int = -1  # From 0; -1 where it is of none


def stages_of(rank: int, parallel: Parallel) -> tuple[int, ...]:
    """Return the stages that a rank has, the first one first."""
    ranks = parallel.pipeline
    if parallel.order in V_SHAPED:
        return rank, 2 * ranks - 1 - rank
    return tuple(rank + ranks * chunk for chunk in range(parallel.virtual))


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
    if order in V_SHAPED and parallel.virtual != 2:
        raise InvalidFileError([f"parallel.virtual: {order} gives each rank two stages; use 2"])
    least = {"1f1b": ranks, "dualpipev": 2 * ranks}.get(order, 1)
    if together < least:
        raise InvalidFileError(
            [f"parallel.micro_batches: {order} over {ranks} ranks takes {least} at least, got {together}"]
        )
    rounds = max(1, together // ranks)
    if order in IN_ROUNDS and together % rounds:
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
    yield from _in_rounds(rank, parallel, 2, None)


def _interleaved_zero_bubble(rank: int, parallel: Parallel) -> Iterator[Action]:
    yield from _in_rounds(rank, parallel, 1, rank)


def _in_rounds(rank: int, parallel: Parallel, hop: int, late: int | None) -> Iterator[Action]:
    """Yield rounds of micro-batches that pass a rank's stages one after another.

    Args:
        hop: Forwards that a rank is ahead of the next one.
        late: Gradients of weights that wait until later; None where a backward is one.
    """
    ranks, chunks, together = parallel.pipeline, parallel.virtual, parallel.together
    size = together // max(1, together // ranks)
    ahead = min((chunks - 1) * size + hop * (ranks - 1 - rank), together * chunks)
    done: Counter[tuple[str, int]] = Counter()
    waiting: deque[Action] = deque()

    def action(kind: Kind, chunk: int) -> Action:
        stage = chunk * ranks + rank
        done[kind, stage] += 1
        return Action(kind, stage, done[kind, stage] - 1)

    for number in range(together * chunks + ahead):
        if number < together * chunks:
            yield action("forward", number // size % chunks)
        if number >= ahead:
            chunk = chunks - 1 - (number - ahead) // size % chunks
            back = action("backward" if late is None else "input", chunk)
            yield back
            if late is not None:
                waiting.append(Action("weight", back.stage, back.micro_batch))
                if number - ahead >= late:
                    yield waiting.popleft()
    yield from waiting


def _zbv(rank: int, parallel: Parallel) -> Iterator[Action]:
    """Yield the V-shaped zero bubble schedule, as if micro-batches filled the pipeline; others than there are are left out."""
    ranks, (low, high) = parallel.pipeline, stages_of(rank, parallel)
    done: Counter[tuple[str, int]] = Counter()

    def run(kinds: str, stage: int) -> Iterator[Action]:
        for kind in ({"F": "forward", "I": "input", "W": "weight"}[letter] for letter in kinds):
            done[kind, stage] += 1
            yield Action(kind, stage, done[kind, stage] - 1)  # type: ignore[arg-type]

    def all_of() -> Iterator[Action]:
        together = max(2 * ranks - 1, parallel.together)
        for _ in range(2 * (ranks - rank) - 1):
            yield from run("F", low)
        for _ in range(rank):
            yield from (*run("F", high), *run("F", low))
        for _ in range(ranks - rank):
            yield from run("FIW", high)
        while done["forward", high] < done["forward", low] or done["forward", low] < together:
            if done["forward", low] < together:
                yield from run("F", low)
            yield from (*run("IW", low), *run("FIW", high))
        for _ in range(rank):
            yield from (*run("I", low), *run("I", high))
        for _ in range(ranks - rank):
            yield from run("IW", low)
        for stage in (high, low):
            while done["weight", stage] < done["input", stage]:
                yield from run("W", stage)

    return (action for action in all_of() if action.micro_batch < parallel.together)


def _dualpipev(rank: int, parallel: Parallel) -> Iterator[Action]:
    """Yield the V-shaped schedule that runs a forward beside a backward; here the one before the other."""
    ranks, (low, high) = parallel.pipeline, stages_of(rank, parallel)
    behind = ranks - rank - 1
    done: Counter[tuple[str, int]] = Counter()
    waiting: deque[Action] = deque()

    def forward(stage: int) -> Action:
        done["forward", stage] += 1
        return Action("forward", stage, done["forward", stage] - 1)

    def back(stage: int, *, split: bool = False) -> Action:
        done["backward", stage] += 1
        number = done["backward", stage] - 1
        if split:
            waiting.append(Action("weight", stage, number))
        return Action("input" if split else "backward", stage, number)

    def weight() -> Iterator[Action]:
        if waiting:
            yield waiting.popleft()

    yield from (forward(low) for _ in range(2 * behind))
    for _ in range(rank + 1):
        yield from (forward(low), forward(high))
    for _ in range(behind):
        yield from (back(high, split=True), *weight(), forward(high))
    for _ in range(parallel.together - 2 * ranks + rank + 1):
        yield from (forward(low), back(high), forward(high), back(low))
    for _ in range(behind):
        yield from (back(high), forward(high), back(low))
    split = False
    for number in range(rank + 1):
        middle = number == (rank + 1) // 2
        split = split or (middle and rank % 2 == 1)
        yield back(high, split=split)
        split = split or (middle and rank % 2 == 0)
        yield back(low, split=split)
    for _ in range(behind):
        yield from (*weight(), back(low, split=split))
    for _ in range(rank + 1):
        yield from weight()


_ORDERS: dict[Schedule, Callable[[int, Parallel], Iterator[Action]]] = {
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "interleaved": _interleaved,
    "interleaved-zero-bubble": _interleaved_zero_bubble,
    "zbv": _zbv,
    "dualpipev": _dualpipev,
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
        if action.kind in ("backward", "weight"):
            done[action.stage] += 1
            if done[action.stage] == together:
                yield Action("reduce", action.stage)


def layers_of_stages(layers: int, parallel: Parallel) -> tuple[int, ...]:
    """Return how many layers each stage has, the first stage first: the embedding counts as some, and so does the head.

    Raises:
        InvalidFileError: More stages than layers.

    Source:
        ``_generate_llm_fqn_per_model_part`` in torchtitan/distributed/pipeline_parallel.py (0.3.0).

    Example:
        >>> layers_of_stages(32, Parallel(pipeline=4))
        (8, 9, 8, 7)
    """
    stages, less, least = (
        parallel.pipeline * parallel.virtual,
        parallel.first_stage_less_layers,
        parallel.last_stage_less_layers,
    )
    each, more = divmod(layers + less + least, stages)
    if each < max(1, less, least):
        most = (layers + less + least) // max(1, less, least)
        raise InvalidFileError(
            [
                f"parallel.pipeline: {layers} layers do not fill {stages} stages, but {most} at most (parallel.pipeline times parallel.virtual)"
            ]
        )
    sizes = [each + (stage < more) for stage in range(stages)]
    sizes[0] -= less
    sizes[-1] -= least
    return tuple(sizes)


def at_stage(setup: TrainingSetup, stage: int) -> TrainingSetup:
    """Return a setup of which one rank of the pipeline is planned."""
    parallel = replace(setup.config.parallel, stage=stage)
    return replace(setup, config=replace(setup.config, parallel=parallel))


def staged(model: Model, setup: TrainingSetup) -> Model:
    """Return a model as one rank of a pipeline has it.

    Args:
        model: The whole model, as its stack builds it and a rank's tensor degree divides it.
        setup: The training setup, whose ``parallel.stage`` is the rank.

    Raises:
        CannotAnswerError: A model that is not of equal layers, or whose ends are tied.
        InvalidFileError: More stages than layers.
    """
    parallel = setup.config.parallel
    if model.spec.tie_word_embeddings:  # ``update_from_config`` in torchtitan/models/common/decoder.py (0.3.0)
        text = f"{setup.stack.label} runs no pipeline of a model whose head is its embedding, as that of {model.spec.name} is"
        raise CannotAnswerError(f"parallel.pipeline: {text}; use 1")
    if len(model.spec.runs) > 1:
        text = f"layers of several kinds of {model.spec.name} over stages are not modelled"
        raise CannotAnswerError(f"parallel.pipeline: {text}; use 1")
    sizes, own = layers_of_stages(model.spec.num_hidden_layers, parallel), stages_of(parallel.stage or 0, parallel)
    if any(sizes[stage] == 0 for stage in own):
        raise CannotAnswerError(
            f"parallel.pipeline: a stage without layers is not modelled; {len(sizes)} stages of {sizes}"
        )
    run = replace(model.spec.runs[0], count=sum(sizes[stage] for stage in own))
    spec = replace(model.spec, runs=(run,))
    ends = {"embedding": 0 in own, "head": len(sizes) - 1 in own, "norm": len(sizes) - 1 in own}
    retained = tuple(tensor for tensor in inventory_of(spec) if "{}" in tensor.name or ends.get(tensor.role, True))
    return replace(model, spec=spec, inventory=retained)
