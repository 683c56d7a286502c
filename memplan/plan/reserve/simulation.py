"""A plan's training run through the simulated allocator: what it holds with memory to spare, and the least that it needs.

Searches use shares of the allocated bytes instead (configs/allocator_reserve.yaml), which cost nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from memplan.model.parameter_tensors import inventory_of
from memplan.model.routed_experts import expert_modules_of
from memplan.plan.memory_plan import MemoryPlan, Verdict, fullest_rank
from memplan.plan.reserve.simulated_run import PLACEMENTS, Simulated, Simulation
from memplan.step.events.event_stream import EventStream, RunEvents, libraries_of
from memplan.step.events.model_passes import WrittenModel
from memplan.step.events.ranks.step_of_rank import step_player
from memplan.step.events.step_events import STEPS
from memplan.step.model_on_tape import ModelOnTape, model_on_tape
from memplan.step.regimes import regime_of, setup_in
from memplan.step.states.optimizer_scratch import step_temporaries
from memplan.step.states.parallel_shards import is_accelerated, is_partitioned, is_replicated, is_sharded, runs_engine
from memplan.step.step_inputs import StepInputs
from memplan.step.tapes.linear_forms import Part
from memplan.units import ceil_div

HANDLES = 2
"""Threads with a cuBLAS workspace each."""

MOST_LAYERS = 1_000
"""Layers times micro-steps of a step that is played, at most, each expert that is a module counting as a layer: some 400,000 events."""

AGREEMENT_SHARE, AGREEMENT_BYTES = 50, 2**26
"""Events whose allocated peak is off the formula's by more than a 50th and 64 MiB are not those of the formula."""


def shares_reason(plan: MemoryPlan) -> str:
    """Return why a plan's reserve is a share and not simulated, or nothing."""
    config = plan.setup.config
    if plan.device.count > 1:
        return "memory of several GPUs is pooled"
    if config.parallel.gpus > 1 and (reason := _untold_units(plan)):
        return reason
    if plan.device.gpu.unified_memory:
        return "the device shares its memory with the CPU, and has another allocator than CUDA's"
    if plan.setup.profile.loss == "chunked-backward" and (
        plan.own.spec.tie_word_embeddings or config.gradients.lifetime == "layer"
    ):
        return (
            "a loss whose chunks run backward one by one is not told as events over a tied head, or with updates inside"
        )
    if config.offload.activations != "none" and plan.setup.stack.checkpointing.hooked:
        return "what comes back from host memory on a CUDA stream of its own is not told as events"
    if config.images.per_row:
        return "what images pass through is not told as events"
    if config.method.embedding is not None:
        return "several forwards of one backward, or of a cached loss, are not told as events"
    if plan.setup.answer_length:
        return "what generates completions and scores them is not told as events"
    if plan.setup.value_model is not None:
        return "a phase of ppo is not told as events"
    if plan.setup.teacher is not None:
        return "what a teacher's forward has is not told as events"
    if config.compile != "none":
        return "a compiled program's buffers are not told as events"
    layers = sum(run.count * (1 + expert_modules_of(run)) for run in plan.own.spec.runs)
    together = config.parallel.together if config.parallel.pipeline > 1 else config.gradient_accumulation_steps
    if layers * together > MOST_LAYERS:
        experts = any(expert_modules_of(run) for run in plan.own.spec.runs)
        return f"layers{', their experts one by one,' if experts else ''} times micro-steps are too many to be played"
    return ""


def _untold_units(plan: MemoryPlan) -> str:
    """Return why the events of a job on several GPUs are not told, or nothing."""
    setup, config, parallel = plan.setup, plan.setup.config, plan.setup.config.parallel
    if runs_engine(parallel):
        return _untold_engine(plan)
    if is_replicated(parallel):
        return ""
    if setup.offloads_weights or parallel.staged_codes:
        return "the events of shards that come from host memory, or of codes gathered from shards, are not told"
    if config.adapter is not None and setup.profile.loss == "chunked-logits" and is_accelerated(setup):
        return "the events of a loss that gathers the head itself are not told"
    if config.evaluation and config.adapter is not None and parallel.engine == "fsdp1":
        return "the events of adapters that are evaluated are not told over FSDP1's shards"
    if parallel.engine == "fsdp1" and config.method.reference_model in ("resident", "adapter-off"):
        return "what FSDP1 gathers of a reference model is not told as events"
    if config.zero_gradients == "fill" and parallel.engine == "fsdp1":
        return "the events of gradients filled with zeros are not told over FSDP1's shards"
    if plan.model.spec.tower is not None or setup.profile.loss == "weighted-tokens":
        return "the events of towers, and of losses that gather units themselves, are not told"
    return ""


