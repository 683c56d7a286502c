"""The formula beside what the libraries' own code did: stack records, replayed without the libraries."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

pytest.importorskip("torch")

from memplan.lab.stack_survey.drawn_stack_jobs import StackJob, planned
from memplan.lab.stack_survey.stack_records import read_records

FOLDER = Path(__file__).parent
FILES = sorted((FOLDER / "records").glob("*.json"))
RECORDS = [(path.stem, number, record) for path in FILES for number, record in enumerate(read_records(path)[1])]
PEAK_SHARE, WORST_SHARE, INSTANT_SHARE = 0.001, 0.01, 0.02

KNOWN_GAPS: dict[str, set[int]] = {"trl.preferences": {4, 14}}
"""Records, drawn at random and none left out, that the formula does not follow yet. One that it follows must leave the list."""

NEAR = {
    "axolotl": 0.96,
    "torchtitan": 0.95,
    "torchtune": 0.95,
    "litgpt": 1.0,
    "plain-loop": 1.0,
    "transformers": 1.0,
    "trl": 1.0,
    "trl.preferences": 0.92,
}
"""Share of a stack's records whose peak the formula has within 0.1 %, which may grow and not shrink."""


def follows(record, catalog) -> bool:
    """Whether the formula has a record's peak, what persists and every instant within the limits."""
    plan = planned(StackJob.read(record.job), catalog)
    instants = dict(plan.instants)
    return (
        abs(plan.requested_bytes - record.peak_bytes) <= WORST_SHARE * record.peak_bytes
        and plan.persistent_bytes == record.persistent_bytes
        and all(abs(instants.get(name, size) - size) <= INSTANT_SHARE * size for name, size in record.instants.items())
    )


@pytest.mark.parametrize(("stack", "number", "record"), RECORDS, ids=lambda value: str(value)[:12])
def test_the_formula_agrees_with_the_librarys_own_code_but_for_known_gaps(stack, number, record, catalog):
    assert StackJob.read(record.job).stack == stack.partition(".")[0]
    assert follows(record, catalog) == (number not in KNOWN_GAPS.get(stack, ()))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_formula_is_near_the_librarys_own_code_in_nearly_all_jobs(path, catalog):
    records = read_records(path)[1]
    pairs = [(planned(StackJob.read(record.job), catalog).requested_bytes, record.peak_bytes) for record in records]
    assert sum(abs(own - peak) <= PEAK_SHARE * peak for own, peak in pairs) >= NEAR[path.stem] * len(pairs)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_records_are_of_the_versions_that_the_environments_install(path):
    versions, records = read_records(path)
    groups = yaml.safe_load((FOLDER / "environments.yaml").read_text(encoding="utf-8"))[
        path.stem.partition(".")[0]
    ].values()
    pinned = dict(package.split("==") for group in groups for package in group)
    assert {name: number.split("+")[0] for name, number in versions.items()}.items() <= pinned.items()
    assert len({record.job for record in records}) == len(records) >= 40
    assert all(len(record.events) == 64 for record in records)


def test_a_record_of_other_bytes_would_be_noticed(catalog):
    _, _, record = RECORDS[0]
    data = json.loads(record.job)
    data["training"]["micro_batch_size"] += 1
    assert planned(StackJob.read(json.dumps(data)), catalog).requested_bytes != record.peak_bytes
