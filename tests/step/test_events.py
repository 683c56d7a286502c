"""The events of a run: each storage allocated and freed in turn, and as many bytes alive as the formula has at its peak."""

from dataclasses import replace

import pytest

from memplan.allocator.streams.stream_allocator import StreamAllocator
from memplan.allocator.streams.stream_replay import Stream
from memplan.catalog.kernel_profiles import Kernels
from memplan.catalog.training_config import Gradients
from memplan.errors import MemplanError
from memplan.plan.memory_plan import Device
from memplan.plan.planner import CompiledPlan
from memplan.plan.reserve.simulation import Runs, events_of, simulated
from memplan.training.resolution.resolve_config import resolve
from tests.jobs import SHAPES, shipped_catalog

CATALOG = shipped_catalog()
CARD = Device(CATALOG.gpus["h100-sxm-80gb"], "h100-sxm-80gb")
VARIANTS = {
    "plain": {},
    "full": {"activation_checkpointing": "full"},
    "two micro-steps": {"gradient_accumulation_steps": 2},
    "chunked": {"kernels": Kernels(loss="chunked")},
    "filled": {"zero_gradients": "fill"},
    "released": {"gradients": Gradients(lifetime="layer")},
}


def plan_of(config, model="small", rows=2, **keys):
    """Return the plan of a small job, or nothing where it is refused."""
    changed = replace(CATALOG.configs[config], micro_batch_size=rows, sequence_length=300, **keys)
    try:
        return CompiledPlan(SHAPES[model], resolve(changed, CATALOG, config)).evaluate(CARD)
    except MemplanError:
        return None


def alive_at(events, place):
    """Return the bytes alive before the event at a place."""
    return sum(events.sizes[code >> 1] * (1 - 2 * (code & 1)) for code in events.codes[:place])


def peak_of(events):
    """Return the most bytes alive, workspaces of libraries left out; each event has to be possible."""
    alive, total, most = set(), 0, 0
    for code in events.codes:
        storage, frees = code >> 1, code & 1
        size = events.sizes[storage]
        if not size:
            continue
        assert (storage in alive) == bool(frees)
        (alive.remove if frees else alive.add)(storage)
        if storage not in events.libraries:
            total += -size if frees else size
        most = max(most, total)
    return most


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("config", list(CATALOG.configs.entries))
def test_the_fullest_moment_of_the_events_is_the_peak_of_the_formula(config, variant):
    plan = plan_of(config, **VARIANTS[variant])
    if plan is None:
        pytest.skip("refused")
    assert abs(peak_of(events_of(plan)) - plan.requested_bytes) <= plan.requested_bytes // 250


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("attention", ["eager", "flash"])
@pytest.mark.parametrize("stack", ["plain-loop", "transformers"])
def test_what_a_forward_makes_for_its_layers_is_told_and_goes(stack, attention, checkpointing):
    kernels = Kernels(attention=attention)
    plan = plan_of("bf16-adamw", stack=stack, kernels=kernels, activation_checkpointing=checkpointing)
    events = events_of(plan)
    assert abs(peak_of(events) - plan.requested_bytes) <= plan.requested_bytes // 1000
    left = {alive_at(events, place) for place in (*events.steps[1:], len(events.codes))}
    assert len(left) == 1
    tables = 2 * 2 * 300 * plan.model.spec.runs[0].layer.attention.rotary_dim // 2
    in_step = [events.sizes[code >> 1] for code in events.codes[events.steady_from :] if not code & 1]
    assert in_step.count(tables) >= 2
    mask = 2 * 2 * 300 * 300
    assert (mask in in_step) == (attention == "eager")


@pytest.mark.parametrize("config", ["lora", "bf16-adamw"])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_names_of_outputs_end_where_a_loop_lets_go_of_them(config, checkpointing):
    steady, peaks, logits = {}, {}, 0
    for until in ("forward", "backward", "step", "next"):
        keys = {"gradient_accumulation_steps": 2, "evaluation": True, "outputs_until": until}
        plan = plan_of(config, stack="plain-loop", activation_checkpointing=checkpointing, **keys)
        events = events_of(plan)
        peaks[until] = plan.requested_bytes
        assert abs(peak_of(events) - peaks[until]) <= peaks[until] // 1000
        signed = [events.sizes[code >> 1] * (1 - 2 * (code & 1)) for code in events.codes]
        steady[until] = sum(signed)
        logits = 2 * 2 * 300 * plan.model.spec.vocab_size
    assert steady["forward"] == steady["backward"] == steady["step"] <= steady["next"] - logits
    assert peaks["forward"] <= peaks["backward"] <= peaks["step"] <= peaks["next"]