def _untold_engine(plan: MemoryPlan) -> str:
    """Return why the events of a job that DeepSpeed runs are not told, or nothing."""
    config = plan.setup.config
    if plan.setup.steps_on_host:
        return "the events of DeepSpeed's steps in host memory are not told"
    if config.evaluation and is_partitioned(config.parallel):
        return "what DeepSpeed's stage 3 gathers to evaluate is not told as events"
    if is_partitioned(config.parallel) and config.method.reference_model in ("resident", "adapter-off"):
        return "what DeepSpeed's stage 3 gathers of a reference model is not told as events"
    return ""


def events_of(plan: MemoryPlan, steps: int = STEPS) -> RunEvents:
    """Return the events of a plan's run, of a pipeline's fullest rank: what is made first, and so many steps."""
    if plan.rank_plans:
        return events_of(max(plan.rank_plans, key=lambda one: one.device_bytes), steps)
    setup, states = plan.setup, plan.states
    length = ceil_div(plan.sequence_length, setup.config.parallel.context)
    regime = regime_of(plan.own, setup, plan.micro_batch_size, length)
    setup = setup_in(setup, padded=regime.padded)
    optimizer = step_temporaries(setup, states.tensors)
    inputs = StepInputs(plan.own.spec, setup, states, regime, states.gradient_bytes, optimizer, 0)
    library_bytes = plan.allowances.library_bytes // HANDLES
    parallel = setup.config.parallel
    own = plan.own if parallel.pipeline == 1 else replace(plan.own, inventory=inventory_of(plan.own.spec))
    sharded = None
    if is_sharded(parallel):
        from memplan.step.ranks.sharded_units import sharded_step

        sharded = sharded_step(own, setup, states, regime)
    taped = sharded.taped if sharded else model_on_tape(inputs)
    whole = sharded.inputs if sharded else inputs
    evaluated = (*((whole, taped) if sharded else _evaluated(plan, inputs, taped, length)), plan.evaluated_values)
    model = WrittenModel(EventStream(), whole, taped, plan.values, evaluated, libraries_of(library_bytes))
    stages: Sequence[int] = ()
    if parallel.pipeline > 1:
        from memplan.step.pipelines.pipeline_schedules import layers_of_stages

        stages = layers_of_stages(plan.model.spec.num_hidden_layers, parallel)
    return step_player(model, inputs, sharded, stages).run(plan.forms.buffers, plan.values, steps)


def _evaluated(plan: MemoryPlan, inputs: StepInputs, taped: ModelOnTape, length: int) -> tuple[StepInputs, ModelOnTape]:
    """Return what a forward that evaluates is made of: other operations run for so many rows, as where these alone have padding."""
    rows = plan.setup.config.evaluation_batch_size
    regime = inputs.regime if rows is None else regime_of(plan.own, plan.setup, rows, length)
    if regime == inputs.regime or not plan.setup.evaluates_apart:
        return inputs, taped
    own = replace(inputs, setup=setup_in(plan.setup, padded=regime.padded), regime=regime)
    return own, model_on_tape(own)


class Runs:
    """Runs that were simulated, which plans share whose events are the same: those of one job on several devices."""

    def __init__(self, placements: Sequence[bool] = PLACEMENTS) -> None:
        self._placements = placements
        self._known: dict[tuple[object, ...], tuple[MemoryPlan, Simulation]] = {}

    def __getitem__(self, plan: MemoryPlan) -> Simulation:
        """Return the simulated run of a plan."""
        expandable = plan.setup.config.allocator == "expandable"
        key = id(plan.forms), plan.values, plan.allowances.library_bytes, expandable
        if key not in self._known:
            self._known[key] = plan, Simulation(events_of(plan), expandable=expandable, placements=self._placements)
        return self._known[key][1]


