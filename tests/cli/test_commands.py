"""Every command: help, JSON that follows its schema, every format, a file, and the same bytes twice."""

import csv
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from memplan.cli import main
from memplan.cli.grouped_command import _UNSURE, _plain
from memplan.cli.main import COMMANDS, list_of_commands, make_app
from tests.jobs import follow_schema, yaml_data

pytestmark = pytest.mark.usefixtures("answered_once")

FIT = ("fit", "gpt2", "--gpu", "rtx4090")
FIT_ONE = ("fit", "llama-8b", "--gpu", "rtx4090", "--config", "tier3")
ANSWERS = {
    "fit": FIT,
    "plan": FIT_ONE,
    "max": ("max", "--config", "tier3", "--gpu", "rtx4090"),
    "where": ("where", "llama-70b", "--config", "tier1"),
    "explain": ("explain", "llama-8b", "--config", "tier1"),
    "list-gpus": ("list", "gpus"),
    "list-models": ("list", "models"),
    "list-formats": ("list", "formats"),
    "list-gradients": ("list", "gradients"),
    "list-optimizers": ("list", "optimizers"),
    "list-configs": ("list", "configs"),
    "show-gpu": ("show", "rtx4090"),
    "show-model": ("show", "llama-8b"),
    "show-format": ("show", "iq3-xxs"),
    "show-several": ("show", "bf16"),
    "show-optimizer": ("show", "muon-int4"),
    "show-config": ("show", "tier1"),
    "recommend": ("recommend", "--gpu", "rtx4090"),
    "tables": ("tables", "s000.t04"),
    "doctor": ("doctor",),
}
SCHEMAS = {
    "fit": "fit",
    "plan": "plan",
    "max": "max",
    "where": "where",
    "recommend": "recommend",
    "tables": "tables",
} | {name: "list" for name in ANSWERS if name.startswith("list-")}

answers = pytest.mark.parametrize("arguments", ANSWERS.values(), ids=ANSWERS.keys())


def test_the_commands_of_the_issue_are_there():
    assert {"fit", "max", "where", "explain", "list", "show", "schema", "doctor"} <= set(COMMANDS)


def test_a_function_that_is_a_command_has_its_row():
    folder = Path(main.__file__).parent
    files = [*folder.glob("commands/*.py"), *folder.glob("ui/*.py"), folder / "schema_and_doctor.py"]
    written = [name for file in files for name in re.findall(r"^def (\w+)_command\(", file.read_text(), re.MULTILINE)]
    assert sorted(written) == sorted(set(COMMANDS) - {"lab"})


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_every_command_has_help(cli, command, flag):
    ran = cli(command, flag)
    assert (ran.exit_code, ran.err) == (0, "")
    assert len(ran.out.splitlines()) > 3


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "emit"])  # its answer is a trainer's file
def test_every_command_takes_json(cli, command):
    assert "--json" in cli(command, "--help").out


def test_the_program_lists_its_commands(cli):
    listed = cli("--help").out
    assert all(re.search(rf"^  {command} ", listed, re.MULTILINE) for command in COMMANDS)


def test_the_list_says_what_each_command_says_of_itself_and_imports_none(cli):
    """Two applications have the same help: that of all commands, and the one that knows only their names."""
    whole = CliRunner().invoke(make_app(), ["--help"], prog_name="memplan", env={"COLUMNS": "100"})
    with_names = CliRunner().invoke(list_of_commands(), ["--help"], prog_name="memplan", env={"COLUMNS": "100"})
    assert (whole.exit_code, with_names.output) == (0, whole.output)
    script = "import sys, memplan.cli.main as main\nsys.argv[1:] = ['--version']\ntry:\n    main.run()\nexcept SystemExit:\n    assert not [name for name in sys.modules if name.startswith(('memplan.cli.commands', 'memplan.plan', 'yaml'))]"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


