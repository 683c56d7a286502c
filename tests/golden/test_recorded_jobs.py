"""Thousands of plans, each as its peak and a digest of all its figures: a change of the formula that moves any of them is noticed.

The jobs are those of the stack records, and some of memplan's own loop that were drawn once by tests/survey and kept. That
the figures are right is held by the records and by traces; ``pytest tests/golden --update-golden`` rewrites the digests.
"""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

import pytest

from memplan.documents.escaping import json_text
from tests.golden.test_plans import figures, planned

RECORDS = Path(__file__).parents[1] / "stacks" / "records"
JOBS = Path(__file__).with_name("bundled_jobs.json")
DIGESTS = Path(__file__).with_name("digests.json")
FILES = {path.stem: path for path in (JOBS, *sorted(RECORDS.glob("*.json")))}
TOLD_EVERY = 3
"""Of so many jobs one has its events told too, which takes as long as the plan."""


def line_of(job: dict[str, object], number: int, catalog) -> str:
    """Return the requested peak of a job's plan in bytes and a digest of what else the plan says."""
    plan = planned(job, catalog)
    found = figures(plan, played=False, told=not number % TOLD_EVERY)
    return f"{plan.requested_bytes} {sha256(json.dumps(found).encode()).hexdigest()[:12]}"


@pytest.mark.parametrize("stem", FILES)
def test_plans_of_recorded_jobs_say_what_they_said(stem, catalog, request):
    jobs = [json.loads(record["job"]) for record in json.loads(FILES[stem].read_text(encoding="utf-8"))["records"]]
    lines = [line_of(job, number, catalog) for number, job in enumerate(jobs)]
    expected = json.loads(DIGESTS.read_text(encoding="utf-8"))
    if request.config.getoption("--update-golden"):
        expected = {name: expected.get(name) for name in FILES} | {stem: lines}
        DIGESTS.write_text(json_text(expected, indent=0), encoding="utf-8")
    assert lines == expected.get(stem)
