"""Peaks that others measured and published, against what is planned for the same settings: nothing is fitted to them."""

import json
from pathlib import Path

import pytest

from memplan.library.answers.planned_job import plan_by_share
from memplan.plan.reserve.simulated_run import PLACEMENTS
from memplan.plan.reserve.simulation import Runs, at_a_glance, simulated
from tests.jobs import yaml_data

FOLDER = Path(__file__).parent
RUNS = yaml_data(FOLDER / "reported_runs.yaml")
OUT_OF_MEMORY = yaml_data(FOLDER / "out_of_memory_runs.yaml")
ENDED = [(name, job) for name, table in OUT_OF_MEMORY.items() for job in table["jobs"]]


@pytest.mark.parametrize("name", RUNS)
def test_a_peak_that_others_measured_is_the_one_that_is_planned(name, tmp_path):
    run = RUNS[name]
    job = dict(run["job"])
    if "keys" in run:
        (tmp_path / "config.json").write_text(json.dumps(run["keys"]))
        job["model"] = str(tmp_path)
    by_share = plan_by_share(job.pop("model"), set=run.get("set", {}), **job).memory
    plan = simulated(by_share, least=False, runs=Runs(PLACEMENTS[:1]))
    if "reserved" in run:
        assert not plan.reserve_by_share
        assert plan.reserved_bytes == pytest.approx(run["reserved"], rel=run["within"])
    else:
        planned = plan.allocated_bytes + run.get("besides", {"bytes": 0})["bytes"]
        assert planned == pytest.approx(run["printed"], rel=run["within"])
    assert plan.verdict != "no"


@pytest.mark.thorough
@pytest.mark.one_in(2)
@pytest.mark.parametrize(("name", "job"), ENDED, ids=[f"{name}-{n}" for n, (name, _) in enumerate(ENDED)])
def test_a_run_that_others_saw_out_of_memory_is_not_told_to_fit(name, job):
    table, job = OUT_OF_MEMORY[name], dict(job)
    where = {key: table[key] for key in ("gpu", "stack", "sequence_length")}
    assert at_a_glance(plan_by_share(job.pop("model"), **where, **job).memory).verdict != "fits"
