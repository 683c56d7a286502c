"""Thousands of plans, each as its peak and a digest of all its figures: a change of the formula that moves any of them is noticed.

The jobs are those of the stack records, some of memplan's own loop that were drawn once by tests/survey and kept, and further
ones that reach what these do not: refusals, cards of other vendors, what no record has. The last line of each file has digests
of how its plans come to their figures, moment by moment and in words. Of jobs that were drawn at random, and of one stack record
of each library, each fourth is planned in the README's test command, and the others with the tests of many jobs: those of stack
records in tests/stacks, which hold the same plans against what libraries did. That figures are right is held by the records and by
traces; ``pytest tests/golden -m "not slow" --update-golden`` and ``pytest tests/stacks/test_stack_records.py -m thorough
--update-golden`` rewrite the digests.
"""

import json
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

from memplan.documents.escaping import json_text
from memplan.errors import MemplanError
from memplan.plan.memory_plan import MemoryPlan
from memplan.plan.model_notes import notes_on_models
from memplan.plan.reserve.simulation import shares_reason
from tests.golden.test_plans import figures, planned

RECORDS = Path(__file__).parents[1] / "stacks" / "records"
OWN = [Path(__file__).with_name(f"{name}_jobs.json") for name in ("bundled", "further")]
DIGESTS = Path(__file__).with_name("digests.json")
FILES = {path.stem: path for path in (*OWN, *sorted(RECORDS.glob("*.json")))}
CASES = [
    pytest.param(stem, quarter, marks=pytest.mark.thorough if quarter and stem == "bundled_jobs" else ())
    for stem in FILES
    if "." not in stem
    for quarter in (range(4) if FILES[stem] in OWN else [0])
]
TOLD_EVERY = 3
"""Of so many jobs one has its events told too, which takes as long as the plan."""


def digest(value: object) -> str:
    """Return what tells a value from others."""
    return sha256(json.dumps(value).encode()).hexdigest()[:12]


def line_of(plan: MemoryPlan, number: int) -> str:
    """Return the requested peak of a plan in bytes and a digest of what else it says in figures."""
    return f"{plan.requested_bytes} {digest(figures(plan, played=False, told=not number % TOLD_EVERY))}"


def reasons_of(plan: MemoryPlan) -> tuple[object, ...]:
    """Return what a plan says in words, how its figures are made, and what every moment takes, the highest or not."""
    words = *plan.assumptions, *plan.not_modelled, *notes_on_models([plan]), shares_reason(plan)
    made = map(str, (plan.bytes_per_parameter, plan.components, plan.instant_forms, plan.saved_tensors))
    return *words, *made, [(one.name, one.form.total_bytes(plan.values)) for one in plan.forms.candidates]


@pytest.mark.parametrize(("stem", "quarter"), CASES)
def test_plans_of_recorded_jobs_say_what_they_said(stem, quarter, catalog, request):
    jobs = recorded_jobs(FILES[stem])
    hold(stem, quarter, jobs, lambda number: planned(json.loads(jobs[number]), catalog), request)


def recorded_jobs(path: Path) -> list[str]:
    return [record["job"] for record in json.loads(path.read_text(encoding="utf-8"))["records"]]


def hold(stem: str, quarter: int, jobs: list[str], plan_of: Callable[[int], MemoryPlan], request) -> None:
    """Hold each fourth plan of a file's jobs against its line, and what they say against their digest."""
    expected, updates = json.loads(DIGESTS.read_text(encoding="utf-8")), request.config.getoption("--update-golden")
    *lines, last = expected.get(stem, [""])
    lines, digests = lines[: len(jobs)] + [""] * (len(jobs) - len(lines)), (last.split() + [""] * 4)[:4]
    reasons = []
    for number in range(quarter, len(jobs), 4):
        try:
            plan = plan_of(number)
        except MemplanError as error:
            lines[number] = f"refused: {error}"
        else:
            lines[number] = line_of(plan, number)
            reasons.append(reasons_of(plan))
        assert updates or lines[number] == expected[stem][number], jobs[number]  # at once: the others take long
    digests[quarter] = digest(reasons)
    lines.append(" ".join(digests))
    if updates:
        expected = {name: expected.get(name, [""]) for name in FILES} | {stem: lines}
        DIGESTS.write_text(json_text(expected, indent=0), encoding="utf-8")
    assert lines == expected.get(stem)
