"""The experiments on matrices: the notes' tables within their spread, INT4 that diverges, records that can be read."""

import json
import re

import pytest
import torch

from memplan.catalog.catalog import data_directory
from memplan.errors import UnitError
from memplan.lab.experiment_record import record as record_of
from memplan.lab.matrices import orthogonality, precision, variance
from memplan.lab.matrices.matrix_draws import DTYPES, errors, gaussian, iterated, normalised
from memplan.muon.orthogonalisation.newton_schulz import newton_schulz_reference
from memplan.muon.orthogonalisation.schedules import SCHEDULES, resolved_schedule
from memplan.report.document import Table
from memplan.report.experiments import (
    read_record,
    record_document,
    record_text,
    reporter_of,
    row_of,
)
from memplan.report.figures import save_figure
from memplan.report.json_schemas import schema_of
from tests.jobs import follow_schema

pytest.importorskip("matplotlib")

FOLDER = data_directory() / "configs" / "evidence"
NAMES = ("orthogonality", "precision", "variance")
named = pytest.mark.parametrize("name", NAMES)

# The notes, "Orthogonality Error Comparison": Frobenius error at 512 x 512.
PRINTED = {
    "cubic": {1: 0.996, 2: 0.990, 3: 0.978, 4: 0.953, 5: 0.904, 7: 0.706, 10: 0.397},
    "you-jiacheng": {1: 0.968, 2: 0.695, 3: 0.570, 4: 0.276, 5: 0.145, 7: 0.054, 10: 0.035},
}
HALF_DIGIT = 0.0005


def shipped(name):
    return read_record(name, FOLDER)


def quiet(done, note):
    pass


@pytest.mark.parametrize(
    ("schedule", "iterations", "printed"),
    [(name, count, value) for name, values in PRINTED.items() for count, value in values.items()],
)
def test_the_printed_orthogonality_table_lies_within_the_spread_of_the_record(schedule, iterations, printed):
    rows = shipped("orthogonality")["rows"]
    row = row_of(rows, schedule=schedule, iterations=iterations, rows=512, columns=512, dtype="bf16")
    assert row["frobenius"]["low"] - HALF_DIGIT <= printed <= row["frobenius"]["high"] + HALF_DIGIT
    assert len(row["frobenius"]["values"]) >= 20


def test_the_printed_error_of_qr_is_its_rounding_to_bf16():
    row = row_of(shipped("orthogonality")["rows"], schedule="qr", rows=512, columns=512)
    assert round(row["frobenius"]["mean"], 3) == 0.002


def test_the_printed_variance_table_lies_within_the_spread_of_the_record():
    rows = {row["method"]: row for row in shipped("variance")["rows"]}
    errors_printed = {"raw": 179.4, "cubic": 0.904, "you-jiacheng": 0.145, "qr": 0.002}
    for method, printed in errors_printed.items():
        assert rows[method]["error"]["mean"] == pytest.approx(printed, rel=0.2 if method == "qr" else 0.02)
    for method, printed in {"raw": 0.25, "cubic": 0.0002, "you-jiacheng": 0.0019, "qr": 0.0020}.items():
        assert rows[method]["element_variance"]["mean"] == pytest.approx(printed, rel=0.03)
    for method, printed in {"raw": 0.00055, "cubic": 0.000013, "you-jiacheng": 0.000007, "qr": 0.0}.items():
        spread = rows[method]["norm_dispersion"]
        assert 0.8 * spread["low"] - 1e-9 <= printed <= 1.2 * spread["high"] + 1e-9 or printed == 0.0


def test_the_record_of_precisions_has_int4_diverge_where_the_notes_saw_it():
    rows = shipped("precision")["rows"]
    at = {"precision": "int4", "products": "input", "rows": 1024}
    assert len(row_of(rows, iterations=5, **at)["largest_element"]["values"]) >= 10
    assert row_of(rows, iterations=4, **at)["largest_element"]["high"] < 1
    assert row_of(rows, iterations=5, **at)["largest_element"]["low"] > 10


def test_the_record_of_precisions_has_the_printed_errors_at_4096():
    rows = shipped("precision")["rows"]
    for name, printed in {"fp32": 0.259, "int8": 0.257, "int8-native": 0.257, "bf16": 0.285, "int4": 0.102}.items():
        row = row_of(rows, precision=name, products="input", rows=4096, iterations=5)
        first = row["largest_element"]["values"][0]
        assert first == pytest.approx(printed, abs=0.001 if name in ("fp32", "int8", "int8-native") else 0.01)
    int4, fp32 = (row_of(rows, precision=name, products="input", rows=4096, iterations=5) for name in ("int4", "fp32"))
    assert int4["largest_element"]["high"] < fp32["largest_element"]["low"]
    assert int4["frobenius"]["low"] > fp32["frobenius"]["high"]


