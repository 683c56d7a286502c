"""Suggested settings: the space that a request leaves open is searched, and each answer planned in full."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from memplan.catalog.catalog import Catalog
from memplan.catalog.config_keys.parallel_keys import Parallel
from memplan.catalog.hardware.hardware_tables import hardware_tables, is_native
from memplan.catalog.training_config import TrainingConfig
from memplan.documents.frozen_values import dataclass
from memplan.errors import CannotAnswerError
from memplan.model.model import Model
from memplan.plan.memory_plan import Device, MemoryPlan
from memplan.plan.planner import CompiledPlan
from memplan.solver.search.axes import AXES, BATCHES, full_space, with_fixed_axes
from memplan.solver.search.best_first import Miss, Outcome, Search
from memplan.solver.search.cluster import Cluster
from memplan.solver.search.pareto_front import Class, Combination, best_few, no_worse, ranked, thinned
from memplan.solver.search.space import Space, as_meant, optimizer_names, without_bf16
from memplan.step.kernels.card_support import without_expandable
from memplan.step.states.parallel_shards import is_sharded
from memplan.training.resolution.resolve_config import resolve
from memplan.training.rules.stack_defaults import default_allocator
from memplan.units import format_bytes

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Request:
    """A request for suggested settings."""

    base: TrainingConfig  # Config of the keys that are not searched, and of the axes that are fixed
    keep: tuple[str, ...] = ()  # Axes fixed to the base config
    min_batch: int = 1  # Smallest micro-batch
    step_batch: int = 1  # Least sequences per optimizer step, over all its micro-batches
    min_sequence: int = 1  # Shortest sequence, in tokens
    experimental: bool = False  # Whether experimental parts may be used
    strict: bool = False  # Whether a job that may not fit at the upper end is no answer
    most: int = 5  # How many answers at most
    host_bytes: int | None = None  # Most host memory that offloaded states may take; None for any amount
    parallels: tuple[Parallel, ...] = ()  # Parallel layouts to search; none is the base's own
    cluster: Cluster | None = None  # Where several GPUs are; None for nodes of eight of the vendor's own


@dataclass(frozen=True, slots=True)
class Settings:
    """One answer: a combination, planned, and what it gives up."""

    combination: Combination
    plan: MemoryPlan
    gives_up: str


@dataclass(frozen=True, slots=True)
class Suggestions:
    """The suggestions, or the nearest miss."""

    model: Model
    device: Device
    space: Space
    outcome: Outcome
    rows: tuple[Settings, ...]  # Best first
    miss: Miss | None = None  # The combination that needs the least memory, where none fits and any is allowed
    least: Settings | None = None  # The same, planned as an answer is
    experimental_fits: bool = False  # Whether combinations with experimental parts, which were not allowed, would fit


def axes_of(paths: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the axes that the given keys of a training config belong to.

    Example:
        >>> list(axes_of([("weights", "hidden_matrix"), ("gradients",), ("reserve",)]))
        ['weights', 'gradients', 'lifetime']
    """
    for path in paths:
        key = ".".join(path)
        for axis, own in AXES.items():
            if any(key == name or key.startswith(f"{name}.") or name.startswith(f"{key}.") for name in own):
                yield axis


def space_of(request: Request, catalog: Catalog) -> Space:
    """Return the combinations that a request leaves open."""
    length = max(request.base.sequence_length, request.min_sequence)
    base = replace(request.base, sequence_length=length)
    batches = sorted({request.min_batch, *(batch for batch in BATCHES if batch >= request.min_batch)})
    space = full_space(base, catalog, batches, request.step_batch)
    space = replace(space, host_bytes=request.host_bytes, cluster=request.cluster)
    return with_fixed_axes(space, request.keep, catalog)


def suggestions(
    model: Model, request: Request, device: Device, catalog: Catalog, note: Callable[[], None] = lambda: None
) -> Suggestions:
    """Return the best settings for a model on a device, or the nearest miss.

    Adapters stay on weights of the kind that the base config has them on, in 16 bits or more or quantised; on the other
    kind only where nothing else fits, and then that is among what an answer gives up.

    Args:
        note: Is called when a layout's combinations are listed, and again when they are searched.

    Raises:
        CannotAnswerError: What is fixed leaves nothing to search.
    """
    space = _on_device(space_of(request, catalog), device, catalog)
    meant = as_meant(space)
    result = _searched(model, request, meant, device, catalog, note)
    if result.rows or meant is space:
        return result
    return _searched(
        model, request, space, device, catalog, note, "weights of the kind that was asked for: with them nothing fits"
    )


def _on_device(space: Space, device: Device, catalog: Catalog) -> Space:
    """Return a space without what a device cannot do, or only emulates."""
    if device.gpu.unified_memory and len(space.offloads) > 1:
        space = replace(space, offloads=("none",))
    tables = hardware_tables(catalog.root)
    if not is_native(device.gpu, "expandable-segments", tables):
        space = replace(space, allocators=space.allocators[:1])
    if without_expandable(catalog.stack(space.base.stack), device.gpu, tables):
        space = replace(space, allocators=("native",))
    return space if is_native(device.gpu, "bf16", tables) else without_bf16(space)


