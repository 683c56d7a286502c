"""The events of a rank that gathers units: as many bytes alive as the formula has, each stream's memory apart."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memplan.allocator.caching_allocator import replay
from memplan.allocator.streams.stream_replay import Stream
from memplan.catalog.config_keys.parallel_keys import FlatShards, Parallel
from memplan.errors import MemplanError
from memplan.plan.memory_plan import Device
from memplan.plan.planner import CompiledPlan
from memplan.plan.reserve.simulation import events_of, shares_reason, simulated
from memplan.step.events.gathered_events import CASTS, GATHERS, REDUCES
from memplan.training.resolution.resolve_config import resolve
from memplan.units import MIB
from tests.jobs import SHAPES, shipped_catalog
from tests.step.test_events import peak_of

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
    left = [
        sum(events.sizes[code >> 1] * (1 - 2 * (code & 1)) for code in events.codes[:place]) for place in events.steps
    ]
    assert left[1] == left[2]  # a step leaves what the one before left


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


@pytest.mark.parametrize(
    ("config", "parallel", "keys", "reason"),
    [
        ("lora", LAYOUTS["fsdp1 pre, True"], {}, "units of their own"),
        ("bf16-adamw", Parallel(data=2), {}, "where units of FSDP"),
        ("bf16-adamw", FSDP2, {"zero_gradients": "fill"}, "filled with zeros"),
    ],
)
def test_what_is_not_told_over_several_gpus_says_so(config, parallel, keys, reason):
    plan = plan_of(config, parallel, **keys)
    assert plan is not None
    assert reason in shares_reason(plan)
    assert simulated(plan).reserve_by_share == shares_reason(plan)


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
