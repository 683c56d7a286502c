"""What ranks of Megatron-LM hold, beside what its own modules held: ``megatron_jobs.py`` made the record."""

import json
from pathlib import Path

import pytest

from memplan.catalog.config_keys.parallel_keys import Parallel
from memplan.errors import InvalidFileError
from memplan.step.grids.grid import Grid, grid_of
from memplan.step.grids.megatron_states import MegatronSettings, megatron_states
from memplan.step.grids.megatron_tensors import MegatronBuild
from memplan.step.grids.pipeline_stages import StageSplit, chunks_of
from tests.grids.megatron_jobs import MegatronJob
from tests.grids.planned_ranks import grid_of_job, planned, spec_of, split_of, summary

RECORDS = [json.loads(path.read_text()) for path in sorted(Path(__file__).parent.glob("megatron-core-0.16.1*.json"))]
JOBS = [(MegatronJob(**row["job"]), row["held"]) for record in RECORDS for row in record["jobs"]]


def test_every_rank_holds_what_megatron_builds():
    for job, held in JOBS:
        assert [[summary(chunk) for chunk in stage] for stage in planned(job)] == held, job


def test_states_are_the_sum_over_chunks():
    own = [(job, held) for job, held in JOBS if not job.bucket]  # whose buffers are one bucket, the default
    assert len(own) > 20
    for job, held in own:
        build = MegatronBuild("local", job.multiple, job.predicted)
        settings = MegatronSettings(split_of(job), build)
        for stage, chunks in zip(megatron_states(spec_of(job), grid_of_job(job), settings), held, strict=True):
            assert stage.parameters == sum(chunk["tensors"][1] for chunk in chunks)
            buffers = [buffer for chunk in chunks for kind in ("dense", "experts") for buffer in chunk[kind]]
            assert stage.fullest.gradients == 4 * sum(buffer["elements"] for buffer in buffers)
            ranks = range(len(stage.places))
            updated = sum(stage.rank(rank).master_weights for rank in ranks) // 4
            experts = job.expert_tensor * job.expert
            dense = sum(sum(buffer["updated"]) for chunk in chunks for buffer in chunk["dense"])
            routed = sum(sum(buffer["updated"]) for chunk in chunks for buffer in chunk["experts"])
            assert updated == (dense * job.tensor + routed * experts) * job.replicate


def test_stages_laid_out_by_hand():
    laid = chunks_of(6, Grid(2, pipeline=2, virtual=2), StageSplit(layout="Et*2|(t|)*2ttL"))
    assert [[(chunk.first, chunk.count, chunk.embeds, chunk.ends) for chunk in stage] for stage in laid] == [
        [(0, 2, True, False), (3, 1, False, False)],
        [(2, 1, False, False), (4, 2, False, True)],
    ]
    for layout, message in (
        ("Ettt|tttL", "2 chunks are not those of 2 stages with 2 each"),
        ("Ett|t|t|tL", "expected E, 6 t and L"),
        ("Ettt|t|tt|mL", "expected E, 6 t and L"),
    ):
        with pytest.raises(InvalidFileError, match=message):
            chunks_of(6, Grid(2, pipeline=2, virtual=2), StageSplit(layout=layout))
    behind = StageSplit(predicted=2, layout="Ettt|t|tt|mmL")
    assert chunks_of(6, Grid(2, pipeline=2, virtual=2), behind)[1][1].count == 0
    for layout, message in (("Ettt|t|ttm|mL", "all m have to be"), ("Ettt|t|tt|mL", "expected E, 6 t, 2 m and L")):
        with pytest.raises(InvalidFileError, match=message):
            chunks_of(6, Grid(2, pipeline=2, virtual=2), StageSplit(predicted=2, layout=layout))


def test_layers_that_do_not_divide_name_the_nearest():
    with pytest.raises(InvalidFileError, match="the nearest that divides them is 4"):
        chunks_of(32, Grid(5, pipeline=5))
    with pytest.raises(InvalidFileError, match="10 layers of a stage cannot be divided into 4 chunks"):
        chunks_of(20, Grid(2, pipeline=2, virtual=4))


@pytest.mark.parametrize("name", ["tensor", "pipeline", "context", "expert", "expert_tensor", "replicate"])
def test_a_degree_below_one_is_refused_by_its_key(name):
    with pytest.raises(InvalidFileError, match=rf"parallel\.{name}: expected a whole number, at least 1, got 0"):
        grid_of(Parallel(**{name: 0}), 8)
