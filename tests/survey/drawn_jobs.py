"""One job of a survey: what it is, and what formula and trace say of it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Literal

from memplan.allocator.streams.stream_replay import Stream
from memplan.catalog.catalog import Catalog
from memplan.catalog.training_config import TrainingConfig
from memplan.documents.loading import Document
from memplan.documents.schemas import validate
from memplan.errors import MemplanError
from memplan.model.families import model_spec
from memplan.model.model import Model
from memplan.model.readers.given_shapes import model_from_flags
from memplan.plan.memory_plan import Device, MemoryPlan
from memplan.plan.planner import CompiledPlan
from memplan.plan.reserve.simulation import events_of, shares_reason
from memplan.step.kernels.card_support import on_card
from memplan.step.states.parallel_shards import is_sharded, runs_engine
from memplan.trace.recording.trace_result import COMPONENTS, Component, Trace
from memplan.trace.tracer import trace_training
from memplan.training.resolution.resolve_config import resolve
from memplan.training.resolved import TrainingSetup
from tests.survey.drawn_configs import config_keys
from tests.survey.drawn_models import NOT_BUNDLED, model_values

Outcome = Literal["agrees", "differs", "refused", "crashed"]

GPU = "h100-sxm-80gb"
STATES: tuple[Component, ...] = ("weights", "master_weights", "optimizer_states")
EXACT = ("persistent", "host", *STATES)
"""What formula and trace have to agree on to the byte."""

PEAK_SHARE = 0.001
INSTANT_SHARE = 0.01
RESERVE_SHARE = 0.03
STEPS = 2
"""Steps of a traced run: a third takes half as long again, and most often nothing of the card."""


@dataclass(frozen=True, slots=True)
class Job:
    """A model and a training config, as keys of files.

    Attributes:
        model: Keys of a released ``config.json``.
        training: Keys of a training config.
    """

    model: Mapping[str, Any]
    training: Mapping[str, Any]

    @property
    def seconds(self) -> dict[str, Mapping[str, Any]]:
        """Keys of the released ``config.json`` of each model beside the one that is trained, which stand where its name would."""
        method = self.training.get("method", {})
        return {role: method[role]["model"] for role in SECONDS if role in method}

    @property
    def keys(self) -> dict[str, Any]:
        """The training config as a file has it."""
        method = self.training.get("method", {})
        named = {role: {**method[role], "model": "drawn"} for role in self.seconds}
        return {**self.training, "method": {**method, **named}} if named else dict(self.training)

    @property
    def text(self) -> str:
        """Both as JSON on one line, which ``--job`` takes."""
        return json.dumps({"model": self.model, "training": self.training}, sort_keys=True)


SECONDS = ("teacher", "value_model", "reward_model")
"""What models beside the one that is trained are."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of one job.

    Attributes:
        reason: Why it was refused, or how it crashed.
        formula_bytes: Requested peak by the formula.
        traced_bytes: Requested peak by the trace.
        differences: Bytes by which the formula exceeds the trace, by instant; by the names of ``EXACT`` besides.
        traced: Bytes of the trace, by the same names.
        components: Bytes by which components of the formula exceed the trace's at the peak, where the sums are equal.
        reserved_bytes: Segments of the simulated allocator, fed by the formula's events; 0 where they are not told.
        traced_reserved_bytes: The same, fed by the trace.
    """

    job: Job
    outcome: Outcome
    reason: str = ""
    formula_bytes: int = 0
    traced_bytes: int = 0
    differences: Mapping[str, int] = field(default_factory=dict)
    traced: Mapping[str, int] = field(default_factory=dict)
    components: Mapping[str, int] = field(default_factory=dict)
    reserved_bytes: int = 0
    traced_reserved_bytes: int = 0

    @property
    def peak_share(self) -> float:
        """Difference of the peaks as a share of the traced one."""
        return abs(self.formula_bytes - self.traced_bytes) / max(1, self.traced_bytes)

    @property
    def instant_share(self) -> float:
        """Largest difference of an instant as a share of that instant."""
        shares = (abs(size) / max(1, self.traced[name]) for name, size in self.differences.items())
        return max(shares, default=0.0)

    @property
    def component_share(self) -> float:
        """Largest difference of a component at the peak as a share of the peak."""
        return max(map(abs, self.components.values()), default=0) / max(1, self.traced_bytes)

    @property
    def reserve_share(self) -> float:
        """By what share the reserve of the formula's events exceeds that of the trace's; 0 where events are not told."""
        return self.reserved_bytes / self.traced_reserved_bytes - 1 if self.traced_reserved_bytes else 0.0

    @property
    def exact_states(self) -> bool:
        """Whether persistent and host bytes are equal, in the sum and by component."""
        return not any(self.differences.get(name) for name in EXACT)


def drawn_job(seed: int, number: int, catalog: Catalog) -> Job:
    """Return a job of a survey; each has a generator of its own, so that one can be drawn again alone."""
    rng = Random(f"memplan {seed} {number}")
    values = model_values(rng, catalog)
    while _text_family(values) in NOT_BUNDLED:  # drawn by ``tests.survey.stacks``, which runs them
        values = model_values(rng, catalog)
    return Job(values, config_keys(rng, model_of(values), catalog))


def _text_family(values: Mapping[str, Any]) -> str:
    """Return the family of a model's text part."""
    family: str = values["model_type"]
    return f"{family}_text" if family in ("gemma4", "gemma4_unified") else family


