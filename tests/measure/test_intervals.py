"""Measured device totals lie inside the interval of a plan whose reserve is simulated, and its verdicts are true."""

from pathlib import Path

import pytest

from memplan.measure.records.measurement_records import record_files
from tests.jobs import shipped_catalog
from tests.survey.intervals import judged, summary

RECORDS = Path(__file__).parents[1] / "records"
CATALOG = shipped_catalog()
MEDIAN_WIDTH = 0.056
"""1.4 % of it are the contexts measured on cards of that compute capability."""
MEASURED_BEFORE = {"cuda-mixtral-8x7b-v0.1-2layers-8192tokens-bf16-adamw-b2-s512.json"}
"""Runs of a loop that scaled experts in bf16, as the bundled one has not done since: 0.07 % above the interval, to be measured again."""


def rows(folder, step):
    return list(judged(record_files(RECORDS / folder)[::step], CATALOG))


@pytest.mark.parametrize(("folder", "step"), [("cuda", 9), ("boundary", 6)])
def test_some_records_lie_inside_and_their_verdicts_are_true(folder, step):
    some = rows(folder, step)
    assert [row.name for row in some if not (row.contained and row.true_verdict)] == []


@pytest.mark.slow
def test_every_record_lies_inside_a_narrow_interval():
    measured = rows("cuda", 1)
    assert len(measured) == 94
    assert {row.name for row in measured if not row.contained} <= MEASURED_BEFORE
    widths = sorted(row.width for row in measured)
    assert widths[len(widths) // 2] <= MEDIAN_WIDTH
    alone = sorted(row.allocator_width for row in measured)
    assert alone[len(alone) // 2] <= 0.05


@pytest.mark.slow
def test_no_verdict_on_a_capped_run_is_false():
    capped = rows("boundary", 1)
    assert len(capped) == 46
    assert [row.name for row in capped if not (row.contained and row.true_verdict)] == []
    assert sum(row.measured_bytes is None for row in capped) == 22


def test_the_summary_counts():
    lines = list(summary(rows("boundary", 12)))
    assert "runs measured" in lines[0]
    assert "median width" in lines[1]
    assert len(lines) == 3
