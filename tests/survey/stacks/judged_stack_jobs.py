"""What formula and trace say of one job of a survey of stacks."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from memplan.catalog.catalog import Catalog
from memplan.dryrun.stack_trace import stack_trace
from memplan.errors import MemplanError
from memplan.model.model import Model
from memplan.plan.grids.distinct_ranks import rank_rows
from memplan.plan.memory_plan import Device, MemoryPlan
from memplan.plan.planner import CompiledPlan
from memplan.step.engines.engine_step import EngineStep
from memplan.step.instants import step_on_tape
from memplan.step.regimes import regime_of
from memplan.step.states.flat_partitions import flat_groups, fullest_rank, rank_shares, stepped_tensors
from memplan.step.states.optimizer_scratch import Temporaries
from memplan.step.states.parallel_shards import is_flat
from memplan.trace.recording.trace_result import Moment, Trace
from memplan.trace.stacks.registry import STEPS, StackInputs, details_of
from memplan.training.resolved import TrainingSetup
from memplan.training.rules.method_rules import forces_reentrant
from tests.survey.drawn_jobs import GPU, Verdict, compared, reserved, resolved
from tests.survey.stacks.drawn_stack_jobs import StackJob


def stack_setup(job: StackJob, catalog: Catalog) -> tuple[Any, TrainingSetup]:
    """Return model and setup of a job.

    Raises:
        MemplanError: The job is refused.
    """
    model, setup = resolved(job.job, catalog)
    reentrant = job.reentrant or forces_reentrant(setup.config, setup.stack)
    checkpointing = replace(setup.stack.checkpointing, reentrant=reentrant)
    return model, replace(setup, stack=replace(setup.stack, checkpointing=checkpointing))


def planned(job: StackJob, catalog: Catalog) -> MemoryPlan:
    """Return what the formula says of a job.

    Raises:
        MemplanError: The job is refused.
    """
    model, setup = stack_setup(job, catalog)
    card = replace(catalog.gpus[GPU], compute_capability=job.card)
    compiled = CompiledPlan(model, setup)
    plan = compiled.evaluate(Device(card, GPU))
    return _of_rank(plan, compiled, job.rank) if job.rank else plan


def _of_rank(plan: MemoryPlan, compiled: CompiledPlan, rank: int) -> MemoryPlan:
    """Return what the table of ranks says of one: the first one's plan, with the states of its own rows."""
    parallel = plan.setup.config.parallel
    rows = rank_rows(compiled, plan)
    place = rank // parallel.tensor % (rows[-1].last + 1)
    row = next(row for row in rows if row.first <= place <= row.last)
    less = plan.states.state_bytes - row.state_bytes
    return replace(
        plan,
        instants=tuple((name, size - less) for name, size in plan.instants),
        requested_bytes=plan.requested_bytes - less,
        persistent_bytes=plan.persistent_bytes - less,
        states=replace(plan.states, state_bytes=row.state_bytes),
        reserve_by_share="ranks are not simulated",
    )


def job_inputs(job: StackJob, catalog: Catalog) -> StackInputs:
    """Return what the program of a job's stack is given.

    Raises:
        MemplanError: The job is refused.
    """
    model, setup = stack_setup(job, catalog)
    card_bytes = catalog.gpus[GPU].cuda_total_bytes
    details = replace(details_of(setup), rank=job.rank)
    keys = {role: _keys(values) for role, values in job.job.seconds.items()}
    return StackInputs(model, _keys(job.job.model), setup, job.card, details, card_bytes=card_bytes, second_keys=keys)


def traced(job: StackJob, catalog: Catalog, *, workspaces: bool = False) -> Trace:
    """Return the trace of the stack's own code.

    Args:
        workspaces: Whether what CUDA's libraries hold is among the events.

    Raises:
        MemplanError: The job is refused.
    """
    inputs = job_inputs(job, catalog)
    model, setup = inputs.model, inputs.setup
    if not is_flat(setup.config.parallel):
        return stack_trace(job.stack, inputs, workspaces=workspaces)[0]
    ranks = with_another(fullest_ranks(model, setup), setup.config.parallel.data, job.text)
    fullest = (replace(inputs, details=replace(inputs.details, rank=rank)) for rank in ranks)
    return fullest_of([stack_trace(job.stack, rank, workspaces=workspaces)[0] for rank in fullest])


