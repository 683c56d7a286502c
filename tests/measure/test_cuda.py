"""On a GPU: the measurement agrees, and where memory ends is where the plan says."""

import pytest
import torch

from memplan.measure.process import measure
from memplan.measure.records.comparison_rows import rows_of
from memplan.measure.records.measurement_plans import cuda_tasks, task_label
from memplan.measure.records.prediction import predict

from .boundary import boundary_tasks

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_step_takes_what_is_predicted(catalog):
    task = next(iter(cuda_tasks(catalog)))
    found = measure(task, lambda _: None)
    assert found.status == "measured", found.reason
    rows = rows_of(task, predict(task, found), found)
    assert all(row.agrees for row in rows), [row for row in rows if not row.agrees]


def test_what_fits_runs_and_what_does_not_runs_out_of_memory(catalog):
    """A NO that runs all the same is one that only the allocator's reserve decides."""
    properties = torch.cuda.get_device_properties(0)
    capability = f"{properties.major}.{properties.minor}"
    wrong = []
    for task, runs in boundary_tasks(catalog, capability, properties.total_memory):
        found = measure(task, lambda _: None)
        expected = "measured" if runs else "out of memory"
        if found.status != expected and (runs or not only_the_reserve_decides(task, found)):
            wrong.append((task_label(task), found.status, found.reason))
    assert not wrong


def only_the_reserve_decides(task, found):
    least = found.totals["allocated"] + found.counters["context_bytes"]
    return found.status == "measured" and least <= task.capacity_bytes < 1.05 * least