@named
def test_records_follow_their_schema_and_have_findings_and_a_picture(name, tmp_path):
    record = shipped(name)
    follow_schema(record, schema_of("experiment"))
    assert record["experiment"] == name
    assert f"configs/evidence/lab-{name}.json" in record["command"]
    text = (FOLDER / f"lab-{name}.json").read_text(encoding="utf-8")
    assert not re.search(r"(/work|/tmp|/home|/root)/", text)
    assert text == record_text(record)
    first, second = tmp_path / "a.svg", tmp_path / "b.svg"
    for path in (first, second):
        save_figure(reporter_of(record).figure(record), path)
    assert first.read_bytes() == second.read_bytes()
    assert first.stat().st_size < 150_000
    assert (FOLDER / f"lab-{name}.svg").stat().st_size < 150_000
    assert all(not isinstance(block, Table) or block.rows for block in record_document(record).blocks)


def test_findings_follow_from_the_rows():
    records = {name: shipped(name) for name in NAMES}
    rows = {name: record["rows"] for name, record in records.items()}
    assert records["orthogonality"]["findings"] == orthogonality.findings(rows["orthogonality"], "frobenius")
    computed = records["precision"]["computed"]
    assert records["precision"]["findings"] == precision.findings(rows["precision"], computed)
    assert records["variance"]["findings"] == variance.findings(rows["variance"])


@pytest.mark.parametrize("name", ["precision", "precision-h200"])
def test_the_table_of_precisions_has_the_speeds_that_the_findings_say(name):
    record = shipped(name)
    table = {(row[0], row[1], row[2]): row[-1] for row in reporter_of(record).blocks(record)[0].rows}
    said = [text for text in record["findings"] if text.startswith("Speed against fp32")]
    compared = 0
    for sentence in said:
        width = re.search(r"at (\d+)x", sentence)[1]
        for precision_name, speed in re.findall(r"(bf16|int8-native) ([\d.]+x)", sentence):
            assert table[width, precision_name, "input"] == speed
            compared += 1
    assert compared == 4
    assert table["1024", "fp32", "input"] == "1x"


def test_the_first_run_of_a_kernel_is_not_timed(monkeypatch):
    """Here the first run at each size and precision takes a minute, as where kernels are loaded."""
    ran, now = set(), [0.0]

    def slow_at_first(precision_name, which):
        def step(x, coefficients):
            key = (precision_name, which, tuple(x.shape))
            now[0] += 1.0 if key in ran else 60.0
            ran.add(key)
            return iterated(x, coefficients)

        return step

    monkeypatch.setattr(precision, "step_of", slow_at_first)
    monkeypatch.setattr(precision, "clock", lambda device: now[0])
    outcome = precision.run((0, 1), quiet, (32, 48), ("bf16", "fp16"), iterations=3)
    assert {row["seconds"]["high"] for row in outcome.rows if row["iterations"] == 3} == {3.0}


def test_a_cubic_gives_the_printed_errors_for_any_matrix():
    x = normalised(gaussian(512, 512, seed=7), torch.bfloat16)
    values = []
    for coefficients in resolved_schedule("cubic", 5):
        x = iterated(x, coefficients)
        values.append(errors(x)[0])
    assert values == pytest.approx([0.996, 0.990, 0.978, 0.953, 0.904], abs=0.0008)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("shape", [(48, 64), (64, 48)])
def test_the_experiment_iterates_as_the_optimizer_does(schedule, shape):
    matrix = gaussian(*shape, seed=1)
    x = normalised(matrix, torch.bfloat16)
    for coefficients in resolved_schedule(schedule, 5):
        x = iterated(x, coefficients)
    judge = newton_schulz_reference(matrix, resolved_schedule(schedule, 5))
    assert torch.equal(x if shape[0] < shape[1] else x.mT, judge)


def test_both_errors_are_those_of_the_rows_of_the_shorter_side():
    x = torch.zeros(2, 3)
    x[0, 0], x[1, 1] = 1.0, 2.0
    assert errors(x) == errors(x.mT) == (pytest.approx(3 / 2**0.5), 3.0)


def test_int4_explodes_at_512_and_int8_does_not():
    found_rows = precision.run((3,), quiet, (512,), ("int8", "int8-native", "int4"), ("input",)).rows
    last = {row["precision"]: row["largest_element"]["mean"] for row in found_rows if row["iterations"] == 5}
    assert last["int4"] > 10
    assert last["int8"] == pytest.approx(last["fp32"], abs=0.01)
    assert last["int8-native"] == pytest.approx(last["fp32"], abs=0.01)


def test_all_three_products_in_8_bits_lose_more_than_x_alone():
    outcome = precision.run((0,), quiet, (256,), ("fp8-e4m3", "fp8-e5m2", "int8"))
    for name in ("fp8-e4m3", "fp8-e5m2", "int8"):
        alone, every = (
            row_of(outcome.rows, precision=name, products=which, iterations=5)["frobenius"]["mean"]
            for which in ("input", "all")
        )
        assert every > alone


def small(name):
    if name == "orthogonality":
        return orthogonality.run((0, 1), quiet, ((64, 64), (32, 96), (96, 32)), iterations=6)
    if name == "precision":
        return precision.run((0, 1), quiet, (32, 48))
    return variance.run((0, 1), quiet, width=32, samples=5)


