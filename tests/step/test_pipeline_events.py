"""The events of a rank of a pipeline: as many bytes alive as the formula has, in whatever order its schedule runs."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from memplan.catalog.config_keys.parallel_keys import Parallel
from memplan.catalog.kernel_profiles import Kernels
from memplan.errors import CannotAnswerError
from memplan.plan.memory_plan import Device
from memplan.plan.planner import CompiledPlan
from memplan.plan.reserve.simulation import MOST_LAYERS, events_of, shares_reason, simulated
from memplan.step.pipelines.pipeline_schedules import stages_of
from memplan.training.resolution.resolve_config import resolve
from tests.jobs import shipped_catalog
from tests.step.test_events import alive_at, peak_of
from tests.survey.agreement import cut_model
from tests.survey.drawn_jobs import Job, resolved

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
    assert alive_at(events, events.steps[1]) == alive_at(
        events, events.steps[2]
    )  # a step leaves what the one before left
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


INSTANTS = ("forward", "backward", "gradient reduction", "gradient clipping", "optimizer step")
TRACED = {
    ("gpipe", 0, "fp32", 8): (10_478_725_088, 15_661_377_504, 16_291_833_824, 9_463_759_480, 9_463_406_692),
    ("gpipe", 1, "fp32", 8): (12_983_130_108, 17_229_055_992, 14_889_428_976, 9_463_808_292, 9_463_439_468),
    ("gpipe", 1, "chunked-backward", 1): (15_651_756_024, 16_068_159_476, 15_249_598_448, 9_463_808_292, 9_463_439_468),
    ("gpipe", 1, "chunked-backward", 8): (16_506_484_728, 16_068_159_476, 15_249_598_448, 9_463_808_292, 9_463_439_468),
    ("1f1b", 0, "fp32", 8): (14_707_223_776, 15_476_485_344, 16_308_661_472, 9_480_585_848, 9_480_233_060),
    ("1f1b", 1, "fp32", 8): (15_730_818_300, 16_256_154_876, 14_906_256_632, 9_480_634_660, 9_480_265_836),
    ("1f1b", 1, "chunked-backward", 8): (
        19_762_756_864,
        17_577_901_308,
        16_317_123_832,
        10_531_307_812,
        10_530_938_988,
    ),
    ("1f1b, alone", 0, "fp32", 8): (17_041_327_456, 22_520_890_720, 24_412_128_608, 18_893_079_608, 18_892_374_116),
    ("1f1b, alone", 1, "fp32", 8): (22_783_636_848, 23_308_973_424, 23_366_223_212, 18_893_177_220, 18_892_439_660),
    ("1f1b, alone", 1, "chunked-backward", 8): (
        27_833_423_220,
        26_732_066_160,
        25_471_296_876,
        20_994_523_524,
        20_993_785_964,
    ),
    ("1f1b, matrices", 0, "fp32", 8): (7_425_514_080, 7_776_588_384, 8_150_714_976, 4_736_627_096, 4_736_450_660),
    ("1f1b, matrices", 1, "fp32", 8): (8_166_468_212, 8_429_131_388, 7_449_545_332, 4_736_667_892, 4_736_483_436),
    ("1f1b, matrices", 1, "chunked-backward", 8): (
        9_932_853_884,
        8_831_505_016,
        8_159_193_716,
        5_262_004_468,
        5_261_820_012,
    ),
    ("interleaved", 0, "fp32", 8): (14_841_547_360, 15_745_288_800, 14_845_102_688, 9_539_281_528, 9_538_928_740),
    ("interleaved", 1, "fp32", 8): (15_915_604_600, 16_440_941_176, 15_755_528_820, 9_539_330_340, 9_538_961_516),
    ("interleaved", 1, "chunked-backward", 8): (
        19_947_543_164,
        17_762_687_608,
        16_628_001_396,
        10_590_003_492,
        10_589_634_668,
    ),
}
"""Schedule, stage, loss and its chunks -> bytes at each instant of torchtitan 0.3.0's own step of that rank, torch 2.13.0's pipelining and
``fully_shard`` on a fake process group (``tests.survey.stacks.judged_stack_jobs.traced``)."""


@pytest.mark.parametrize("case", TRACED, ids=str)
def test_every_instant_of_a_stage_takes_what_torch_did(case):
    name, stage, loss, chunks = case
    plan = plan_of(replace(SCHEDULES[name], stage=stage), kernels=Kernels(loss=loss, loss_chunks=chunks))
    planned = dict(plan.instants)
    for instant, traced in zip(INSTANTS, TRACED[case], strict=True):
        assert abs(planned[instant] - traced) <= traced // 250_000, instant


@pytest.mark.parametrize("name", ["1f1b", "interleaved"])
def test_a_loss_of_one_chunk_is_refused_where_torch_stops_at_its_gradients(name):
    with pytest.raises(CannotAnswerError, match="norm and head in two dtypes, at which torch stops; use 2 or more"):
        plan_of(replace(SCHEDULES[name], stage=1), kernels=Kernels(loss="chunked-backward", loss_chunks=1))


@pytest.mark.parametrize(
    "drawn", json.loads(Path(__file__).with_name("piped_jobs.json").read_text()), ids=lambda one: one["what"]
)
def test_instants_of_drawn_stages_are_those_of_a_trace(drawn):
    """What was traced likewise, where weights or experts take more than what passes through them."""
    model, setup = resolved(Job(**drawn["job"]), CATALOG)
    plan = CompiledPlan(model, setup).evaluate(CARD)
    planned, events = dict(plan.instants), events_of(plan)
    for instant, traced in drawn["instants"].items():
        assert abs(planned[instant] - traced) <= traced // 50_000, instant
    assert abs(peak_of(events) - plan.requested_bytes) <= plan.requested_bytes // 200
