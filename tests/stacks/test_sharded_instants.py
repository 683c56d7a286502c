"""Instants of jobs over shards that were drawn, beside what the libraries' own code did: TRL 1.16.0, Trainer 5.23.0, torchtitan 0.3.0, accelerate 1.15.0, DeepSpeed 0.19.8."""

import json
from pathlib import Path

import pytest

from memplan.allocator.streams.stream_replay import Stream
from memplan.plan.reserve.simulation import events_of
from memplan.step.events.step_events import STEPS
from tests.survey.drawn_jobs import RESERVE_SHARE, as_made
from tests.survey.stacks.drawn_stack_jobs import StackJob
from tests.survey.stacks.judged_stack_jobs import planned
from tests.survey.stacks.stack_records import catalog_at

CASES = json.loads((Path(__file__).parent / "sharded_instants.json").read_text(encoding="utf-8"))
RESERVED = [case for case in CASES if "reserved" in case]


def named(case):
    return case["case"].replace(" ", "-")


def plan(case):
    return planned(StackJob.read(json.dumps(case["job"])), catalog_at(case.get("at", "5.23.0")))


@pytest.mark.parametrize("case", CASES, ids=named)
def test_an_instant_that_was_traced_is_planned_within_a_thousandth(case):
    instants = dict(plan(case).instants)
    for name, size in case["instants"].items():
        assert abs(instants[name] - size) <= size / 1000, name


@pytest.mark.parametrize("case", RESERVED, ids=named)
def test_a_reserve_that_was_traced_is_planned_within_three_per_cent(case):
    events = events_of(as_made(plan(case)), STEPS)
    own = Stream(events.sizes, events.codes, streams=events.stream.streams).peaks().reserved_bytes
    assert abs(own - case["reserved"]) <= RESERVE_SHARE * case["reserved"]
