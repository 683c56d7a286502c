"""Peaks that others measured and published, against what is planned for the same settings: nothing is fitted to them."""

import json
from pathlib import Path

import pytest

import memplan
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
    plan = memplan.plan(job.pop("model"), set=run.get("set", {}), **job)
    if "reserved" in run:
        assert not plan.memory.reserve_by_share
        assert plan.memory.reserved_bytes == pytest.approx(run["reserved"], rel=run["within"])
    else:
        planned = plan.memory.allocated_bytes + run.get("besides", {"bytes": 0})["bytes"]
        assert planned == pytest.approx(run["printed"], rel=run["within"])
    assert plan.verdict != "no"


@pytest.mark.thorough
@pytest.mark.one_in(2)
@pytest.mark.parametrize(("name", "job"), ENDED, ids=[f"{name}-{n}" for n, (name, _) in enumerate(ENDED)])
def test_a_run_that_others_saw_out_of_memory_is_not_told_to_fit(name, job):
    table, job = OUT_OF_MEMORY[name], dict(job)
    where = {key: table[key] for key in ("gpu", "stack", "sequence_length")}
    assert memplan.plan(job.pop("model"), **where, **job).verdict != "fits"