@named
def test_a_run_gives_the_same_figures_twice_and_a_record_that_can_be_read(name):
    def figures(outcome):
        return [{key: value for key, value in row.items() if key != "seconds"} for row in outcome.rows]

    outcome = small(name)
    assert figures(outcome) == figures(small(name))
    record = json.loads(record_text(record_of(outcome, "memplan lab", "2026-11-20", "cpu")))
    follow_schema(record, schema_of("experiment"))
    assert record_document(record).blocks


def test_progress_reports_as_often_as_was_announced():
    told = []
    shapes = ((16, 16), (8, 16), (16, 16))
    orthogonality.run(range(4), lambda done, note: told.append(done), shapes, iterations=2)
    assert told == list(range(1, orthogonality.parts(range(4), shapes) + 1))
    told.clear()
    precision.run(range(3), lambda done, note: told.append(done), (16, 24), ("bf16", "int4", "fp16"), ("all", "input"))
    expected = precision.parts(range(3), (16, 24), ("bf16", "int4", "fp16"), ("all", "input"))
    assert told == list(range(1, expected + 1))


def test_results_that_are_not_finite_are_said_to_be():
    outcome = precision.run((0,), quiet, (64,), ("int4",), ("all",), iterations=12)
    row = row_of(outcome.rows, precision="int4", iterations=12)
    assert row["frobenius"] is None
    record = record_of(outcome, "memplan lab", "2026-11-20", "cpu")
    assert "not finite" in str(record_document(record).blocks)
    reporter_of(record).figure(record)


def test_the_notes_buffers_and_traffic_are_reproduced_beside_the_real_ones():
    rows = {row["precision"]: row for row in precision.buffer_rows(4096)}
    assert [round(rows[name]["notes_bytes"] / 1e6) for name in ("fp32", "bf16", "int8", "int4")] == [201, 101, 50, 25]
    assert rows["bf16"]["min_bytes"] < rows["bf16"]["notes_bytes"] < rows["bf16"]["torch_muon_bytes"]
    moved = {row["precision"]: row for row in precision.traffic_rows(4096)}
    assert [round(moved[name]["notes_bytes"] / 1e6) for name in ("fp32", "bf16", "int8", "int4")] == [537, 268, 134, 67]
    assert moved["bf16"]["operations_per_byte"] > max(moved["bf16"]["gpu_operations_per_byte"])


@pytest.mark.parametrize("dtype", DTYPES)
def test_iterates_keep_their_dtype(dtype):
    x = normalised(gaussian(16, 16, seed=0), DTYPES[dtype])
    assert iterated(x, (3.4445, -4.775, 2.0315)).dtype == DTYPES[dtype]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["orthogonality", "--size", "0"], "at least 2"),
        (["orthogonality", "--size", "5by5"], "ROWSxCOLUMNS"),
        (["orthogonality", "--size", "99999999"], "GiB"),
        (["orthogonality", "--schedule", "cubik"], "cubic"),
        (["orthogonality", "--dtype", "fp64"], "bf16"),
        (["orthogonality", "--plot", "x.gif"], ".svg or .png"),
        (["orthogonality", "--out", "no/such/folder.json"], "no folder"),
        (["precision", "--precision", "int5"], "int4"),
        (["precision", "--width", "-3"], "at least 2"),
        (["precision", "--products", "some"], "input"),
        (["precision", "--schedule", "keler"], "keller-jordan"),
        (["variance", "--width", "1"], "at least 2"),
        (["variance", "--width", "9999999"], "GiB"),
        (["variance", "--samples", "1"], "--samples"),
        (["precision", "--seed", "-1"], "--seed"),
    ],
)
def test_bad_input_is_one_line_and_exits_2(arguments, word, cli, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    ran = cli("lab", *arguments)
    assert ran.exit_code == 2
    assert ran.out == ""
    assert word in ran.err
    assert len(ran.err.splitlines()) == 1


def test_runs_refuse_what_the_command_would():
    for call in (
        lambda: orthogonality.run((0,), quiet, ((8, 8),), iterations=0),
        lambda: precision.run((0,), quiet, (8,), iterations=51),
        lambda: variance.run((0,), quiet, width=8, samples=1),
    ):
        with pytest.raises(UnitError):
            call()


@pytest.mark.parametrize(
    "arguments",
    [
        ["orthogonality", "--size", "32", "--size", "16x48", "--iterations", "6", "--measure", "largest-element"],
        ["precision", "--width", "32"],
        ["variance", "--width", "16", "--samples", "4"],
    ],
)
def test_commands_write_record_and_picture(arguments, cli, tmp_path):
    out, plot = tmp_path / "record.json", tmp_path / "plot.png"
    ran = cli("lab", *arguments, "--seed", 5, "--threads", 1, "--quiet", "--json", "--out", out, "--plot", plot)
    assert (ran.exit_code, ran.err) == (0, "")
    assert json.loads(ran.out) == json.loads(out.read_text(encoding="utf-8"))
    assert plot.read_bytes().startswith(b"\x89PNG")
