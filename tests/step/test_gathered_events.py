"""The events of a rank that gathers units: as many bytes alive as the formula has, each stream's memory apart."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from memplan.allocator.caching_allocator import replay
from memplan.allocator.streams.stream_replay import Stream
from memplan.catalog.config_keys.parallel_keys import FlatShards, Parallel
from memplan.catalog.kernel_profiles import Kernels
from memplan.errors import MemplanError
from memplan.plan.memory_plan import Device
from memplan.plan.planner import CompiledPlan
from memplan.plan.reserve.simulation import events_of, shares_reason, simulated
from memplan.step.events.ranks.unit_events import AMONG_GROUPS, CASTS, GATHERS, REDUCES
from memplan.training.resolution.resolve_config import resolve
from memplan.units import MIB
from tests.jobs import SHAPES, shipped_catalog
from tests.step.test_events import alive_at, peak_of
from tests.survey.agreement import cut_model
from tests.survey.drawn_jobs import STEPS, as_made
from tests.survey.stacks.drawn_stack_jobs import StackJob
from tests.survey.stacks.judged_stack_jobs import planned

CATALOG = shipped_catalog()
CARD = Device(CATALOG.gpus["h100-sxm-80gb"], "h100-sxm-80gb")
FSDP2 = Parallel(data=4, zero_stage=3)
LAYOUTS = {
    "fsdp2": FSDP2,
    "groups": Parallel(data=8, replicate=2, zero_stage=3),
    "stays": Parallel(data=4, zero_stage=3, reshard_after_forward=False),
    **{
        f"fsdp1 {when}, {apart}": Parallel(
            data=4, zero_stage=3, engine="fsdp1", flat=FlatShards(backward_prefetch=when, use_orig_params=apart)
        )
        for when, apart in (("pre", True), ("post", False), ("none", True))
    },
}


def plan_of(config, parallel, stack="transformers", model="small", **keys):
    """Return the plan of a small job over shards, or nothing where it is refused."""
    changed = replace(
        CATALOG.configs[config], micro_batch_size=2, sequence_length=300, stack=stack, parallel=parallel, **keys
    )
    try:
        return CompiledPlan(SHAPES[model], resolve(changed, CATALOG, config)).evaluate(CARD)
    except MemplanError:
        return None


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name.startswith("fsdp1")])
def test_adapters_that_are_units_of_their_own_are_reduced_one_by_one_and_their_frozen_layers_gathered(
    layout, checkpointing
):
    plan = plan_of("lora", LAYOUTS[layout], activation_checkpointing=checkpointing)
    events = events_of(plan)
    assert abs(peak_of(events) - plan.requested_bytes) <= plan.requested_bytes // 250
    step = range(events.steady_from, len(events.codes))
    reduced = [events.codes[place] for place in step if events.stream.streams.get(events.codes[place] >> 1) == REDUCES]
    trained = sum(entry.tensor.count for entry in plan.states.tensors if entry.trainable)
    assert sum(not code & 1 for code in reduced) >= trained  # a share of each gradient
    assert simulated(plan).allocated_bytes == plan.allocated_bytes


@pytest.mark.one_in(3)
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("config", ["mixed-adamw", "bf16-adamw"])
@pytest.mark.parametrize("stack", ["transformers", "torchtitan@0.2.2", "bundled", "axolotl"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_fullest_moment_of_a_ranks_events_is_the_peak_of_the_formula(layout, stack, config, checkpointing, steps):
    keys = {"activation_checkpointing": checkpointing, "gradient_accumulation_steps": steps}
    plan = plan_of(config, LAYOUTS[layout], stack, **keys)
    if plan is None or shares_reason(plan):
        pytest.skip("refused, or not told")
    events = events_of(plan)
    assert abs(peak_of(events) - plan.requested_bytes) <= plan.requested_bytes // 250
    assert alive_at(events, events.steps[1]) == alive_at(
        events, events.steps[2]
    )  # a step leaves what the one before left


SHARED = {
    "alone": Parallel(),
    "shards": Parallel(data=4, zero_stage=3),
    "matrices": Parallel(data=2, tensor=2, zero_stage=3),
    "matrices and sequences": Parallel(data=2, tensor=2, sequence=True, zero_stage=3),
    "matrices alone": Parallel(data=1, tensor=2, zero_stage=3),
    "sequences": Parallel(data=2, context=2, zero_stage=3),
    "experts": Parallel(data=4, expert=2, zero_stage=3),
}


TOLD = [
    (name, config, fills)
    for name in SHARED
    for config in ("mixed-adamw", "bf16-adamw")
    for fills in ("fill", "free")
    if (name, config) != ("alone", "mixed-adamw") and (name, fills) != ("experts", "fill")  # refused
]


@pytest.mark.parametrize("loss", ["fp32", "chunked-backward"])
@pytest.mark.parametrize(("name", "config", "fills"), TOLD)
def test_a_rank_that_shares_matrices_sequences_or_experts_is_told_as_a_whole_one_is(name, config, fills, loss):
    model = "qwen3-30b-a3b" if name == "experts" else "llama-3.1-8b"
    kernels = Kernels(loss=loss, attention="flex" if name == "sequences" else None)
    changed = replace(
        CATALOG.configs[config],
        micro_batch_size=2,
        sequence_length=512,
        stack="torchtitan",
        parallel=SHARED[name],
        zero_gradients=fills,
        kernels=kernels,
    )
    plan = CompiledPlan(cut_model(model, CATALOG), resolve(changed, CATALOG, config)).evaluate(CARD)
    events = events_of(plan)
    assert abs(peak_of(events) - plan.requested_bytes) <= plan.requested_bytes // 250
    assert alive_at(events, events.steps[1]) == alive_at(events, events.steps[2])
    assert simulated(plan).reserve_by_share == ""


def test_what_is_gathered_cast_and_reduced_comes_from_streams_of_their_own():
    events = events_of(plan_of("mixed-adamw", LAYOUTS["fsdp1 pre, True"]))
    assert {*events.stream.streams.values()} == {GATHERS, CASTS, REDUCES}
    apart = sum(
        Stream(events.sizes, [code for code in events.codes if events.stream.streams.get(code >> 1, 0) == number])
        .peaks()
        .reserved_bytes
        for number in (0, GATHERS, CASTS, REDUCES)
    )
    together = Stream(events.sizes, events.codes, streams=events.stream.streams)
    assert together.peaks().reserved_bytes == apart > Stream(events.sizes, events.codes).peaks().reserved_bytes
    replayed = ((-1 if code & 1 else 1, code >> 1, events.sizes[code >> 1]) for code in events.codes)
    assert replay(replayed, streams=events.stream.streams).reserved_peak_bytes == apart
    least = together.peaks().allocated_bytes
    runs = [together.peaks(least + (apart - least) * share // 8) for share in range(9)]
    assert runs[-1].survives
    assert not runs[0].survives or runs[0].retries


@pytest.mark.parametrize("layout", ["groups", "fsdp1 pre, True"])
def test_shares_that_groups_reduce_among_them_are_cast_on_a_stream_of_its_own(layout):
    plan = plan_of("mixed-adamw", replace(LAYOUTS[layout], data=8, replicate=2))
    events = events_of(plan)
    on = {
        stream: sum(events.sizes[name] for name, own in events.stream.streams.items() if own == stream)
        for stream in range(5)
    }
    assert on[AMONG_GROUPS] > 0
    alone = events_of(plan_of("mixed-adamw", replace(LAYOUTS[layout], data=8, replicate=1)))
    assert AMONG_GROUPS not in alone.stream.streams.values()


def test_frozen_weights_of_the_same_width_in_another_dtype_are_cast_before_they_are_gathered():
    weights = {"hidden_matrix": "nf4", "default": "fp16"}
    sizes = {}
    for default in ("fp16", "bf16"):
        plan = plan_of("qlora", FSDP2, weights={**weights, "default": default}, compute_dtype="bf16")
        events = events_of(plan)
        sizes[default] = sum(events.sizes[name] for name, own in events.stream.streams.items() if own == GATHERS)
    assert sizes["fp16"] > sizes["bf16"]


def test_a_plan_over_shards_has_its_reserve_simulated_and_its_streams_in_it_once():
    by_share = plan_of("mixed-adamw", FSDP2)
    plan = simulated(by_share)
    assert plan.reserve_by_share == ""
    assert plan.allocated_bytes <= plan.least_bytes - plan.allowances.context_bytes <= plan.reserved_bytes
    assert by_share.allowances.stream_bytes > 0 == plan.allowances.stream_bytes
    assert (
        plan.allowances.upper_context_bytes
        == by_share.allowances.upper_context_bytes - by_share.allowances.stream_bytes
    )
    assert any("simulated apart" in line for line in plan.assumptions)
    assert not any("may not be reusable" in line for line in plan.assumptions)


def test_a_rank_fits_where_all_streams_have_what_they_hold_and_is_tight_where_caches_are_to_be_given_back():
    plan = simulated(plan_of("mixed-adamw", FSDP2))
    usable = {"fits": plan.upper_bytes, "tight": plan.upper_bytes - 1, "no": plan.lower_bytes - MIB}
    before = plan.by_share
    assert {name: simulated(replace(before, usable_bytes=size)).verdict for name, size in usable.items()} == {
        name: name for name in usable
    }


@pytest.mark.parametrize(
    ("config", "parallel", "keys", "reason"),
    [("mixed-adamw", LAYOUTS["fsdp1 pre, True"], {"zero_gradients": "fill"}, "filled with zeros")],
)
def test_what_is_not_told_over_several_gpus_says_so(config, parallel, keys, reason):
    plan = plan_of(config, parallel, **keys)
    assert plan is not None
    assert reason in shares_reason(plan)
    assert simulated(plan).reserve_by_share == shares_reason(plan)


@pytest.mark.parametrize("parallel", [FSDP2, LAYOUTS["groups"], Parallel(data=3, zero_stage=3)])
@pytest.mark.parametrize("batch_bytes", [0, 2**24])
def test_rounds_of_muon_have_as_many_bytes_alive_as_the_formula_has_in_the_optimizer_step(parallel, batch_bytes):
    plan = plan_of("muon", parallel, "bundled", kernels=Kernels(muon_batch_bytes=batch_bytes))
    assert plan is not None
    assert simulated(plan).reserve_by_share == ""
    events = events_of(plan)
    start = max(place for place, phase in events.stream.phases if phase == "optimizer step")
    alive = most = alive_at(events, start)
    for code in events.codes[start:]:
        alive += events.sizes[code >> 1] * (1 - 2 * (code & 1))
        most = max(most, alive)
    workspaces = sum(events.sizes[storage] for storage in events.libraries)
    stepping = dict(plan.instants)["optimizer step"]
    assert abs(most - workspaces - stepping) <= stepping // 250


def test_a_block_that_was_freed_on_one_stream_serves_no_other():
    events = [(+1, "a", 30 * MIB), (-1, "a", 30 * MIB), (+1, "b", 30 * MIB)]
    assert replay(events).reserved_peak_bytes == 30 * MIB
    assert replay(events, streams={"a": 1}).reserved_peak_bytes == 60 * MIB


@pytest.mark.parametrize("config", ["mixed-adamw", "fp32-adamw"])
def test_the_reserve_of_memplans_own_loop_over_shards_is_the_traces(config):
    pytest.importorskip("torch")
    from memplan.trace.tracer import trace_training
    from tests.survey.drawn_jobs import STEPS, reserved

    plan = plan_of(config, FSDP2, "bundled")
    trace = trace_training(plan.model, plan.setup, compute_capability="9.0", steps=STEPS)
    own, traced = reserved(plan, trace, STEPS)
    assert own == pytest.approx(traced, rel=0.01)
    assert 0 < trace.peak_bytes <= own


TRACED = json.loads(Path(__file__).with_name("sharded_jobs.json").read_text(encoding="utf-8"))["traced"]
"""A frozen head that is a unit alone, behind a norm that casts; a tied head beside learned positions, in a later micro-step."""


@pytest.mark.parametrize("traced", TRACED, ids=["lone-head", "tied-head"])
def test_peak_and_reserve_are_those_of_a_step_of_accelerates_own(traced):
    plan = planned(StackJob.read(json.dumps(traced["job"])), CATALOG)
    events = events_of(as_made(plan), STEPS)
    assert plan.requested_bytes == pytest.approx(traced["peak_bytes"], rel=1e-5)
    peaks = Stream(events.sizes, events.codes, streams=events.stream.streams).peaks()
    assert peaks.reserved_bytes == traced["reserved_bytes"]
