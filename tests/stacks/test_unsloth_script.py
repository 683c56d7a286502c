"""unsloth's own code, where it is installed: a script of it run whole, beside the formula."""

from importlib.util import find_spec

import pytest

from tests.jobs import shipped_catalog
from tests.survey.stacks.drawn_stack_jobs import drawn_stack_job
from tests.survey.stacks.judged_stack_jobs import planned, traced

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize("number", [1, 9, 13])
def test_the_formula_agrees_with_a_script_that_is_run(number):
    if find_spec("unsloth") is None:
        pytest.skip("unsloth is not installed")
    catalog = shipped_catalog()
    job = drawn_stack_job(2026, number, catalog, ("unsloth",))
    plan, trace = planned(job, catalog), traced(job, catalog)
    assert plan.requested_bytes == pytest.approx(trace.peak_bytes, rel=0.001)
    assert plan.persistent_bytes == trace.persistent_bytes
    instants = dict(plan.instants)
    assert instants["forward"] == pytest.approx(trace.instant_bytes["forward"], rel=0.002)
