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


MOMENTS = {
    ("gpipe", 0, "fp32", 8): 444_958_950_544,
    ("gpipe", 1, "fp32", 8): 650_610_743_044,
    ("gpipe", 1, "chunked-backward", 1): 671_519_598_028,
    ("gpipe", 1, "chunked-backward", 8): 731_409_901_116,
    ("1f1b", 0, "fp32", 8): 468_931_298_480,
    ("1f1b", 1, "fp32", 8): 596_954_379_220,
    ("1f1b", 1, "chunked-backward", 1): 859_580_527_732,
    ("1f1b", 1, "chunked-backward", 8): 978_508_117_228,
    ("1f1b, alone", 0, "fp32", 8): 448_828_827_216,
    ("1f1b, alone", 1, "fp32", 8): 577_365_206_028,
    ("1f1b, alone", 1, "chunked-backward", 1): 872_679_793_756,
    ("1f1b, alone", 1, "chunked-backward", 8): 943_359_321_260,
    ("1f1b, matrices", 0, "fp32", 8): 329_509_788_880,
    ("1f1b, matrices", 1, "fp32", 8): 411_708_781_712,
    ("1f1b, matrices", 1, "chunked-backward", 1): 548_395_477_264,
    ("1f1b, matrices", 1, "chunked-backward", 8): 595_136_018_776,
    ("interleaved", 0, "fp32", 8): 659_969_766_840,
    ("interleaved", 1, "fp32", 8): 805_843_670_312,
    ("interleaved", 1, "chunked-backward", 1): 1_163_820_406_176,
    ("interleaved", 1, "chunked-backward", 8): 1_278_019_704_344,
}
"""Schedule, stage, loss and its chunks -> the bytes of all moments of a step together, the fullest one or not."""


@pytest.mark.parametrize("case", MOMENTS, ids=str)
def test_every_moment_of_a_stage_takes_as_much_as_it_did(case):
    name, stage, loss, chunks = case
    plan = plan_of(replace(SCHEDULES[name], stage=stage), kernels=Kernels(loss=loss, loss_chunks=chunks))
    assert sum(one.form.total_bytes(plan.values) for one in plan.forms.candidates) == MOMENTS[case]