def with_fullest(job: StackJob, number: int, catalog: Catalog) -> StackJob:
    """Return a job over a pipeline whose rank is the fullest by the formula; every third keeps the rank that was drawn."""
    if number % 3 == 2:
        return job
    training = dict(job.job.training)
    alone = replace(
        job, job=replace(job.job, training={**training, "parallel": {**training["parallel"], "stage": None}})
    )
    try:
        rows = planned(alone, catalog).ranks
    except MemplanError:
        return job
    fullest = max(rows, key=lambda row: row.requested_bytes).rank
    return replace(
        job, job=replace(job.job, training={**training, "parallel": {**training["parallel"], "stage": fullest}})
    )


def fullest_ranks(model: Model, setup: TrainingSetup) -> list[int]:
    """Return the ranks of DeepSpeed that have the most gradients, and the most at each instant, by the formula for each alone."""
    plan = CompiledPlan(model, setup)
    groups = flat_groups(setup, stepped_tensors(setup, plan.states))
    shares = rank_shares(setup, groups)
    regime = regime_of(model, setup, setup.config.micro_batch_size, setup.config.sequence_length)
    inputs, taped = step_on_tape(plan.model, setup, plan.states, regime)
    values = plan.values(setup.config.micro_batch_size, setup.config.sequence_length)

    def sizes(rank: int) -> dict[str, int]:
        alone = [
            share if other == rank else replace(share, gradient_bytes=0, zeros_bytes=0, names=frozenset())
            for other, share in enumerate(shares)
        ]
        update = Temporaries(shares[rank].step_bytes - shares[rank].gradient_bytes, "")
        own = replace(inputs, gradient_bytes=shares[rank].gradient_bytes, optimizer=update)
        found: dict[str, int] = {}
        for instant in EngineStep(own, taped, groups, alone).instants():
            found[instant.name] = max(found.get(instant.name, 0), instant.form.total_bytes(values))
        return found

    by_rank = [sizes(rank) for rank in range(len(shares))]
    fullest = [max(range(len(shares)), key=lambda rank: by_rank[rank].get(name, 0)) for name in by_rank[0]]
    return list(
        dict.fromkeys(
            (
                fullest_rank(setup, shares),
                max(range(len(shares)), key=lambda rank: shares[rank].gradient_bytes + shares[rank].zeros_bytes),
                *fullest,
            )
        )
    )


def with_another(ranks: Sequence[int], number: int, seed: str) -> list[int]:
    """Return ranks and one more of so many, which is drawn: one that the formula underrates is seen too."""
    others = sorted(set(range(number)).difference(ranks))
    return [*ranks, *([Random(f"memplan another rank {seed}").choice(others)] if others else [])]


def fullest_of(traces: Sequence[Trace]) -> Trace:
    """Return the first of several ranks' traces, with the fullest of all at each instant, and the most that one of them keeps."""
    instants: dict[str, Moment] = {}
    for trace in traces:
        for name, moment in trace.instants.items():
            if name not in instants or moment.bytes > instants[name].bytes:
                instants[name] = moment
    fullest = replace(traces[0], instants=instants)
    vars(fullest)["persistent_bytes"] = max(trace.persistent_bytes for trace in traces)  # in the place of the first's
    return fullest


def _keys(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return {name: value for name, value in values.items() if value is not None or name == "q_lora_rank"}


def stack_verdict(job: StackJob, catalog: Catalog) -> Verdict:
    """Return what formula and trace say of a job."""
    try:
        plan = planned(job, catalog)
    except MemplanError as error:
        return Verdict(job.job, "refused", f"formula: {error}")
    except Exception as error:
        return Verdict(job.job, "crashed", f"formula: {type(error).__name__}: {error}")
    try:
        trace = traced(job, catalog, workspaces=True)
    except MemplanError as error:
        return Verdict(job.job, "refused", f"trace: {error}")
    own, other = reserved(plan, trace, STEPS)
    return replace(compared(job.job, plan, trace), reserved_bytes=own, traced_reserved_bytes=other)