@pytest.mark.parametrize(("stack", "evaluations"), [("plain-loop", 1), ("transformers", 3), ("bundled", 3)])
def test_a_loop_that_evaluates_as_an_epoch_ends_does_so_behind_the_last_step(stack, evaluations):
    phases = events_of(plan_of("mixed-adamw", stack=stack, evaluation=True)).stream.phases
    names = [name for _, name in phases]
    assert names.count("evaluation") == evaluations
    assert names[-1] == "evaluation"


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("stack", ["trl@0.11", "trl@0.19", "trl@0.28", "trl@1.4", "trl@1.6"])
@pytest.mark.parametrize("config", ["lora", "mixed-adamw"])
def test_metrics_of_whole_logits_are_told_as_events(config, stack, rows):
    plan = plan_of(config, stack=stack, rows=rows)
    assert abs(peak_of(events_of(plan)) - plan.requested_bytes) <= plan.requested_bytes // 1000
    assert not simulated(plan).reserve_by_share


@pytest.mark.one_in(5)  # both numbers of steps, all stacks and all configs are among these
@pytest.mark.parametrize("steps", [7, 8])
@pytest.mark.parametrize("stack", ["plain-loop", "transformers", "bundled"])
@pytest.mark.parametrize("config", ["lora", "mixed-adamw", "bf16-adamw"])
def test_micro_steps_that_change_nothing_are_not_played_and_nothing_is_lost(config, stack, steps, monkeypatch):
    plan = plan_of(config, stack=stack, gradient_accumulation_steps=steps)
    events, played = events_of(plan), []
    play = StreamAllocator.play
    monkeypatch.setattr(
        StreamAllocator, "play", lambda self, *given: played.append(len(given[1])) or play(self, *given)
    )
    few = Stream(events.sizes, events.codes, events.steps[1:], events.passes)
    whole = Stream(events.sizes, events.codes, events.steps[1:])
    spare = whole.peaks()
    middle = (spare.allocated_bytes + spare.reserved_bytes) // 2
    for ways in ({}, {"downwards": False}, {"expandable": True}, {"capacity_bytes": middle}):
        played.clear()
        expected, all_codes = whole.peaks(**ways), sum(played)
        played.clear()
        assert few.peaks(**ways) == expected
        assert sum(played) < all_codes or ways or stack == "plain-loop"  # whose two caches change places


def test_a_simulated_plan_orders_its_figures():
    plan = simulated(plan_of("bf16-adamw"))
    assert not plan.reserve_by_share
    assert plan.lower_bytes <= plan.least_bytes <= plan.device_bytes <= plan.upper_bytes
    assert plan.requested_bytes < plan.allocated_bytes <= plan.reserved_bytes
    assert sum(line.bytes for line in plan.components) == plan.device_bytes


def test_the_verdict_is_whether_the_run_survives_in_what_there_is():
    plan = plan_of("bf16-adamw")
    roomy = simulated(plan)
    by_capacity, runs = {}, Runs()
    for mebibytes in range(roomy.lower_bytes // 2**20 - 100, roomy.upper_bytes // 2**20 + 200, 50):
        by_capacity[mebibytes] = simulated(replace(plan, usable_bytes=mebibytes * 2**20), runs=runs).verdict
    assert list(dict.fromkeys(by_capacity.values())) == ["no", "tight", "fits"]


def test_the_least_is_left_out_where_there_is_memory_to_spare_and_changes_nothing_else():
    plan = plan_of("bf16-adamw")
    whole = simulated(plan)
    for usable, same in ((whole.upper_bytes, False), (whole.upper_bytes - 1, True)):
        full, quick = (simulated(replace(plan, usable_bytes=usable), least=least) for least in (True, None))
        assert (full.verdict, full.device_bytes, full.upper_bytes) == (
            quick.verdict,
            quick.device_bytes,
            quick.upper_bytes,
        )
        assert ((full.least_bytes, full.lower_bytes) == (quick.least_bytes, quick.lower_bytes)) == same


def test_shares_are_named_where_nothing_is_simulated():
    pooled = replace(CARD, count=2)
    plan = plan_of("bf16-adamw")
    assert "pooled" in simulated(replace(plan, device=pooled)).reserve_by_share
    assert "search" in plan.reserve_by_share