def simulated(
    plan: MemoryPlan, *, least: bool | None = True, runs: Runs | None = None, tight: bool = True, fitting: bool = False
) -> MemoryPlan:
    """Return a plan with its reserve simulated, that of a pipeline for each of its ranks; where that cannot be, the same with the reason.

    The verdict is whether the run survives in what the device has: FITS with the context at its upper end and wherever the driver
    puts segments, TIGHT with both as expected.

    Args:
        plan: A plan with a share as its reserve.
        least: Whether the least that it needs, and the lower end, are looked for; None: for a run with too little to spare.
        runs: What is known already.
        tight: Whether a run that does not fit is played on the full card; else it is NO, for searches that want what fits.
        fitting: Whether only a plan that fits, or is ``tight``, is wanted: another is NO as soon as that is known, with a share as its reserve.
    """
    if plan.rank_plans:
        ranks = (simulated(one, least=least, runs=runs, tight=tight) for one in plan.rank_plans)
        fullest = fullest_rank(tuple(ranks), plan.setup)
        return replace(fullest, by_share=None if fullest.reserve_by_share else plan)
    if reason := shares_reason(plan):
        return _beside_streams(replace(plan, reserve_by_share=reason))
    simulation = (Runs() if runs is None else runs)[plan]
    if fitting and not tight and _surely_exceeds(plan, simulation):
        return replace(plan, verdict="no", by_share=plan)
    allocated = simulation.allocated_bytes
    if allocated == simulation.before_steps_bytes:
        allocated = plan.allocated_bytes
    if not _agrees(plan, allocated):
        return _beside_streams(replace(plan, reserve_by_share="its events do not add up to the formula's peak"))
    if fitting and not _gathers(plan) and not _runs(plan, simulation, allocated, tight=tight):
        return replace(plan, verdict="no", by_share=plan)
    result = replace(simulation.result(least=bool(least)), allocated_bytes=allocated)
    return _with_run(plan, simulation, result, runs=runs, least=least, tight=tight)


def _runs(plan: MemoryPlan, simulation: Simulation, allocated_bytes: int, *, tight: bool) -> bool:
    """Whether a run that does not gather fits, or is ``tight``, rows that may be padded aside; plays no more than says so."""
    apart = max(0, plan.allocated_bytes - allocated_bytes) + plan.apart_bytes
    return _verdict(_without_streams(plan), partial(_survives, simulation, apart), 0, 0, tight)[0] != "no"


def _with_run(
    by_share: MemoryPlan,
    simulation: Simulation,
    result: Simulated,
    *,
    runs: Runs | None,
    least: bool | None,
    tight: bool,
) -> MemoryPlan:
    """Return a plan with what the allocator says of its run; takes what :func:`simulated` does."""
    plan = _without_streams(by_share)
    allowances = plan.allowances
    missing = max(0, plan.allocated_bytes - result.allocated_bytes)  # of the formula's peak in the events
    apart = missing + plan.apart_bytes
    if (
        least is None
        and result.most_bytes + apart + allowances.upper_context_bytes + plan.padding_bytes > plan.usable_bytes
    ):
        result = simulation.result()
    survives = partial(_survives, simulation, apart)
    verdict, needed = _verdict(plan, survives, result.least_bytes + apart, result.most_bytes + apart, tight)
    upper, padding = result.most_bytes + apart + allowances.upper_context_bytes, plan.padding_bytes
    if plan.padded and (tight or verdict == "fits"):
        rows = replace(plan.padded(), usable_bytes=plan.usable_bytes)
        padded = simulated(rows, least=False, runs=runs, tight=False)
        if verdict == "fits" and padded.verdict != "fits":
            verdict = "tight"
        padding = max(0, padded.upper_bytes - upper)
    return replace(
        plan,
        verdict="no" if plan.exceeds_host else verdict,
        allocated_bytes=plan.allocated_bytes if _gathers(plan) else result.allocated_bytes + missing,
        reserved_bytes=result.spare_bytes + apart,
        device_bytes=result.spare_bytes + apart + allowances.context_bytes,
        upper_bytes=upper + padding,
        padding_bytes=padding,
        least_bytes=needed + allowances.context_bytes,
        lower_bytes=min(result.below_bytes, needed) + allowances.least_context_bytes,
        reserve_by_share="",
        by_share=by_share,
    )


def _agrees(plan: MemoryPlan, allocated_bytes: int) -> bool:
    """Whether a run's allocated peak is that of the formula, nearly."""
    off = abs(allocated_bytes - plan.allocated_bytes)
    return off <= AGREEMENT_BYTES or off * AGREEMENT_SHARE <= plan.allocated_bytes


def _surely_exceeds(plan: MemoryPlan, simulation: Simulation) -> bool:
    """Whether a plan's run, whose events surely agree with its formula, does not fit; told of ranks that gather alone.

    They fit with memory to spare or not at all, as :func:`_verdict` has it.
    """
    if not _gathers(plan):
        return False
    room = plan.usable_bytes - _without_streams(plan).allowances.upper_context_bytes - plan.apart_bytes
    return simulation.takes_more(room) and all(_agrees(plan, size) for size in simulation.allocated_range)


