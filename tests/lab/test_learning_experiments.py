"""Experiments that train: what they find, that they repeat themselves, and the records that are shipped."""

import json
from importlib import import_module

import pytest
import torch
from jsonschema import Draft202012Validator

from memplan.catalog.catalog import data_directory
from memplan.errors import UnknownNameError
from memplan.lab.learning.dynamic_range import absmax_bits, measurements, watched_steps
from memplan.lab.learning.gradient_dtype import GRADIENTS, casting
from memplan.lab.learning.matched import SHAPES, mean_curve, planned_row, variant_of
from memplan.lab.learning.momentum_bits import MOMENTA, STORES
from memplan.lab.learning.teacher_student import NotesStore, store_of, student_run
from memplan.lab.learning.variants import Size, chosen, first_bad_step, gap_percent, lab_setup
from memplan.lab.training.loop import (
    Trainer,
    TrainingOptions,
    library_text,
)
from memplan.model.inventory import parameter_count
from memplan.report.json_schemas import schema_of
from tests.jobs import shipped_catalog

pytestmark = pytest.mark.slow

CATALOG = shipped_catalog()
FOLDER = data_directory() / "configs" / "evidence"
SMALL = Size(1, 64, 2, 64, 256, batch=2, length=16, steps=2)
NAMES = ("dynamic-range", "momentum-bits", "weight-bits", "gradient-dtype", "matched-8bit")
MODULES = {name: name.replace("-", "_") for name in NAMES} | {"matched-8bit": "matched"}


# ------------------------------------------------------------------ the notes' own problem
@pytest.mark.parametrize("weights", ["q4-0", "fp32"])
def test_the_2_bit_quantiser_of_the_notes_diverges_after_about_100_steps(weights):
    run = student_run("notes-2", weights, seed=0, steps=150)
    assert run.first_bad_step is not None
    assert 90 <= run.first_bad_step <= 110
    assert run.loss == float("inf")


def test_two_bits_with_a_sound_codebook_do_not_diverge():
    run = student_run("gauss2", "q4-0", seed=0, steps=150)
    assert run.first_bad_step is None
    assert run.loss < run.losses[0]


def test_two_linear_bits_with_a_scale_for_each_block_stay_finite():
    run = student_run("int2", "q4-0", seed=0, steps=150)
    assert run.first_bad_step is None
    assert run.loss < 2 * run.losses[0]


def test_the_notes_quantiser_widens_its_range_whatever_it_stores():
    store = NotesStore(2)
    ranges = []
    for _ in range(3):
        store.write(0.95 * store.read())
        ranges.append(store.range)
    assert [b / a for a, b in zip([0.01, *ranges], ranges, strict=False)] == pytest.approx([1.14] * 3)
    assert 0 not in store.read()


def test_a_student_repeats_itself_to_the_bit():
    first, second, other = (student_run("int4", "q4-0", seed, steps=5).losses for seed in (0, 0, 1))
    assert first == second != other


@pytest.mark.parametrize("name", STORES)
def test_a_store_holds_what_its_bytes_allow(name):
    store, values = store_of(name), torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    store.write(values)
    error = float((store.read() - values).square().mean())
    assert 0 < store.bytes_per_parameter <= 4
    assert error < (1e-3 if store.bytes_per_parameter >= 1 else 2.0)


# ------------------------------------------------------------------ measures
def test_spans_are_powers_of_ten_of_what_is_not_zero():
    found = measurements([torch.tensor([0.0] * 28 + [1e-6, 1e-3] * 50)])
    assert (found["lowest"], found["largest"], found["decades"]) == pytest.approx((-6, -3, 3), abs=1e-6)
    assert found["zeros_percent"] == pytest.approx(100 * 28 / 128)


@pytest.mark.parametrize(("small", "bits"), [(1.0, 2), (0.26, 3), (0.1, 4), (0.01, 7)])
def test_the_bits_of_a_block_keep_its_small_elements_from_zero(small, bits):
    block = torch.full((128,), small)
    block[0] = 1.0
    assert absmax_bits(block) == [bits]
    half = 2 ** (bits - 1) - 1
    assert round(small * half) > 0
    assert bits == 2 or round(small * (2 ** (bits - 2) - 1)) == 0


def test_gaps_are_paired_by_seed():
    assert gap_percent([1.1, 2.0], [1.0, 2.0]) == {"mean": 5.0, "low": 0.0, "high": 10.0, "values": [10.0, 0.0]}
    assert gap_percent([1.1, float("inf")], [1.0, 2.0]) is None


def test_the_first_bad_step_counts_from_one():
    assert first_bad_step([1.0, float("nan")]) == 2
    assert first_bad_step([1.0, 2.0]) is None


def test_steps_are_watched_from_the_first_to_the_last():
    assert watched_steps(150) == (1, 15, 50, 150)
    assert watched_steps(1) == (1,)


