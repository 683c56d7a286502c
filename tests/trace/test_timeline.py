"""The timeline as a picture and as data."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from memplan.trace.recording.timeline import COLOURS, MAXIMUM_COLUMNS, timeline_json, timeline_svg
from memplan.trace.recording.trace_result import COMPONENTS
from memplan.trace.tracer import trace_training

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def trace(make_model, make_setup):
    return trace_training(make_model("small"), make_setup(sequence_length=512))


def test_every_component_has_a_colour_of_its_own():
    assert set(COLOURS) == set(COMPONENTS)
    assert len(set(COLOURS.values())) == len(COMPONENTS)


def test_the_picture_is_valid_and_says_what_it_shows(trace):
    root = ElementTree.fromstring(timeline_svg(trace, "a < b & c"))
    assert root.find(f"{SVG}title").text == "a < b & c"
    assert trace.peak_instant in root.find(f"{SVG}desc").text
    areas = [polygon.find(f"{SVG}title").text for polygon in root.iter(f"{SVG}polygon")]
    assert areas == [name for name in COMPONENTS if name in areas]
    assert "activations" in areas
    assert len(list(root.iter(f"{SVG}circle"))) == 1


def test_the_picture_has_a_bounded_size(trace):
    assert len(trace.events) - trace.steady_from > MAXIMUM_COLUMNS
    assert len(timeline_svg(trace)) < 200_000


def test_the_data_add_up_to_the_peak(trace):
    data = json.loads(json.dumps(timeline_json(trace)))
    totals = [sum(event["components"].values()) for event in data["events"]]
    assert max(totals) == data["peak"]["requested_bytes"] == trace.peak_bytes
    assert totals[data["peak"]["event"]] == trace.peak_bytes
    assert data["largest_at_peak"][0]["bytes"] >= data["largest_at_peak"][-1]["bytes"]
    assert {item["name"]: item["requested_bytes"] for item in data["instants"]} == trace.instant_bytes