def on_several(job: Job, gpus: int, zero_stage: int) -> Job:
    """Return a job whose work so many GPUs share."""
    if gpus == 1:
        return job
    return replace(job, training={**job.training, "parallel": {"data": gpus, "zero_stage": zero_stage}})


def verdict(job: Job, catalog: Catalog) -> Verdict:
    """Return what formula and trace say of a job; a refusal counts only where the formula gives it."""
    try:
        model, setup = resolved(job, catalog)
        plan = CompiledPlan(model, setup).evaluate(Device(catalog.gpus[GPU], GPU))
    except MemplanError as error:
        return Verdict(job, "refused", str(error))
    try:
        card = catalog.gpus[GPU]
        trace = trace_training(
            model, on_card(setup, model, card), compute_capability=card.compute_capability, steps=STEPS
        )
        own, traced = reserved(plan, trace, STEPS)
    except Exception as error:
        return Verdict(job, "crashed", f"{type(error).__name__}: {error}", plan.requested_bytes)
    return replace(compared(job, plan, trace), reserved_bytes=own, traced_reserved_bytes=traced)


def reserved(plan: MemoryPlan, trace: Trace, steps: int) -> tuple[int, int]:
    """Return what the allocator reserves with memory to spare: fed by the formula's events of so many steps, and by the trace."""
    if shares_reason(plan):
        return 0, 0
    loaded = _loaded(plan, trace)
    codes = [2 * event.storage + (not event.allocates) for event in trace.events if event.storage not in loaded]
    sizes = [storage.bytes for storage in trace.storages]
    events = events_of(as_made(plan), steps)
    own = Stream(events.sizes, events.codes, streams=events.stream.streams)
    return own.peaks().reserved_bytes, Stream(sizes, codes, streams=trace.streams).peaks().reserved_bytes


def as_made(plan: MemoryPlan) -> MemoryPlan:
    """Return a plan whose weights are made as they stay, which a trace's are, without checkpoint."""
    stack = replace(plan.setup.stack, loads_codes=None)
    return replace(plan, setup=replace(plan.setup, stack=stack))


def _loaded(plan: MemoryPlan, trace: Trace) -> set[int]:
    """Return storages that are not on a device, or given back to the driver, while a model is sharded or an engine made."""
    parallel = plan.setup.config.parallel
    gone = {event.storage for event in trace.events if event.instant == "setup" and not event.allocates}
    if runs_engine(parallel):
        masters = [n for n, storage in enumerate(trace.storages) if storage.component == "master_weights"]
        return {storage for storage in gone if storage < max(masters, default=0)}
    return gone if is_sharded(parallel) and parallel.engine != "fsdp1" else set()


def resolved(job: Job, catalog: Catalog) -> tuple[Model, TrainingSetup]:
    """Return model and setup of a job.

    Raises:
        MemplanError: The job is refused.
    """
    config = validate(TrainingConfig, Document("job", job.keys, {}))
    beside = {role: model_of(values) for role, values in job.seconds.items()}
    return model_of(job.model), resolve(config, catalog, "job", beside=beside)


def model_of(values: Mapping[str, Any]) -> Model:
    """Return the model that has these keys in its ``config.json``, or as a script's flags."""
    if "window_pattern" in values:
        return model_from_flags(values, "drawn", "job")
    spec = model_spec(values, "drawn", "job")
    return Model.from_spec(spec, "job")


def compared(job: Job, plan: MemoryPlan, trace: Trace) -> Verdict:
    """Return what a plan and a trace of the same job have in common."""
    states = plan.states
    persistent = (plan.persistent_bytes, plan.host_bytes, states.weight_bytes, states.master_bytes, states.state_bytes)
    formula = {**dict(plan.instants), **dict(zip(EXACT, persistent, strict=True))}
    components: dict[str, int] = {name: trace.peak.components.get(name, 0) for name in STATES}
    traced: dict[str, int] = {**trace.instant_bytes, "persistent": trace.persistent_bytes, "host": trace.host_bytes}
    traced.update(components)
    differences = {name: formula[name] - size for name, size in traced.items() if formula.get(name, size) != size}
    divided = components_apart(plan, trace) if plan.requested_bytes == trace.peak_bytes else {}
    result = Verdict(job, "agrees", "", plan.requested_bytes, trace.peak_bytes, differences, traced, divided)
    if result.peak_share <= PEAK_SHARE and result.instant_share <= INSTANT_SHARE and result.exact_states:
        return result
    return replace(result, outcome="differs")


def components_apart(plan: MemoryPlan, trace: Trace) -> dict[str, int]:
    """Return the bytes by which components of the formula exceed the trace's at the peak, or at another instant as full."""
    formula = {line.name: line.bytes for line in plan.components if line.name in COMPONENTS}
    formula.pop("library_workspaces", None)
    full = [moment.components for moment in trace.instants.values() if moment.bytes == trace.peak_bytes]
    apart = [{n: formula.get(n, 0) - sizes.get(n, 0) for n in COMPONENTS} for sizes in full]
    least = min(apart, key=lambda sizes: sum(map(abs, sizes.values())))
    return {name: size for name, size in least.items() if size}