def _searched(
    model: Model,
    request: Request,
    space: Space,
    device: Device,
    catalog: Catalog,
    note: Callable[[], None],
    lost: str = "",
) -> Suggestions:
    """Return the best settings of a space, or the nearest miss.

    Args:
        note: As :func:`suggestions` takes it.
        lost: What every answer gives up, or nothing.
    """
    length = space.base.sequence_length
    open_spaces = list(spaces_by_layout(space, request.parallels or (space.base.parallel,)))
    if not open_spaces:
        raise CannotAnswerError(
            "the search space is empty: the fixed settings are not supported on several GPUs (memplan fit with --gpus says why)"
        )
    space = open_spaces[0]

    def searches(experimental: bool) -> list[Search]:
        own = (Search(model, one, device, length, catalog, experimental=experimental) for one in open_spaces)
        return list(_noted(own, note))

    own = searches(request.experimental)
    outcome = joint_outcome(list(_noted((search.run() for search in own), note)))
    if not outcome.front and not request.strict:
        outcome = joint_outcome([search.run(tight=True) for search in own])
    if outcome.front:
        best = best_few(thinned(outcome.front), request.most)
        rows = tuple(
            _settings(combination, rank, model, space, device, catalog, lost)
            for rank, combination in enumerate(best, 1)
        )
        return Suggestions(model, device, space, outcome, rows)
    more = None
    if not request.experimental:
        more = nearest_miss(searches(experimental=True))
    fits = more is not None and more.plan.verdict == "fits"
    miss = nearest_miss(own)
    outcome = replace(outcome, compiled=sum(search.sizes.compiled for search in own))
    least = None if miss is None else _settings(miss.combination, 1, model, space, device, catalog, lost)
    return Suggestions(model, device, space, outcome, (), miss, least, fits)


def _noted(items: Iterable[T], note: Callable[[], None]) -> Iterator[T]:
    """Yield items, and call ``note`` after each."""
    for item in items:
        yield item
        note()


def _settings(
    combination: Combination, rank: int, model: Model, space: Space, device: Device, catalog: Catalog, lost: str
) -> Settings:
    optimizer = optimizer_names(combination.state.optimizer, catalog)[0]
    text = f"Suggested for {model.spec.name} on {device.name}: {summary(combination, catalog)}"
    space = under_layout(space, combination.plan.setup.config.parallel)
    config = space.config(combination.state, combination.way, combination.batch, text, combination.standing.status)
    stage = f"-zero{config.parallel.zero_stage}" if config.parallel.data > 1 else ""
    name = f"suggested-{rank}-{combination.state.weights.dtype}-{optimizer}{stage}"
    plan = CompiledPlan(model, resolve(config, catalog, name)).evaluate(device)
    gives_up = filter(None, (lost, *given_up(combination, catalog), _unset(combination, space.base)))
    return Settings(combination, plan, "; ".join(gives_up) or "nothing")


def summary(combination: Combination, catalog: Catalog) -> str:
    """Return a combination in a few words."""
    state, way = combination.state, combination.way
    optimizer = catalog.optimizers[optimizer_names(state.optimizer, catalog)[0]].title
    gradients = f"{state.gradient} gradients" if state.gradient else "gradients as computed"
    released = ", released layer by layer" if way.lifetime == "layer" else ""
    master = f", {state.master} master weights" if state.master != "none" else ""
    where = " in host memory" if state.offload == "cpu" else ""
    return (
        f"{state.weights.name} weights{master}, {gradients}{released}, {optimizer}{where}, "
        f"{way.checkpointing} checkpointing"
    )


def given_up(combination: Combination, catalog: Catalog) -> Iterator[str]:
    """Yield what a combination gives up against fp32 everywhere and nothing computed twice."""
    state, way = combination.state, combination.way
    weights = state.weights
    if weights.coded and combination.plan.setup.config.adapter is None:
        known = ", whose recorded loss is far behind fp32" if combination.standing.far_behind else ""
        yield f"weights are rounded to {weights.dtype} at every update{known}"
    elif weights.coded:
        yield f"frozen weights are rounded to {weights.dtype}"
    elif weights.dtype != "fp32" and state.master == "none" and combination.plan.setup.config.adapter is None:
        yield f"updates are rounded to {weights.dtype}"
    if state.gradient is not None and state.gradient.startswith("fp8"):
        yield f"gradients are kept in {state.gradient}"
    names = optimizer_names(state.optimizer, catalog)
    entry = catalog.optimizers[names[0]]
    if any(slot.block_bytes < 4 * slot.block_elements or slot.as_parameter for slot in entry.slots):
        yield f"narrow optimizer states ({entry.title})"
    if state.offload == "cpu":
        size = format_bytes(combination.plan.states.host_bytes)
        yield f"optimizer states take {size} of host memory; each step copies them to the device and back"
    if way.lifetime == "layer":
        yield "no gradient accumulation and no clipping by the global norm"
    if way.checkpointing != "none":
        some = combination.plan.setup.config.checkpointed_layers.words.strip(" ()") or "every layer"
        again = f"the forward of {some} runs" if way.checkpointing == "full" else "norms and elementwise operations run"
        yield f"{again} once more"
    if way.loss == "chunked":
        yield "the head's product runs once more"


def _unset(combination: Combination, base: TrainingConfig) -> str:
    """Return what has to be asked of torch's allocator, where neither the job's own config nor its stack does."""
    own = base.allocator or default_allocator(base, combination.plan.setup.stack)
    return (
        "needs PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" if combination.way.allocator != own == "native" else ""
    )


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
        weights=tuple(choice for choice in space.weights if base.adapter is not None or not choice.coded),
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