@pytest.mark.parametrize("line", [("--", "fit", "gpt2", "--gpu", "h100"), ("fitt",), ("-x", "fit")])
def test_a_command_is_found_behind_dashes_and_what_is_none_is_refused(cli, line):
    ran = cli(*line)
    assert (ran.exit_code == 0) == (line[0] == "--")
    assert ran.exit_code == 0 or ran.err.startswith("memplan: No such ")


def test_the_version_is_printed(cli):
    import memplan

    assert cli("--version").out == f"memplan {memplan.__version__}\n"


# ------------------------------------------------------------------ JSON
@pytest.mark.parametrize("name", ANSWERS)
def test_json_is_one_document_that_follows_its_printed_schema_and_has_integers_for_bytes(cli, name):
    ran = cli(*ANSWERS[name], "--json")
    assert ran.data["schema"].startswith("memplan/")
    assert ran.err == ""
    assert ran.out.endswith("}\n")
    integers_named_bytes(ran.data)
    if name in SCHEMAS:
        schema = cli("schema", SCHEMAS[name]).data
        follow_schema(ran.data, schema)


@pytest.mark.parametrize("name", ["training", "gpu", "format", "optimizer", "model"])
def test_the_schema_of_a_file_says_what_its_keys_are(cli, name):
    schema = cli("schema", name).data
    told = {key: "Attributes:" in part.get("description", "") for key, part in {"": schema, **schema["$defs"]}.items()}
    assert {key for key, said in told.items() if not said} <= {"Kernels", "Published"}  # whose keys others explain


def test_the_schema_without_a_name_is_that_of_a_plan(cli):
    assert cli("schema").data == cli("schema", "plan").data


def test_shipped_configs_follow_the_schema_of_training_configs(cli, catalog):
    schema = cli("schema", "training").data
    for path in catalog.configs.origins.values():
        follow_schema(yaml_data(Path(path)), schema)


