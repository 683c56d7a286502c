"""The events of replicas: weights that are sent, buckets that are made anew, and copies of what the model returns."""

from dataclasses import replace
from itertools import groupby, pairwise

import pytest

from memplan.catalog.config_keys.parallel_keys import Parallel
from memplan.plan.reserve.simulation import events_of, shares_reason, simulated
from memplan.step.events.ranks.replicated_events import BUCKET_LIMITS, bucketed
from memplan.units import MIB
from tests.step.test_events import alive_at, peak_of
from tests.step.test_gathered_events import plan_of

DDP = Parallel(data=2)


def test_a_bucket_is_full_with_the_tensor_that_reaches_its_limit_and_holds_one_dtype():
    sizes = [("bf16", MIB // 2), ("fp32", 40 * MIB), ("bf16", MIB), ("bf16", 24 * MIB), ("bf16", MIB), ("fp32", 4)]
    assert bucketed(sizes, BUCKET_LIMITS) == [[MIB // 2, MIB], [40 * MIB], [24 * MIB, MIB], [4]]
    assert bucketed(sizes, ()) == [[MIB // 2, MIB, 24 * MIB, MIB], [40 * MIB, 4]]


def alive_before(events):
    """Return the storages that are there when the first step begins."""
    alive = dict.fromkeys(code >> 1 for code in events.codes[: events.steps[0]])
    for code in events.codes[: events.steps[0]]:
        if code & 1:
            del alive[code >> 1]
    return [*alive]


def buckets(events):
    """Return what is allocated for communication before each step: sizes, negative where they are let go of."""
    changes = [*events.stream.components, (len(events.sizes), "")]
    ranges = [(first, end) for (first, name), (end, _) in pairwise(changes) if name == "communication"]
    sections = {s for first, section in events.stream.sections for s in range(first, first + len(section.storages))}
    own = {s for first, end in ranges for s in range(first, end)} - sections
    return [events.sizes[code >> 1] * (1 - 2 * (code & 1)) for code in events.codes if code >> 1 in own]


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize(
    ("config", "stack"), [("bf16-adamw", "transformers"), ("lora", "trl"), ("bf16-adamw", "bundled")]
)
@pytest.mark.parametrize("steps", [1, 3])
def test_the_fullest_moment_of_a_replicas_events_is_the_peak_of_the_formula(config, stack, checkpointing, steps):
    plan = plan_of(config, DDP, stack, activation_checkpointing=checkpointing, gradient_accumulation_steps=steps)
    assert not shares_reason(plan)
    events = events_of(plan)
    step = replace(events, codes=[2 * s for s in alive_before(events)] + list(events.codes[events.steps[0] :]))
    assert abs(peak_of(step) - plan.requested_bytes) <= plan.requested_bytes // 250
    assert alive_at(events, events.steps[1]) == alive_at(events, events.steps[2])


@pytest.mark.parametrize("looks", [False, True])
def test_buckets_are_made_anew_unless_unused_parameters_are_looked_for(looks):
    plan = plan_of("bf16-adamw", replace(DDP, unused_parameters=looks))
    sizes = buckets(events_of(plan))
    gradients = sum(entry.gradient_bytes * entry.tensor.count for entry in plan.states.tensors)
    kinds = [(up, [abs(size) for size in group]) for up, group in groupby(sizes, key=lambda size: size > 0)]
    made = [group for up, group in kinds if up]
    counters = 4 * sum(entry.tensor.count for entry in plan.states.tensors)
    assert sum(made[-1][-(len(made[-1]) if not looks else 2) :]) > 0
    if looks:
        assert sum(sizes) == gradients + counters
        assert sizes[-1] == counters
    else:
        assert sum(sizes) == gradients == sum(made[-1])
        assert [-gradients] == [size for size in sizes if size < 0][-1:]
        assert len(made[-1]) > 1


def test_a_replica_lets_go_of_what_it_caches_on_a_full_card_as_one_gpu_does():
    plan = simulated(plan_of("bf16-adamw", DDP))
    assert plan.reserve_by_share == ""
    assert plan.least_bytes <= plan.device_bytes <= plan.upper_bytes


@pytest.mark.parametrize("keys", [{}, {"gradient_accumulation_steps": 2}, {"activation_checkpointing": "full"}])
def test_the_reserve_of_memplans_own_loop_over_replicas_is_the_traces(keys):
    pytest.importorskip("torch")
    from memplan.trace.tracer import trace_training
    from tests.survey.drawn_jobs import STEPS, reserved

    plan = plan_of("bf16-adamw", DDP, "bundled", **keys)
    trace = trace_training(plan.model, plan.setup, compute_capability="9.0", steps=STEPS)
    own, traced = reserved(plan, trace, STEPS)
    assert own == pytest.approx(traced, rel=0.01)
    assert 0 < trace.peak_bytes <= own
