"""The timeline as a picture and as data."""

import json

import pytest

import memplan
from memplan.library.answers.trace_answer import traced_timeline
from memplan.trace.recording.trace_result import timeline_json
from memplan.trace.tracer import trace_training


@pytest.fixture(scope="module")
def trace(make_model, make_setup):
    return trace_training(make_model("small"), make_setup(sequence_length=512))


def test_the_picture_is_that_of_the_formula(make_model, make_setup):
    pytest.importorskip("matplotlib")
    shapes = memplan.Shapes(layers=2, hidden=64, heads=2, vocab=256)
    job = {"config": "fp32-adamw", "sequence_length": 16, "gpu": "rtx4090"}
    traced, plan = memplan.trace(shapes, **job), memplan.plan(shapes, **job)
    timeline = traced_timeline(traced.step.trace)
    libraries = timeline.components.index("library_workspaces")
    peaks = [t.columns[t.peak].bytes - t.columns[t.peak].sizes[libraries] for t in (timeline, plan.timeline)]
    assert timeline.components == plan.timeline.components
    assert peaks[0] == peaks[1] == traced.requested_bytes
    assert traced.timeline().lstrip().startswith("<?xml")


def test_the_data_add_up_to_the_peak(trace):
    data = json.loads(json.dumps(timeline_json(trace)))
    totals = [sum(event["components"].values()) for event in data["events"]]
    assert max(totals) == data["peak"]["requested_bytes"] == trace.peak_bytes
    assert totals[data["peak"]["event"]] == trace.peak_bytes
    assert data["largest_at_peak"][0]["bytes"] >= data["largest_at_peak"][-1]["bytes"]
    assert {item["name"]: item["requested_bytes"] for item in data["instants"]} == trace.instant_bytes
