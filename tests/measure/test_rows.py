"""Which figure is held against which, and how far they may be apart; no device is needed for that."""

from dataclasses import replace

import pytest

from memplan.catalog.training_config import Offload
from memplan.measure.measured import Measurement
from memplan.measure.records.comparison_rows import CUDA, TOTALS, rows_of
from memplan.measure.records.measurement_plans import cpu_task
from memplan.measure.records.prediction import Prediction, predict
from memplan.measure.task import Task
from memplan.units import GIB, MIB

COUNTERS = {"compute_capability": "9.0", "total_bytes": 80 * GIB, "context_bytes": 500 * MIB}


@pytest.fixture(scope="module")
def task(catalog) -> Task:
    return replace(cpu_task("llama-3.2-1b", "tier1", catalog), device="cuda")


@pytest.fixture(scope="module")
def prediction(task) -> Prediction:
    return predict(task, Measurement("measured", counters=COUNTERS))


def as_traced(prediction: Prediction, **changes: int) -> Measurement:
    """A run that takes just what the trace says, but for what is given."""
    return Measurement(
        "measured",
        components=prediction.components,
        instants=prediction.traced_instants,
        totals={**{name: prediction.traced_totals[name] for name in TOTALS}, **changes},
        counters=COUNTERS,
    )


def test_a_run_that_takes_what_the_trace_says_agrees_in_every_row(task, prediction):
    rows = rows_of(task, prediction, as_traced(prediction))
    assert all(row.agrees for row in rows)
    assert {"weights", "gradients", "optimizer_states", *TOTALS} <= {row.component for row in rows}


@pytest.mark.parametrize("total", TOTALS)
def test_a_total_beyond_its_tolerance_disagrees_and_names_itself(total, task, prediction):
    traced = prediction.traced_totals[total]
    within = traced + CUDA[total].of(traced)
    rows = rows_of(task, prediction, as_traced(prediction, **{total: within}))
    assert all(row.agrees for row in rows)
    rows = rows_of(task, prediction, as_traced(prediction, **{total: within + 1}))
    assert [row.component for row in rows if not row.agrees] == [total]


def test_requested_bytes_on_cuda_have_the_workspaces_of_two_handles(task, prediction):
    assert prediction.traced_totals["requested"] == max(prediction.traced_instants.values())
    assert prediction.totals["requested"] == max(prediction.instants.values())


def test_a_history_tells_the_simulators_error_from_the_traces(task, prediction):
    history = {"simulated_reserved_peak_bytes": 100 * MIB, "measured_reserved_peak_bytes": 110 * MIB}
    found = replace(as_traced(prediction), counters={**COUNTERS, "history": history})
    wrong = [row for row in rows_of(task, prediction, found) if not row.agrees]
    assert [(row.component, row.difference_bytes) for row in wrong] == [("reserved, simulator alone", 10 * MIB)]


@pytest.mark.parametrize(("share", "agrees"), [(2, False), (0.5, True)], ids=["a false FITS", "predicted"])
def test_out_of_memory_agrees_only_where_it_was_predicted(share, agrees, task, prediction):
    capped = replace(task, capacity_bytes=int(prediction.totals["upper"] * share))
    lacking = replace(prediction, survives=False)
    rows = {row.component: row.agrees for row in rows_of(capped, lacking, Measurement("out of memory", "no memory"))}
    assert rows == {"boundary": agrees, "boundary, simulator": True}


@pytest.mark.parametrize("status", ["measured", "out of memory"])
def test_the_simulated_allocator_has_to_survive_where_the_run_did_and_only_there(status, task, prediction):
    capped = replace(task, capacity_bytes=MIB)
    for survives in (True, False):
        found = replace(as_traced(prediction), status=status)
        rows = {row.component: row for row in rows_of(capped, replace(prediction, survives=survives), found)}
        assert rows["boundary, simulator"].agrees == (survives == (status == "measured"))


def test_states_in_host_memory_are_a_row_and_the_cpus_total_has_them(catalog):
    here, there = (
        cpu_task("llama-3.2-1b", "tier1", catalog, offload=Offload(optimizer_states=place)) for place in ("none", "cpu")
    )
    plain, prediction = (predict(task, Measurement("measured")) for task in (here, there))
    host = prediction.components["host"]
    assert prediction.components["optimizer_states"] == 0
    assert host == prediction.traced_components["host"] > plain.components["optimizer_states"]
    busy = "loss backward"
    assert prediction.instants[busy] - plain.instants[busy] == host - plain.components["optimizer_states"]
    measured = Measurement("measured", components=prediction.components, totals=prediction.traced_totals)
    rows = {row.component: row for row in rows_of(there, prediction, measured)}
    assert rows["host"].agrees
    assert rows["optimizer_states"].measured_bytes == 0
    assert "cannot tell them from the device's" in rows["requested"].reason


def test_each_layer_that_is_recomputed_keeps_the_cpus_random_state(catalog):
    torch = pytest.importorskip("torch")
    kept = 2 * torch.get_rng_state().numel()
    for checkpointing, agrees in (("full", True), ("none", False)):
        task = cpu_task("llama-3.2-1b", "tier1", catalog, activation_checkpointing=checkpointing)
        prediction = predict(task, Measurement("measured"))
        totals = {**prediction.traced_totals, "requested": prediction.traced_totals["requested"] + kept}
        rows = rows_of(task, prediction, Measurement("measured", components=prediction.components, totals=totals))
        assert {row.component: row.agrees for row in rows}["requested"] is agrees
