"""Steps that a library's own code made on tensors without memory, and plans of the same jobs."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.survey.stacks.drawn_stack_jobs import StackJob
from tests.survey.stacks.judged_stack_jobs import planned
from tests.survey.stacks.stack_records import catalog_at


def records_of(name: str) -> Any:
    """Return a test for each record of a file beside the tests, named after the family of its model."""
    records = json.loads(Path(__file__).with_name(name).read_text())["records"]
    return pytest.mark.parametrize("record", records, ids=lambda record: record["job"]["model"]["model_type"])


def hold_traced(record: Mapping[str, Any], share: float) -> None:
    """Hold a plan to a record: 0.1 % at the peak, persistent bytes to the byte, and instants within a share."""
    plan = planned(StackJob.read(json.dumps(record["job"])), catalog_at(""))
    instants = dict(plan.instants)
    assert plan.requested_bytes == pytest.approx(record["peak_bytes"], rel=0.001)
    assert plan.persistent_bytes == record["persistent_bytes"]
    assert record["instants"].keys() & instants.keys()
    for name in record["instants"].keys() & instants.keys():
        assert instants[name] == pytest.approx(record["instants"][name], rel=share), name