def integers_named_bytes(value, path=""):
    if isinstance(value, dict):
        for key, item in value.items():
            if (key == "bytes" or key.endswith("_bytes")) and not isinstance(item, dict):
                left = item is None and path.endswith(".kernels")  # to the stack
                assert left or type(item) is int, f"{path}.{key} is {item!r}"
            integers_named_bytes(item, f"{path}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            integers_named_bytes(item, f"{path}[{index}]")


def test_a_plan_has_the_keys_of_the_design_in_its_order(cli):
    plan = cli(*FIT_ONE, "--json").data
    expected = [
        "schema", "memplan_version", "catalog_hash", "config", "verdict", "answer", "model", "gpu", "training",
        "bytes_per_parameter", "components", "instants", "peak", "persistent_bytes", "host", "suggestions",
        "assumptions", "not_modelled",
    ]  # fmt: skip
    assert [key for key in plan if key in expected] == expected
    assert set(plan["bytes_per_parameter"]) == {"weights", "master_weights", "gradients", "optimizer_states", "total"}
    assert sum(item["bytes"] for item in plan["components"]) == plan["peak"]["device_bytes"]
    assert max(item["requested_bytes"] for item in plan["instants"]) == plan["peak"]["requested_bytes"]


def test_the_training_keys_are_those_of_a_training_config(cli):
    training = cli(*FIT_ONE, "--json").data["training"]
    assert set(training) <= set(cli("schema", "training").data["properties"])


def test_every_row_of_fit_without_a_config_is_a_plan(cli):
    rows = cli(*FIT, "--json").data["rows"]
    assert {row["schema"] for row in rows} == {"memplan/plan/1"}
    assert len({row["config"] for row in rows}) == len(cli("list", "configs", "--json").data["rows"])
    order = ["fits", "tight", "no"]
    assert [order.index(row["verdict"]) for row in rows] == sorted(order.index(row["verdict"]) for row in rows)


def test_list_gives_every_field_of_the_entries(cli):
    row = next(row for row in cli("list", "formats", "--json").data["rows"] if row["name"] == "iq3-xxs")
    assert (row["block_elements"], row["block_bytes"]) == (256, 98)
    gpu = next(row for row in cli("list", "gpus", "--json").data["rows"] if row["name"] == "rtx4090")
    assert gpu["memory_bytes"] == 25_757_220_864
    assert gpu["sources"][0]["url"].startswith("https://")


def test_show_gives_a_models_parameters_by_role(cli):
    data = cli("show", "mixtral-8x7b", "--json").data
    assert data["parameters"] == 46_702_792_704 == sum(data["parameters_by_role"].values())
    assert data["active_parameters"] < data["parameters"]


def test_max_has_the_notes_figure_only_where_they_print_one(cli):
    """And not on other cards; tests/golden has the rows of one with a figure, and of configs that have none."""
    (row,) = cli("max", "--gpu", "t4", "--config", "tier3", "--json").data["rows"]
    assert "notes_max_parameters" not in row


def test_max_shows_the_notes_bound_beside_the_true_one(cli):
    (row,) = cli(*ANSWERS["max"], "--json").data["rows"]
    assert row["bytes_per_parameter"] == 1.9140625
    assert row["max_parameters"] == int(row["usable_bytes"] / row["bytes_per_parameter"])
    text = cli(*ANSWERS["max"], "-v").out
    for part in ("10.60B", "13.27B", "1.9141", row["largest_fitting_model"], "why" if "why" in text else "bound"):
        assert part in text


JOBS_SOMEWHERE = [
    ("gpt2-xl", "-b", "4"),
    pytest.param(("llama-8b",), marks=pytest.mark.thorough),
    pytest.param(("qwen3-30b-a3b", "--checkpointing", "full"), marks=pytest.mark.thorough),
]


@pytest.mark.parametrize("job", JOBS_SOMEWHERE)
def test_where_answers_what_fit_agrees_with_and_one_gpu_fewer_does_not_hold(cli, job):
    data = cli("where", *job, "--json").data
    several = [row for row in data["rows"] if row["count"] > 1]
    assert len({row["count"] for row in several}) > 1
    for row in {row["count"]: row for row in data["rows"]}.values():
        on = ("--gpu", row["gpu"], "--config", "bf16-adamw", "--strict")
        assert not row["pooled"]
        assert cli("fit", *job, *on, "--gpus", row["count"]).exit_code == 0
        assert row["count"] <= 2 or cli("fit", *job, *on, "--gpus", row["count"] - 1).exit_code == 1


def test_where_never_recommends_a_bound_from_pooled_memory(cli, write):
    prices = write("prices.yaml", "{rtx4090: 0.40, h100-sxm-80gb: 2.50}")
    ask = ("where", "llama-8b", "--config", "tier1", "--price", prices)
    assert cli("fit", "llama-8b", "--config", "tier1", "--gpu", "rtx4090", "--gpus", "2").exit_code == 3
    ran, data = cli(*ask), cli(*ask, "--json").data
    first, bound = data["rows"][0], next(row for row in data["rows"] if row["gpu"] == "rtx4090")
    assert (first["gpu"], first["count"], first["verdict"]) == ("h100-sxm-80gb", 1, "fits")
    assert (bound["count"], bound["pooled"], bound["verdict"]) == (2, True, "bound")
    assert [row["pooled"] for row in data["rows"]] == sorted(row["pooled"] for row in data["rows"])
    assert ran.exit_code == 0
    assert "costs least on 1 x h100-sxm-80gb" in " ".join(ran.out.split())
    assert "Not planned on several GPUs: tier1: weights: q4-0, q8-0 cannot be trained" in ran.out


def test_where_only_bounds_are_left_the_answer_is_unknown(cli):
    ran = cli("where", "llama-70b", "--config", "tier1", "--gpu", "h100")
    assert ran.exit_code == 3
    assert "\nUNKNOWN: " in ran.out


# ------------------------------------------------------------------ formats
@answers
@pytest.mark.parametrize("form", ["plain", "csv", "md"])
def test_every_answer_has_every_format(cli, arguments, form):
    ran = cli(*arguments, "--format", form)
    assert ran.exit_code in (0, 1)
    assert ran.out.strip()
    assert ran.err == ""


@pytest.mark.one_in(3)
@answers
def test_the_same_question_gives_the_same_bytes(cli, arguments):
    assert cli(*arguments).out == cli(*arguments).out


def test_csv_is_read_back_with_equal_rows(cli):
    rows = list(csv.reader(io.StringIO(cli("list", "formats", "--format", "csv").out)))
    assert len(rows) == 1 + len(cli("list", "formats", "--json").data["rows"])
    assert {len(row) for row in rows} == {len(rows[0])}


def test_markdown_tables_have_as_many_cells_in_every_row(cli):
    lines = [line for line in cli("list", "gpus", "--format", "md").out.splitlines() if line.startswith("|")]
    assert len({line.replace("\\|", "").count("|") for line in lines}) == 1


@pytest.mark.parametrize("form", ["table", "json", "md"])
def test_an_answer_goes_to_a_file(cli, tmp_path, form):
    path = tmp_path / "answer"
    ran = cli(*FIT_ONE, "--format", form, "-o", path)
    assert (ran.out, ran.err) == ("", "")
    assert path.read_text(encoding="utf-8") == cli(*FIT_ONE, "--format", form).out


def test_a_dash_as_file_is_standard_output(cli):
    assert cli(*FIT_ONE, "-o", "-").out == cli(*FIT_ONE).out


def test_a_file_that_cannot_be_written_is_refused(refused, tmp_path):
    assert "cannot be written" in refused("show", "t4", "-o", tmp_path / "no" / "such" / "folder")
    assert "cannot be written" in refused("show", "t4", "-o", tmp_path)


@pytest.mark.parametrize("unit", ["GiB", "GB", "MiB"])
def test_units_are_those_that_were_asked_for(cli, unit):
    table = cli(*FIT_ONE, "--units", unit, "--format", "csv").out
    found = set(re.findall(r"[0-9.]+ (B|KiB|MiB|GiB|TiB|GB|MB)\b", table))
    assert found == {unit}


def test_bytes_are_exact(cli):
    table = cli(*FIT_ONE, "--units", "bytes", "-v").out
    for item in cli(*FIT_ONE, "--json").data["components"]:
        assert f"{item['bytes']:,} B" in table


def test_units_do_not_change_json(cli):
    assert cli(*FIT_ONE, "--json", "--units", "GB").out == cli(*FIT_ONE, "--json").out


def test_quiet_prints_the_answer_alone(cli):
    ran = cli(*FIT_ONE, "-q")
    assert ran.out.count("\n") == 1
    assert ran.out.split(":")[0] in ("FITS", "TIGHT", "NO")


def test_quiet_leaves_json_whole(cli):
    assert cli(*FIT_ONE, "-q", "--json").out == cli(*FIT_ONE, "--json").out


@answers
def test_quiet_prints_at_most_one_paragraph(cli, arguments):
    assert len(cli(*arguments, "-q").out.strip().split("\n\n")) == 1


# ------------------------------------------------------------------ standard input
CONFIG_JSON = {
    "model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32,
    "num_key_value_heads": 4, "vocab_size": 32000, "max_position_embeddings": 2048,
}  # fmt: skip


def test_a_model_may_come_from_standard_input(cli):
    ran = cli("show", "-", "--json", stdin=json.dumps(CONFIG_JSON).encode())
    assert ran.data["parameters"] == 1_100_048_384


def test_a_config_may_come_from_standard_input(cli):
    ran = cli(
        "fit",
        "pythia-160m",
        "--gpu",
        "t4",
        "--config",
        "-",
        "--json",
        stdin=b"description: piped\nmicro_batch_size: 3\n",
    )
    assert ran.data["training"]["micro_batch_size"] == 3


def test_a_mistake_on_standard_input_names_it(refused):
    assert "<stdin>:2: micro_batch_siz" in refused(
        "fit", "gpt2", "--gpu", "t4", "--config", "-", stdin=b"description: piped\nmicro_batch_siz: 3\n"
    )


# ------------------------------------------------------------------ names and shorthands
@pytest.mark.parametrize(
    "model", ["llama-8b", "Llama-3.1-8B", "llama3.1-8b", "llama_3_1_8b", "meta-llama/Llama-3.1-8B"]
)
@pytest.mark.parametrize("gpu", ["rtx4090", "RTX 4090", "4090", "Rtx_4090"])
def test_names_ignore_case_and_separators(cli, model, gpu):
    data = cli("fit", model, "--gpu", gpu, "--config", "TIER_3", "--json").data
    assert (data["model"]["name"], data["gpu"]["name"]) == ("Llama-3.1-8B", "rtx4090")


@pytest.mark.parametrize(
    ("short", "settings"),
    [
        (("-b", "4"), ("--set", "micro_batch_size=4")),
        (("-s", "512"), ("--set", "sequence_length=512")),
        (("--checkpointing", "full"), ("--set", "activation_checkpointing=full")),
        (
            ("--micro-batch-size", "2", "--sequence-length", "64"),
            ("--set", "sequence_length=64", "--set", "micro_batch_size=2"),
        ),
    ],
)
def test_shorthands_are_settings(cli, short, settings):
    ask = ("fit", "gpt2", "--gpu", "t4", "--config", "bf16-adamw", "--json")
    shorthand, setting = cli(*ask, *short).data, cli(*ask, *settings).data
    assert {**shorthand, "answer": ""} == {**setting, "answer": ""}


def test_a_gpu_may_be_given_by_its_memory(cli):
    data = cli("fit", "gpt2", "--gpu-memory", "24GiB", "--config", "bf16-adamw", "--json").data
    assert data["gpu"]["usable_bytes"] == 24 * 2**30


def test_a_models_shapes_may_be_given(cli):
    ask = ("--layers", 22, "--hidden", 2048, "--intermediate", 5632, "--heads", 32, "--kv-heads", 4, "--vocab", 32000)
    data = cli("fit", *ask, "--gpu", "rtx4090", "--config", "bf16-adamw", "--json").data
    assert data["model"]["parameters"] == 1_100_048_384


def test_memory_kept_free_is_not_usable(cli):
    ask = ("fit", "gpt2", "--gpu", "t4", "--config", "bf16-adamw", "--json")
    whole, less = cli(*ask).data, cli(*ask, "--set", "reserve=1 GiB").data
    assert whole["gpu"]["usable_bytes"] - less["gpu"]["usable_bytes"] == 2**30


def test_the_local_gpu_is_read_from_its_driver(cli, write, monkeypatch, tmp_path):
    write("nvidia-smi", "#!/bin/sh\necho 'NVIDIA GeForce RTX 4090, 24564'\n").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    data = cli("fit", "gpt2", "--config", "bf16-adamw", "--json").data
    assert data["gpu"]["memory_bytes"] == 24564 * 2**20
    assert "24564" not in cli("doctor").err


@pytest.mark.parametrize("name", ["NVIDIA H200", "NVIDIA Unheard-of"])
def test_what_the_driver_keeps_for_itself_is_not_usable(cli, write, monkeypatch, tmp_path, name):
    write("nvidia-smi", f"#!/bin/sh\necho '{name}, 143771, 616'\n").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    gpu = cli("fit", "gpt2", "--config", "bf16-adamw", "--json").data["gpu"]
    assert gpu["memory_bytes"] == 143771 * 2**20
    assert gpu["usable_bytes"] == (143771 - 616) * 2**20


def test_explain_lets_a_reader_redo_the_sum(cli):
    data = cli("explain", "llama-8b", "--config", "tier1", "--json").data
    by_name = {item["name"]: item["bytes"] for item in data["components"]}
    assert sum(t["weight_bytes"] * t["count"] for t in data["tensors"]) == by_name["weights"]
    assert sum(t["state_bytes"] * t["count"] for t in data["tensors"]) == by_name["optimizer_states"]
    text = cli("explain", "llama-8b", "--config", "tier1").out
    assert f"{by_name['weights']:,}" in text
    assert "Source:" in text


# ------------------------------------------------------------------ learned positions
def test_the_default_length_gives_way_to_a_models_learned_positions(cli):
    ask = ("fit", "gpt2", "--gpu", "t4", "--config", "bf16-adamw", "--json")
    assert cli(*ask).data["training"]["sequence_length"] == 1024
    assert cli(*ask, "-s", 512).data["training"]["sequence_length"] == 512


def test_a_length_beyond_the_learned_positions_is_refused(refused):
    line = refused("fit", "gpt2", "--gpu", "t4", "--config", "bf16-adamw", "-s", 1025)
    assert "sequence_length: 1025 is beyond the 1024 learned positions of GPT-2" in line


def test_fit_says_how_much_host_memory_offloaded_states_take(cli):
    job = ("fit", "llama-8b", "--gpu", "a100-80gb", "--config", "bf16-adamw", "--set", "offload.optimizer_states=cpu")
    ran, data = cli(*job), cli(*job, "--json").data
    counters = 4 * 291
    assert data["host"]["bytes"] == 4 * 8_030_261_248 + counters
    assert "optimizer_states" not in {item["name"] for item in data["components"]}
    assert "besides: 29.92 GiB of pinned host memory" in ran.out
    assert f"{data['host']['bytes']:,} B of pinned host memory" in " ".join(data["assumptions"])
    explained = cli("explain", *job[1:])
    assert f"= {data['host']['bytes']:,}" in explained.out


def test_fit_suggests_host_memory_where_that_flips_the_answer(cli):
    plan = cli("fit", "llama-8b", "--gpu", "rtx4090", "--config", "tier1", "--json").data
    found = {item["change"]: item["flips_verdict"] for item in plan["suggestions"]}
    assert found["offload.optimizer_states=cpu"]


def test_lists_of_gpus_leave_out_those_that_share_memory_with_the_cpu(cli):
    for command in (("max", "--config", "muon"), ("where", "llama-8b", "--config", "muon")):
        names = [row["gpu"] for row in cli(*command, "--set", "offload.optimizer_states=cpu", "--json").data["rows"]]
        assert "h100-sxm-80gb" in names
        assert "dgx-spark" not in names


TEXTS = ("llama", "12", "0", "007", "4k", "2x h100", "full", "Full", "GiB", " 3", "1_000", "\u0663", "-1", "", "9" * 15)


@pytest.mark.parametrize(("command", "least"), [("fit", 200), ("suggest", 200), ("import", 20), ("run", 50)])
def test_plain_values_are_what_typer_makes_of_them(command, least):
    """What is plain is read without typer's judge, which older versions have none of."""
    coercion = pytest.importorskip("typer._coercion")
    parameters = typer.main.get_command(make_app([command])).commands[command].params
    quick = 0
    for one in parameters:
        judge = coercion.build_runtime_param(one.type_descriptor)
        for text in TEXTS:
            given = (text, text) if one.multiple else text
            try:
                found = _plain(given, one)
            except typer.BadParameter as error:
                with pytest.raises(typer.BadParameter, match=re.escape(error.message)):
                    judge.coerce(given, param=one, ctx=None)
                continue
            if found is not _UNSURE:
                expected = judge.coerce(given, param=one, ctx=None)
                assert (found, type(found)) == (expected, type(expected)), (one.name, text)
                quick += 1
        assert _plain(None, one) == judge.coerce(None, param=one, ctx=None)
    assert quick > least


def test_a_trainers_file_is_compared_with_configs(cli, tmp_path):
    path = tmp_path / "own.yaml"
    keys = ("base_model: HuggingFaceTB/SmolLM2-135M", "adapter: lora", "lora_r: 8", "lora_target_linear: true")
    path.write_text("\n".join([*keys, "sequence_len: 512", "micro_batch_size: 1", "bf16: true"]))
    plans = cli("compare", path, "-c", "qlora", "--gpu", "rtx4090", "--json").data["rows"]
    assert [plan["config"] for plan in plans] == [str(path), "qlora"]
    assert [plan["stack"]["name"] for plan in plans] == ["axolotl", "trl"]