def at_a_glance(plan: MemoryPlan) -> MemoryPlan:
    """Return a simulated plan without the least that it needs, one way of placing segments standing for both where a share has room too."""
    if plan.verdict == "fits":
        one = simulated(plan, least=False, runs=Runs(PLACEMENTS[:1]), tight=False)
        if one.verdict == "fits":
            return one
    return simulated(plan, least=False)


def _beside_streams(plan: MemoryPlan) -> MemoryPlan:
    """Return a plan whose reserve is by share, of what its own stream holds, with what the streams of gathers and reductions hold.

    As blocks of one stream serve no other while there is memory to spare, the most of each adds up, whenever it is; a job
    that fits without is tight, as the allocator gives back what a stream has cached where another runs short. Pipelines,
    whose ranks were not compared, are left as they are.

    Source:
        ``foreach_reduce`` and ``all_gather_copy_in_cuda`` in torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, and
        ``_reduce_grad`` in torch/distributed/fsdp/_runtime_utils.py (v2.13.0), allocate within streams of their own.
    """
    if not is_sharded(plan.setup.config.parallel) or plan.setup.config.parallel.pipeline > 1:
        return plan
    allowances = plan.allowances
    shards, other = _other_streams(plan)
    more = shards - other
    expected = plan.device_bytes + more + allowances.stream_bytes - allowances.reserve_bytes(other)
    upper = plan.upper_bytes + more - int(other * allowances.upper_reserve_fraction)
    return replace(
        _without_streams(plan),
        verdict="tight" if plan.verdict == "fits" and upper > plan.usable_bytes else plan.verdict,
        reserved_bytes=expected - allowances.context_bytes,
        device_bytes=expected,
        upper_bytes=max(expected, upper),
    )


def _other_streams(plan: MemoryPlan) -> tuple[int, int]:
    """Return the most bytes of gradient shards, which are another stream's than the step's, and those of them at its peak."""
    shards, values = sum(plan.forms.unit_gradients), plan.values
    sizes = [(one.form.part_bytes(values), one.partial_bytes(values)) for one in plan.forms.candidates]
    alone = max(sum(parts) - min(parts[Part.GRADIENTS], shards) + partial for parts, partial in sizes)
    return shards, max(sum(parts) + partial for parts, partial in sizes) - alone


def exceeds_in_blocks(plan: MemoryPlan) -> bool:
    """Whether blocks and context are more than the device has, where those of a rank's streams serve no other: no reserve makes it FIT."""
    if plan.exceeds_device or not is_sharded(plan.setup.config.parallel) or plan.setup.config.parallel.pipeline > 1:
        return plan.exceeds_device
    shards, other = _other_streams(plan)
    blocks = plan.allocated_bytes + shards - other
    return blocks + _without_streams(plan).allowances.upper_context_bytes > plan.usable_bytes


def _without_streams(plan: MemoryPlan) -> MemoryPlan:
    """Return a plan whose allowances leave out buffers that no other stream can use, which are simulated."""
    own = plan.allowances
    upper = own.upper_context_bytes - own.stream_bytes
    return (
        replace(plan, allowances=replace(own, upper_context_bytes=upper, stream_bytes=0)) if own.stream_bytes else plan
    )


def _gathers(plan: MemoryPlan) -> bool:
    """Whether the rank that is played gathers or reduces by code of its own, and may not be the fullest at every instant."""
    return is_sharded(plan.setup.config.parallel) or runs_engine(plan.setup.config.parallel)


def _survives(simulation: Simulation, apart: int, capacity_bytes: int, *, anywhere: bool) -> bool:
    return simulation.runs_in(capacity_bytes - apart, anywhere=anywhere)


def _verdict(plan: MemoryPlan, runs_in: Callable[..., bool], least: int, most: int, tight: bool) -> tuple[Verdict, int]:
    """Return the verdict, and the least that the run is known to need: less where it runs in what the device has.

    A rank that gathers or reduces on streams of their own fits with memory to spare alone: when its streams let go of blocks, as a full card asks, is not known.
    """
    upper, expected = plan.allowances.upper_context_bytes, plan.allowances.context_bytes
    for verdict, context in (("fits", upper), *([("tight", expected)] if tight else [])):
        capacity = plan.usable_bytes - context
        if verdict == "fits" and _gathers(plan) and most > capacity:
            continue
        if capacity > 0 and runs_in(capacity, anywhere=verdict == "fits"):
            return verdict, min(least, capacity)  # type: ignore[return-value]
    return "no", least