def test_a_curve_ends_where_a_seed_is_not_finite():
    assert mean_curve([[3.0, 2.0], [1.0, 1.0]]) == [[1, 2.0, 1.0, 3.0], [2, 1.5, 1.0, 2.0]]
    assert mean_curve([[3.0, float("inf")], [1.0, 1.0]]) == [[1, 2.0, 1.0, 3.0]]


def test_a_chosen_name_brings_the_baseline_along():
    assert chosen("momentum", ["int8"], ("fp32", "int8", "int4"), "fp32") == ("fp32", "int8")
    with pytest.raises(UnknownNameError, match="did you mean 'int8'"):
        chosen("momentum", ["int88"], ("fp32", "int8"), "fp32")


def test_a_plain_cast_loses_small_gradients():
    trainer = Trainer(SMALL.model, lab_setup(CATALOG, SMALL), TrainingOptions(steps=1), library_text(), 0)
    seen = []
    casting(torch.float8_e4m3fn)(trainer)
    trainer.optimizer.register_step_pre_hook(
        lambda optimizer, *_: seen.extend(p.grad.clone() for g in optimizer.param_groups for p in g["params"])
    )
    trainer.step(0)
    held = torch.cat([gradient.reshape(-1) for gradient in seen])
    assert torch.equal(held, held.to(torch.float8_e4m3fn).float())
    assert (held == 0).float().mean() > 0.1


# ------------------------------------------------------------------ the notes' shapes
@pytest.mark.parametrize(
    ("name", "parameters", "matrices"), [("notes-28m", 28_355_328, 2_621_440), ("notes-282m", 282_491_136, 205_258_752)]
)
def test_the_notes_shapes_have_their_parameters(name, parameters, matrices):
    row = planned_row(CATALOG, name, SHAPES[name], "int8")
    assert (row["parameters"], row["muon_parameters"]) == (parameters, matrices)
    assert parameter_count(SHAPES[name].model.inventory) == parameters
    assert row["momentum_bytes"] == matrices // 128 * 132
    assert row["saving_percent"]["momentum"] == 74.22


def test_a_format_of_momentum_changes_only_the_states():
    full, coded = (planned_row(CATALOG, "notes-28m", SHAPES["notes-28m"], name) for name in ("fp32", "int4"))
    assert full["predicted_bytes"]["weights"] == coded["predicted_bytes"]["weights"] == 4 * 28_355_328
    saved = full["predicted_bytes"]["optimizer_states"] - coded["predicted_bytes"]["optimizer_states"]
    assert saved == full["momentum_bytes"] - coded["momentum_bytes"]


@pytest.mark.parametrize("momentum", ["fp32", "int8", "int4", "gauss4"])
def test_planned_and_measured_bytes_are_equal(momentum):
    variant = variant_of(CATALOG, SMALL, momentum)
    trainer = Trainer(SMALL.model, variant.setup, variant.options, library_text(), 0)
    trainer.step(0)
    assert trainer.measured == trainer.planned


# ------------------------------------------------------------------ the commands
RUN = ("--layers", "1", "--heads", "2", "--batch", "2", "--length", "16", "--steps", "2", "--threads", "1")
TINY, WIDE = ((*RUN, "--hidden", width, "--intermediate", width) for width in ("64", "256"))
COMMANDS = {
    "dynamic-range": TINY,
    "momentum-bits": [*TINY, "--problem", "language-model", "--momentum", "int2-stochastic", "--momentum", "notes-2"],
    "weight-bits": [*WIDE, "--weights", "q4-0"],
    "gradient-dtype": [*TINY, "--gradient", "fp8-e4m3", "--gradient", "fp8-e4m3-unscaled"],
    "matched-8bit": [*TINY, "--vocab", "256", "--momentum", "int8"],
}


@pytest.mark.parametrize("name", NAMES)
def test_a_command_leaves_a_record_and_a_picture(cli, tmp_path, name):
    out, plot = tmp_path / "record.json", tmp_path / "plot.svg"
    ran = cli("lab", name, *COMMANDS[name], "--seed", "0", "--out", out, "--plot", plot, "--json")
    assert ran.exit_code == 0, ran.err
    record = json.loads(out.read_text(encoding="utf-8"))
    assert ran.data == record
    assert record["experiment"] == name
    assert record["seeds"] == [0]
    assert "memplan: " + name in ran.err
    Draft202012Validator(schema_of("experiment")).validate(record)
    assert plot.read_text(encoding="utf-8").startswith("<?xml")


