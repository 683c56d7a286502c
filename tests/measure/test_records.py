"""What was measured once stays true: every record against today's formula, trace and simulator."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import memplan.step.instants
from memplan.errors import InvalidFileError
from memplan.measure.records.comparison_rows import STATES
from memplan.measure.records.measurement_records import read_data, read_record, record_files, replay_records, replayed
from memplan.plan.jobs import forms_by_regime
from memplan.step.tapes.linear_forms import ZERO

RECORDS = Path(__file__).parent.parent / "records"
FILES = record_files(RECORDS)
FAST = {"fp32-adamw", "bf16-adamw", "mixed-adamw", "muon", "tier1", "tier3", "lora"}
CUDA_SAMPLE = RECORDS / "cuda" / "cuda-smollm2-135m-bf16-adamw-b2-s1024.json"
SAMPLE = RECORDS / "cpu" / "cpu-llama-3.2-1b-small-fp32-adamw-b2-s128.json"


WHOLE = {
    "cuda-smollm2-135m-bf16-adamw-b2-s1024",
    "cuda-smollm2-135m-muon-b2-s1024",
    "cuda-smollm2-135m-bf16-adamw-b8-s1024-c8589934592",
}
"""Models in all their layers that are replayed in the default run: one with each kind of optimizer, and at a boundary."""


SMALL_CUDA_SAMPLE = RECORDS / "cuda" / "cuda-gpt2-2layers-8192tokens-bf16-adamw-b2-s512.json"


def cases():
    """Every record; two of three, and those that take seconds, are slow here: all are part of ``memplan validate --replay`` in CI."""
    for number, path in enumerate(FILES):
        task = read_data(path)["task"]
        small = task["device_kind"] == "cpu" or (task["scale"]["layers"] and "smollm3" not in path.stem)
        fast = path.stem in WHOLE or (task["config"] in FAST and small and number % 3 == 0)
        yield pytest.param(path, id=path.stem, marks=() if fast else pytest.mark.slow)


@pytest.mark.parametrize("path", list(cases()))
def test_every_figure_of_a_record_is_within_its_tolerance(path, catalog):
    found = replayed(read_record(path, catalog))
    assert found.agrees, [row for row in found.rows if not row.agrees]
    states = [row for row in found.rows if row.component in STATES]
    assert states or found.record.measurement.status == "out of memory"
    assert all(row.difference_bytes == 0 for row in states)


@pytest.mark.slow
def test_records_that_are_replayed_side_by_side_compare_as_alone_and_in_order(catalog, monkeypatch):
    monkeypatch.setattr("memplan.measure.records.measurement_records.RECORDS_PER_PROCESS", 1)
    monkeypatch.setattr("memplan.measure.records.measurement_records._cores", lambda: 2)
    files, said = [SAMPLE, *(RECORDS / "boundary").glob("*smollm2-135m*-b[68]-*.json"), CUDA_SAMPLE], []
    together = list(replay_records(files, catalog, said.append))
    assert said == [f"replaying {path}" for path in files]
    assert together == [replayed(read_record(path, catalog)) for path in files]


def test_every_shipped_config_has_a_record(catalog):
    recorded = {read_data(path)["task"]["config"] for path in FILES}
    assert recorded >= set(catalog.configs.entries)


@pytest.mark.parametrize(
    "place", ["components.weights", "components.gradients", "components.optimizer_states", "totals.requested"]
)
def test_a_record_that_is_changed_by_a_percent_disagrees(place, catalog):
    record = read_record(SAMPLE, catalog)
    section, name = place.split(".")
    figures = dict(getattr(record.measurement, section))
    figures[name] += figures[name] // 100
    changed = replace(record, measurement=replace(record.measurement, **{section: figures}))
    assert replayed(record).agrees
    assert not replayed(changed).agrees


@pytest.mark.parametrize(
    ("sample", "place"),
    [
        (SAMPLE, "components"),
        (SAMPLE, "totals"),
        (SAMPLE, "instants"),
        (SAMPLE, "instants.optimizer step"),
        (SAMPLE, "instants.layer 1 backward"),
        (SAMPLE, "components.optimizer_states"),
        (SAMPLE, "components.master_weights"),
        (CUDA_SAMPLE, "totals.reserved"),
        (CUDA_SAMPLE, "counters.history"),
        (CUDA_SAMPLE, "counters.context_bytes"),
    ],
    ids=lambda value: value.parent.name if isinstance(value, Path) else value,
)
def test_a_record_that_lacks_what_is_compared_is_refused_and_the_figure_is_named(refused, tmp_path, sample, place):
    data = json.loads(sample.read_text())
    section, _, name = place.partition(".")
    measured = data["measurement"]
    measured[section] = {key: size for key, size in measured[section].items() if name and key != name}
    path = tmp_path / "record.json"
    path.write_text(json.dumps(data))
    assert (name or section) in refused("validate", "--replay", path, "--quiet")


def test_a_formula_without_one_of_its_terms_disagrees(catalog, monkeypatch):
    record = read_record(SAMPLE, catalog)
    compile_step = memplan.step.instants.compile_step

    def without_buffers(*given):
        forms = compile_step(*given)
        return replace(forms, buffers=ZERO)

    monkeypatch.setattr(forms_by_regime, "compile_step", without_buffers)
    wrong = [row.component for row in replayed(record).rows if not row.agrees]
    assert "buffers" in wrong


@pytest.mark.parametrize("text", ["", "[]", "{", '{"schema": "memplan/record/1"}', '{"schema": "memplan/plan/1"}'])
def test_what_is_no_record_is_refused(text, tmp_path, catalog):
    path = tmp_path / "record.json"
    path.write_text(text)
    with pytest.raises(InvalidFileError, match="record"):
        read_record(path, catalog)


@pytest.mark.parametrize(
    ("keys", "value", "said"),
    [
        (("task", "steps"), "nan", "task: steps: expected an integer, got 'nan'"),
        (("task", "steps"), 0, "task: steps: expected a whole number from 1 to 100"),
        (("task", "scale", "hidden"), 100, "hidden: expected 0 or a multiple of 16"),
        (("task", "scale", "layers"), -1, "layers: expected a whole number from 0"),
        (("task", "scale", "Layers"), 1, "task: scale.Layers: unknown key; did you mean 'layers'?"),
        (("task", "device_kind"), "tpu", "device_kind: expected cpu or cuda, got 'tpu'"),
        (("task", "capacity_bytes"), 5, "capacity_bytes: expected whole bytes, and 0 on a CPU"),
        (("task", "training", "Kernels"), {}, "training.Kernels: unknown key; did you mean 'kernels'?"),
        (("task", "training", "micro_batch_size"), 10**30, "micro_batch_size: expected a"),
        (("measurement", "totals", "device"), 5, "totals: 'device' is not measured on a cpu"),
        (("measurement", "counters", "total_bytes"), "x", "counters.total_bytes: expected whole bytes, got 'x'"),
        (("measurement", "counters", "compute_capability"), "9", "compute_capability: expected a version"),
        (("measurement", "counters", "history"), {"a": 1}, "counters.history: expected simulated_reserved"),
        (("measurement", "status"), "fine", "status: expected"),
        (("measurement", "components"), None, "components: expected"),
    ],
)
def test_a_record_with_a_figure_that_no_run_has_is_refused(tmp_path, catalog, keys, value, said):
    data = json.loads(SAMPLE.read_text())
    inner = data
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    path = tmp_path / "record.json"
    path.write_text(json.dumps(data))
    with pytest.raises(InvalidFileError) as caught:
        read_record(path, catalog)
    assert said in str(caught.value)


def test_a_record_with_a_negative_size_is_refused(tmp_path, catalog):
    data = json.loads(SAMPLE.read_text())
    data["measurement"]["totals"]["requested"] = -1
    path = tmp_path / "record.json"
    path.write_text(json.dumps(data))
    with pytest.raises(InvalidFileError, match="whole bytes"):
        read_record(path, catalog)


def test_a_driver_that_was_not_recorded_is_shown_as_unknown(cli, tmp_path):
    data = json.loads(SMALL_CUDA_SAMPLE.read_text())
    assert data["measurement"]["counters"].pop("driver_cuda_version") == 0
    later = tmp_path / "later.json"
    later.write_text(json.dumps(data))
    for path, version in ((SMALL_CUDA_SAMPLE, "unknown"), (later, "580.159.03")):
        if version != "unknown":
            data["measurement"]["counters"]["driver_version"] = version
            later.write_text(json.dumps(data))
        assert f"torch 2.11.0+cu130, driver {version} against" in " ".join(
            cli("validate", "--replay", path).out.split()
        )
    cpu = cli("validate", "--replay", SAMPLE, "--json", "-q").data["records"][0]
    assert (cpu["device"], cpu["driver_version"]) == ("cpu", "")
