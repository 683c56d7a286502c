"""Peaks that others measured and published, against what is planned for the same settings: nothing is fitted to them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

import memplan

RUNS = yaml.safe_load((Path(__file__).parent / "reported_runs.yaml").read_text())


@pytest.mark.parametrize("name", RUNS)
def test_a_peak_that_others_measured_is_the_one_that_is_planned(name, tmp_path):
    run = RUNS[name]
    job = dict(run["job"])
    if "keys" in run:
        (tmp_path / "config.json").write_text(json.dumps(run["keys"]))
        job["model"] = str(tmp_path)
    plan = memplan.plan(job.pop("model"), set=run.get("set", {}), **job)
    planned = plan.memory.allocated_bytes + run.get("besides", {"bytes": 0})["bytes"]
    assert planned == pytest.approx(run["printed"], rel=run["within"])
