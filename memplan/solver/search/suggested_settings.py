"""Which settings to use: the space a request leaves open, searched, and each answer planned whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from memplan.catalog.catalog import Catalog
from memplan.catalog.training_config import Parallel, TrainingConfig
from memplan.errors import CannotAnswerError
from memplan.model.model import Model
from memplan.plan.planner import CompiledPlan, Device, MemoryPlan
from memplan.solver.search.axes import AXES, BATCHES, full_space, kept
from memplan.solver.search.best_first import Miss, Outcome, Search
from memplan.solver.search.parallel_layouts import joined, nearest_miss, shared_out, spaces
from memplan.solver.search.pareto_front import Found, best_few, thinned
from memplan.solver.search.space import Space, optimizer_names
from memplan.training.resolved import resolve
from memplan.units import format_bytes


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked of a search.

    Attributes:
        base: Config that axes not searched, and axes that are kept, are taken from.
        keep: Axes that stay as the base has them.
        min_batch: Least micro-batch.
        step_batch: Least sequences of an optimizer step, all its micro-batches together.
        min_sequence: Least tokens per sequence.
        experimental: Whether experimental parts may be used.
        strict: Whether a job that may not fit at the upper end is no answer.
        most: How many answers at most.
        host_bytes: Most host memory that offloaded states may take; None for any amount.
        parallels: Ways in which several GPUs may share the work; none is the base's own.
    """

    base: TrainingConfig
    keep: tuple[str, ...] = ()
    min_batch: int = 1
    step_batch: int = 1
    min_sequence: int = 1
    experimental: bool = False
    strict: bool = False
    most: int = 5
    host_bytes: int | None = None
    parallels: tuple[Parallel, ...] = ()


@dataclass(frozen=True, slots=True)
class Settings:
    """One answer: a combination, planned, and what it gives up."""

    found: Found
    plan: MemoryPlan
    gives_up: str


@dataclass(frozen=True, slots=True)
class Suggestions:
    """The answers, or how near the space comes to one.

    Attributes:
        rows: Answers, best first.
        miss: The combination that needs least, where there is no answer and anything is allowed.
        experimental_fits: Whether experimental parts, which were not asked for, would give answers.
    """

    model: Model
    device: Device
    space: Space
    outcome: Outcome
    rows: tuple[Settings, ...]
    miss: Miss | None = None
    experimental_fits: bool = False


def axes_of(paths: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the axes that keys of a training config, which someone has set, belong to.

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
    space = replace(full_space(base, catalog, batches, request.step_batch), host_bytes=request.host_bytes)
    return kept(space, request.keep, catalog)


def suggestions(model: Model, request: Request, device: Device, catalog: Catalog) -> Suggestions:
    """Return the best settings for a model on a device, or the nearest miss."""
    space = space_of(request, catalog)
    if device.gpu.unified_memory and len(space.offloads) > 1:
        space = replace(space, offloads=("none",))
    length = space.base.sequence_length
    open_spaces = list(spaces(space, request.parallels or (space.base.parallel,)))
    if not open_spaces:
        raise CannotAnswerError(
            "nothing is left to search: what is fixed is not planned on several GPUs (memplan fit with --gpus says why)"
        )
    space = open_spaces[0]

    def searches(experimental: bool) -> list[Search]:
        return [Search(model, one, device, length, catalog, experimental=experimental) for one in open_spaces]

    own = searches(request.experimental)
    outcome = joined([search.run() for search in own])
    if not outcome.found and not request.strict:
        outcome = joined([search.run(tight=True) for search in own])
    if outcome.found:
        best = best_few(thinned(outcome.found), request.most)
        rows = tuple(_settings(found, rank, model, space, device, catalog) for rank, found in enumerate(best, 1))
        return Suggestions(model, device, space, outcome, rows)
    more = None
    if not request.experimental:
        more = nearest_miss(searches(experimental=True))
    fits = more is not None and more.plan.verdict == "fits"
    miss = nearest_miss(own)
    outcome = replace(outcome, compiled=sum(search.sizes.compiled for search in own))
    return Suggestions(model, device, space, outcome, (), miss, fits)


def _settings(found: Found, rank: int, model: Model, space: Space, device: Device, catalog: Catalog) -> Settings:
    optimizer = optimizer_names(found.state.optimizer, catalog)[0]
    text = f"Suggested for {model.spec.name} on {device.name}: {summary(found, catalog)}"
    space = shared_out(space, found.plan.setup.config.parallel)
    config = space.config(found.state, found.way, found.batch, text, found.standing.status)
    stage = f"-zero{config.parallel.zero_stage}" if config.parallel.data > 1 else ""
    name = f"suggested-{rank}-{found.state.weights.dtype}-{optimizer}{stage}"
    plan = CompiledPlan(model, resolve(config, catalog, name)).evaluate(device)
    return Settings(found, plan, "; ".join(given_up(found, catalog)) or "nothing")


def summary(found: Found, catalog: Catalog) -> str:
    """Return a combination in a few words."""
    state, way = found.state, found.way
    optimizer = catalog.optimizers[optimizer_names(state.optimizer, catalog)[0]].title
    gradients = f"{state.gradient} gradients" if state.gradient else "gradients as computed"
    released = ", released layer by layer" if way.lifetime == "layer" else ""
    master = f", {state.master} master weights" if state.master != "none" else ""
    where = " in host memory" if state.offload == "cpu" else ""
    return (
        f"{state.weights.name} weights{master}, {gradients}{released}, {optimizer}{where}, "
        f"{way.checkpointing} checkpointing"
    )


def given_up(found: Found, catalog: Catalog) -> Iterator[str]:
    """Yield what a combination gives up against fp32 everywhere and nothing computed twice."""
    state, way = found.state, found.way
    weights = state.weights
    if weights.coded and found.plan.setup.config.adapter is None:
        known = ", which ended far behind fp32 in our record" if found.standing.far_behind else ""
        yield f"weights are rounded to {weights.dtype} at every update{known}"
    elif weights.coded:
        yield f"frozen weights are rounded to {weights.dtype}"
    elif weights.dtype != "fp32" and state.master == "none" and found.plan.setup.config.adapter is None:
        yield f"updates are rounded to {weights.dtype}"
    if state.gradient is not None and state.gradient.startswith("fp8"):
        yield f"gradients are kept in {state.gradient}"
    names = optimizer_names(state.optimizer, catalog)
    entry = catalog.optimizers[names[0]]
    if any(slot.block_bytes < 4 * slot.block_elements or slot.as_parameter for slot in entry.slots):
        yield f"narrow optimizer states ({entry.title})"
    if state.offload == "cpu":
        size = format_bytes(found.plan.states.host_bytes)
        yield f"optimizer states lie in host memory, {size} of it; each step moves them to the device and back"
    if way.lifetime == "layer":
        yield "no gradient accumulation and no clipping by the global norm"
    if way.checkpointing != "none":
        again = "every layer's forward runs" if way.checkpointing == "full" else "norms and elementwise operations run"
        yield f"{again} once more"
    if way.loss == "chunked":
        yield "the head's product runs once more"
    if way.allocator == "expandable":
        yield "needs PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
