"""Instants of jobs over shards that were drawn, beside what the libraries' own code did: TRL 1.16.0, Trainer 5.23.0, torchtitan 0.3.0, accelerate 1.15.0, DeepSpeed 0.19.8."""

import json
from pathlib import Path

import pytest

from tests.survey.stacks.drawn_stack_jobs import StackJob
from tests.survey.stacks.judged_stack_jobs import planned
from tests.survey.stacks.stack_records import catalog_at

CASES = json.loads((Path(__file__).parent / "sharded_instants.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["case"].replace(" ", "-"))
def test_an_instant_that_was_traced_is_planned_within_a_thousandth(case):
    instants = dict(planned(StackJob.read(json.dumps(case["job"])), catalog_at("5.23.0")).instants)
    for name, size in case["instants"].items():
        assert abs(instants[name] - size) <= size / 1000, name
