"""The events of DeepSpeed's ZeRO 1 to 3: as many bytes alive as the formula has, and what each step leaves."""

from dataclasses import replace

import pytest

from memplan.catalog.config_keys.parallel_keys import DeepSpeed, Parallel
from memplan.catalog.training_config import Offload
from memplan.plan.reserve.simulation import events_of, shares_reason, simulated
from memplan.step.events.ranks.flat_events import REDUCES
from memplan.step.events.ranks.partitioned_events import GATHERS
from tests.step.test_events import alive_at, peak_of
from tests.step.test_gathered_events import CATALOG, plan_of
from tests.step.test_replicated_events import alive_before

FP32 = {"master_weights": "fp32", "optimizer": {"default": "adamw-fp32"}}
ADAPTER = {"adapter": replace(CATALOG.configs["lora"].adapter, dtype="bf16")}


def plan_under(stage, config="bf16-adamw", *, ranks=4, zero=None, **keys):
    parallel = Parallel(data=ranks, zero_stage=stage, engine="deepspeed", deepspeed=zero or DeepSpeed())
    return plan_of(config, parallel, **ADAPTER | keys if config == "lora" else FP32 | keys)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("size", [200_000, 5_000_000, "auto"])
@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("config", ["bf16-adamw", "lora"])
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("stage", [1, 2])
def test_the_fullest_moment_of_a_ranks_events_is_the_peak_of_the_formula(
    stage, steps, config, checkpointing, overlaps, size
):
    zero = DeepSpeed(overlap_comm=overlaps, reduce_bucket_size=size)
    keys = {"activation_checkpointing": checkpointing, "gradient_accumulation_steps": steps}
    plan = plan_under(stage, config, zero=zero, **keys)
    assert not shares_reason(plan)
    events = events_of(plan)
    assert peak_of(events) == pytest.approx(plan.requested_bytes, rel=0.01)
    assert alive_at(events, events.steps[1]) == alive_at(events, events.steps[2])
    assert {*events.stream.streams.values()} <= ({REDUCES} if overlaps else set())


def test_a_plan_under_zero_has_its_reserve_simulated():
    plan = simulated(plan_under(2))
    assert plan.reserve_by_share == ""
    assert plan.allocated_bytes <= plan.least_bytes - plan.allowances.context_bytes <= plan.reserved_bytes


@pytest.mark.parametrize("overlaps", [False, None])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("config", ["bf16-adamw", "lora"])
@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("threshold", [0, "auto"])
def test_gathered_parameters_and_reduced_gradients_are_as_many_bytes_as_the_formula_has(
    threshold, steps, config, checkpointing, overlaps
):
    zero = DeepSpeed(overlap_comm=overlaps, persistence_threshold=threshold, reduce_bucket_size="auto")
    keys = {"activation_checkpointing": checkpointing, "gradient_accumulation_steps": steps}
    plan = plan_under(3, config, zero=zero, **keys)
    assert not shares_reason(plan)
    events = events_of(plan)
    step = replace(events, codes=[2 * s for s in alive_before(events)] + list(events.codes[events.steps[0] :]))
    assert peak_of(step) == pytest.approx(plan.requested_bytes, rel=0.01)
    assert alive_at(events, events.steps[1]) == alive_at(events, events.steps[2])
    assert {*events.stream.streams.values()} == (set() if overlaps is False else {GATHERS, REDUCES})


def test_what_deepspeed_steps_in_host_memory_or_gathers_to_evaluate_is_not_told():
    offloaded = plan_under(2, offload=Offload(optimizer_states="cpu"))
    evaluated = plan_under(3, evaluation=True)
    for plan, reason in ((offloaded, "host memory"), (evaluated, "evaluate")):
        assert reason in shares_reason(plan)
        assert simulated(plan).reserve_by_share == shares_reason(plan)


def test_of_layers_alike_those_are_told_beside_which_more_is_gathered_than_beside_any_above():
    told = [name for name, _ in plan_under(3, model="8b").instants if name.startswith("layer ")]
    assert told[0] == "layer 32 backward"
    assert told[-1] == "layer 1 backward"
    assert len(told) < 24