def test_a_plan_alone_has_both_shapes_of_the_notes(cli):
    record = cli("lab", "matched-8bit", "--plan-only", "--quiet", "--json").data
    assert {(row["shape"], row["momentum"]) for row in record["rows"]} >= {
        (shape, momentum) for shape in ("notes-28m", "notes-282m") for momentum in ("fp32", "int8", "int4")
    }
    assert all(row["loss"] is None and row["measured_bytes"] is None for row in record["rows"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("momentum-bits", "--momentum", "gaus4"), "did you mean 'gauss4'"),
        (("weight-bits", "--weights", "q4_1"), "unknown weight format 'q4_1'"),
        (("gradient-dtype", "--gradient", "fp8-e4m4"), "did you mean 'fp8-e4m3'"),
        (("matched-8bit", "--shape", "notes-28"), "did you mean 'notes-28m'"),
        (("matched-8bit", "--shape", "tiny", "--layers", "2"), "not both"),
        (("matched-8bit", "--layers", "2"), "--heads and --hidden"),
        (("dynamic-range", "--steps", "0"), "--steps"),
        (("dynamic-range", "--plot", "x.gif"), ".svg or .png"),
        (("weight-bits", "--weights", "q4-0", "--hidden", "60", "--heads", "2"), "rows of 60 do not divide"),
    ],
)
def test_bad_input_is_one_line(refused, words, said):
    message = refused("lab", *words)
    assert said in message
    assert message.count("\n") <= 1


# ------------------------------------------------------------------ the records that are shipped
@pytest.fixture(params=NAMES)
def shipped(request):
    return json.loads((FOLDER / f"lab-{request.param}.json").read_text(encoding="utf-8"))


def test_a_record_follows_its_schema_and_has_three_seeds(shipped):
    Draft202012Validator(schema_of("experiment")).validate(shipped)
    assert len(shipped["seeds"]) >= 3
    values = [value for row in shipped["rows"] for value in row.values() if isinstance(value, dict)]
    intervals = [value for value in values if "values" in value]
    assert intervals
    assert {len(value["values"]) for value in intervals} <= {1, 2, len(shipped["seeds"])}


def test_findings_follow_from_the_rows(shipped):
    module = import_module(f"memplan.lab.learning.{MODULES[shipped['experiment']]}")
    assert module.findings(shipped["rows"]) == shipped["findings"]


def test_a_record_names_no_machine(shipped):
    text = json.dumps({**shipped, "rows": []})
    assert not any(part in text for part in ("/home", "/tmp", "/work", "/root"))
    assert shipped["command"].startswith(f"memplan lab {shipped['experiment']} ")


def test_a_picture_is_drawn_from_a_record_alone_and_does_not_change(cli, shipped, tmp_path):
    drawn = tmp_path / "again.svg"
    assert cli("lab", "show", shipped["experiment"], "--plot", drawn).exit_code == 0
    kept = FOLDER / f"lab-{shipped['experiment']}.svg"
    assert kept.stat().st_size < 200_000
    assert drawn.read_bytes() == kept.read_bytes()


def shipped_rows(name):
    return json.loads((FOLDER / f"lab-{name}.json").read_text(encoding="utf-8"))["rows"]


def test_shipped_only_the_notes_2_bits_diverge():
    rows = shipped_rows("momentum-bits")
    student = [row for row in rows if row["problem"] == "teacher-student"]
    assert {row["momentum"] for row in student if row["diverged"]} == {"notes-2"}
    assert {row["momentum"] for row in student} == set(STORES)
    assert {row["momentum"] for row in rows if row["problem"] == "language-model"} == set(MOMENTA)


def test_shipped_stochastic_rounding_beats_nearest_for_weights_in_blocks():
    means = {(row["weights"], row["rounding"]): row["loss"]["mean"] for row in shipped_rows("weight-bits")}
    assert all(means[name, "stochastic"] < means[name, "nearest"] for name in ("q8-0", "q4-0"))


def test_shipped_scaled_fp8_gradients_are_level_with_fp32():
    rows = {(row["gradient"], row["scaled"]): row for row in shipped_rows("gradient-dtype")}
    assert len(rows) == len(GRADIENTS)
    assert abs(rows["fp8-e4m3", True]["gap_percent"]["mean"]) < 2
    assert rows["fp8-e4m3", False]["gap_percent"]["mean"] > 5


def test_shipped_second_moment_spans_less_than_the_notes_say():
    rows = [row for row in shipped_rows("dynamic-range") if row["quantity"] == "adam-v"]
    assert max(row["decades"]["high"] for row in rows) < 32


def test_shipped_int8_momentum_is_level_with_fp32_in_the_planned_bytes():
    rows = shipped_rows("matched-8bit")
    trained = {row["momentum"]: row for row in rows if row["steps"]}
    assert {"fp32", "int8", "int4"} <= trained.keys()
    assert all(row["predicted_bytes"] == row["measured_bytes"] for row in trained.values())
    assert abs(trained["int8"]["gap_percent"]["mean"]) < 1
    assert {row["shape"] for row in rows} >= {"notes-28m", "notes-282m"}
