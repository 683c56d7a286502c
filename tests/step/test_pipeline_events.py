"""The events of a rank of a pipeline: as many bytes alive as the formula has, in whatever order its schedule runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memplan.catalog.config_keys.parallel_keys import Parallel
from memplan.catalog.kernel_profiles import Kernels
from memplan.plan.memory_plan import Device
from memplan.plan.planner import CompiledPlan
from memplan.plan.reserve.simulation import MOST_LAYERS, events_of, shares_reason, simulated
from memplan.step.pipelines.pipeline_schedules import stages_of
from memplan.training.resolution.resolve_config import resolve
from tests.jobs import shipped_catalog
from tests.step.test_events import peak_of
from tests.survey.agreement import cut_model

CATALOG = shipped_catalog()
CARD = Device(CATALOG.gpus["h100-sxm-80gb"], "h100-sxm-80gb")
SCHEDULES = {
    "gpipe": Parallel(data=2, pipeline=2, schedule="gpipe", micro_batches=3, zero_stage=3),
    "1f1b": Parallel(data=2, pipeline=2, schedule="1f1b", micro_batches=5, zero_stage=3),
    "1f1b, alone": Parallel(data=1, pipeline=2, schedule="1f1b", micro_batches=2, zero_stage=3),
    "1f1b, matrices": Parallel(data=2, tensor=2, sequence=True, pipeline=2, micro_batches=4, zero_stage=3),
    "interleaved": Parallel(data=2, pipeline=2, virtual=2, schedule="interleaved", micro_batches=4, zero_stage=3),
}


def plan_of(parallel, config="mixed-adamw", **keys):
    """Return the plan of one rank over a pipeline of a model of six layers."""
    changed = replace(
        CATALOG.configs[config],
        micro_batch_size=2,
        sequence_length=512,
        stack="torchtitan",
        parallel=parallel,
        zero_gradients="free",
        **keys,
    )
    model = cut_model("llama-3.1-8b", CATALOG, layers=6)
    return CompiledPlan(model, resolve(changed, CATALOG, config)).evaluate(CARD)


@pytest.mark.parametrize("loss", ["fp32", "chunked-backward"])
@pytest.mark.parametrize("config", ["mixed-adamw", "bf16-adamw"])
@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_fullest_moment_of_a_stages_events_is_the_peak_of_the_formula(name, stage, config, loss):
    plan = plan_of(replace(SCHEDULES[name], stage=stage), config, kernels=Kernels(loss=loss))
    events = events_of(plan)
    assert abs(peak_of(events) - plan.requested_bytes) <= plan.requested_bytes // 250
    left = [
        sum(events.sizes[code >> 1] * (1 - 2 * (code & 1)) for code in events.codes[:place]) for place in events.steps
    ]
    assert left[1] == left[2]  # a step leaves what the one before left
    assert simulated(plan).reserve_by_share == ""


def test_stages_of_a_rank_gather_on_streams_of_their_own():
    plan = plan_of(replace(SCHEDULES["interleaved"], stage=1))
    events = events_of(plan)
    roots = {(stream - 1) // 4 for stream in events.stream.streams.values()}
    assert roots == set(stages_of(1, plan.setup.config.parallel))


@pytest.mark.parametrize("fullest", [0, 1])
def test_the_fullest_rank_has_its_reserve_simulated_with_a_stage_named_or_not(fullest):
    parallel = replace(SCHEDULES["1f1b"], last_stage_less_layers=3 - 3 * fullest)
    plan = simulated(plan_of(parallel))
    own = simulated(plan_of(replace(parallel, stage=fullest)))
    assert max(plan.ranks, key=lambda row: row.device_bytes).rank == fullest
    assert plan.reserve_by_share == own.reserve_by_share == ""
    assert plan.reserved_bytes == own.reserved_bytes > plan.allocated_bytes


def test_micro_batches_that_pass_together_count_towards_what_can_be_played():
    parallel = replace(SCHEDULES["1f1b"], micro_batches=MOST_LAYERS, stage=0)
    assert "too many to be played" in shares_reason(plan_of(parallel))
