"""The default answer: the verdict in the first line, 80 columns, and what a terminal cannot show in ASCII."""

import io
import re
import sys

import pytest

from memplan.cli.output import _shows_blocks
from memplan.report.canvas import Canvas

pytestmark = pytest.mark.usefixtures("answered_once")

JOBS = [
    ("llama-8b", "rtx4090", "qlora"),
    ("llama-8b", "rtx4090", "bf16-adamw"),
    ("llama-8b", "rtx4090", "tier3"),
    ("llama-70b", "rtx-pro-6000-blackwell", "lora"),
    ("qwen3-0.6b", "t4", "bf16-adamw"),
    ("gpt2", "rtx3060", "fp32-adamw"),
]


@pytest.mark.parametrize("job", JOBS, ids=" ".join)
def test_the_first_line_is_the_verdict_and_nothing_is_wider_than_80_columns(cli, job):
    model, gpu, config = job
    lines = cli("fit", model, "--gpu", gpu, "--config", config).out.splitlines()
    plan = cli("fit", model, "--gpu", gpu, "--config", config, "--json").data
    assert lines[0].split()[0].lower() == plan["verdict"]
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 36
    assert any(f"<- peak: {plan['peak']['instant']}" in line for line in lines)


NARROW = [
    ("fit", "llama-8b", "--gpu", "rtx4090"),
    ("fit", "llama-8b", "--gpu", "rtx4090", "--config", "qlora"),
    ("fit", "llama-8b", "--gpu", "rtx4090", "--method", "inference"),
    ("max", "llama-8b", "--for", "batch", "--config", "qlora"),
    ("where", "llama-70b", "--config", "tier1"),
    ("compare", "llama-8b", "-c", "qlora", "-c", "lora", "--gpu", "rtx4090"),
    ("recommend", "--gpu", "rtx3060"),
]


@pytest.mark.parametrize("arguments", NARROW, ids=" ".join)
def test_rows_keep_within_a_narrow_terminal(cli, monkeypatch, arguments):
    monkeypatch.setattr("memplan.cli.output._canvas", lambda *, terminal: Canvas(40))
    assert max(map(len, cli(*arguments).out.splitlines())) <= 40


def test_a_place_is_one_line_on_a_narrow_terminal(cli, monkeypatch):
    monkeypatch.setattr("memplan.cli.output._canvas", lambda *, terminal: Canvas(40))
    lines = cli("where", "llama-8b", "--qlora").out.splitlines()
    places = lines[next(number for number, line in enumerate(lines) if "needs" in line) + 1 :]
    places = places[: places.index("")]
    assert len(places) == 12
    assert all(line.split()[0] == "1" and line.endswith("GiB") for line in places)


def test_changes_are_in_the_words_of_the_stack(cli):
    job = ("fit", "llama-8b", "--gpu", "rtx3090", "--config", "lora", "-b", 8)
    plan, out = cli(*job, "--json").data, cli(*job).out
    fitting = [suggestion for suggestion in plan["suggestions"] if suggestion["flips_verdict"]]
    assert fitting
    for suggestion in fitting[:3]:
        for own in suggestion["own"]:
            mark = "=" if own["own_key"].isupper() else ": "  # of a variable of the environment
            assert f"{own['own_key']}{mark}{own['own_value']}" in out


def test_the_room_of_a_job_that_fits_is_at_most_what_max_finds(cli):
    job = ("llama-3.2-1b", "--gpu", "rtx3060", "--config", "qlora", "--json")
    out = cli("fit", *job[:-1]).out
    for quantity, own, flag in (("batch", "per_device_train_batch_size", "-b"), ("sequence", "max_length", "-s")):
        (row,) = cli("max", *job[:1], "--for", quantity, *job[1:]).data["rows"]
        (room,) = re.findall(rf"{own}: (\d+)\n", out)
        assert 0.8 * row["value"] < int(room) <= row["value"]
        assert cli("fit", *job, flag, room).data["verdict"] == "fits"


TERMINALS = [
    ({"LANG": "en_US.UTF-8"}, True),
    ({"LANG": "C.UTF-8", "LC_CTYPE": "C.UTF-8"}, True),
    ({"LANG": "C", "LC_CTYPE": "C.UTF-8"}, False),
    ({"LC_CTYPE": "C.UTF-8"}, False),
    ({"LANG": "en_US.UTF-8", "LC_ALL": "C"}, False),
    ({"LANG": "de_DE.ISO-8859-1"}, False),
    ({"LANG": "en_US.UTF-8", "TERM": "dumb"}, False),
]


@pytest.mark.parametrize(("environment", "able"), TERMINALS, ids=str)
def test_block_elements_are_for_terminals_that_show_them(monkeypatch, environment, able):
    for name in ("LC_ALL", "LC_CTYPE", "LANG", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "utf-8"))
    assert _shows_blocks() == able


def test_without_a_config_the_methods_that_people_choose_from_are_shown(cli):
    ran = cli("fit", "llama-8b", "--gpu", "rtx4090")
    lines = ran.out.splitlines()
    shown = [line.split()[0] for line in lines if line.startswith("  ") and line[2] != " "]
    assert shown[:6] == ["method", "qlora", "lora", "bf16-adamw-8bit", "bf16-adamw", "mixed-adamw"]
    assert (lines[0].startswith("FITS  "), ran.exit_code) == (True, 0)
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 26


def test_the_largest_batch_of_a_method_is_at_most_what_max_finds(cli):
    job = ("llama-3.2-1b", "--gpu", "rtx3060")
    out = cli("fit", *job).out
    (row,) = cli("max", *job[:1], "--for", "batch", *job[1:], "--config", "qlora", "--json").data["rows"]
    (line,) = [line for line in out.splitlines() if line.startswith("  qlora ")]
    assert row["value"] - 1 <= int(line.split()[-1]) <= row["value"]


def test_all_has_every_config_as_the_json_has(cli):
    job = ("fit", "gpt2", "--gpu", "t4")
    every = {row["config"] for row in cli(*job, "--json").data["rows"]}
    assert every <= set(cli(*job, "--all").out.split())
    assert cli(*job, "--all").out.splitlines()[-1] == cli(*job, "-q").out.strip()


@pytest.mark.parametrize(("device", "code"), [(("--gpu", "t4"), 0), (("--gpu-memory", "512MiB"), 1)])
def test_every_form_of_the_answer_exits_alike(cli, device, code):
    job = ("fit", "gpt2", *device)
    assert [cli(*job, *more).exit_code for more in ((), ("--all",), ("-q",), ("--json",))] == [code] * 4


OTHERS = [
    pytest.param(("max",), marks=pytest.mark.slow),  # every model under every method, twice
    ("max", "--gpu", "rtx4090"),
    ("max", "llama-8b", "--for", "batch", "--config", "qlora"),
    ("where", "llama-70b", "--config", "tier1"),
    ("compare", "llama-8b", "-c", "qlora", "-c", "lora", "-c", "bf16-adamw", "--gpu", "rtx4090"),
    ("compare", "gpt2", "-c", "tier1", "--gpu", "rtx4090", "--gpu", "t4"),
]


@pytest.mark.parametrize("arguments", OTHERS, ids=" ".join)
def test_other_answers_have_a_screen_with_bars_and_end_in_the_same_sentence(cli, arguments):
    ran, whole = cli(*arguments), cli(*arguments, "-v")
    lines = ran.out.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 40
    assert any("##" in line for line in lines)
    assert "".join(ran.out.split()).endswith("".join(whole.out.splitlines()[-1].split()))
    assert ran.exit_code == whole.exit_code


def test_a_screen_names_what_it_leaves_out(cli):
    asked = ("where", "llama-70b", "--config", "tier1")
    shown = [line for line in cli(*asked).out.splitlines() if line.endswith("--all.")]
    rows = cli(*asked, "--json").data["rows"]
    assert shown == [f"{len(rows) - 12} more kinds of GPU: --all."]


def test_answers_say_which_layers_are_checkpointed(cli):
    asked = ("gpt2", "--gpu", "rtx3060", "--set", "checkpointed_layers.every=2", "--checkpointing", "full")
    assert "Checkpointing full is of 1 layer in 2." in cli("fit", *asked).out
    config = ("--config", "bf16-adamw")
    for command in (("frontier",), ("explain",), ("max", "--for", "batch")):
        assert "checkpointing full (1 layer in 2)" in " ".join(cli(*command, *asked, *config).out.split())
    assert "the forward of 1 layer in 2 runs once more" in " ".join(cli("suggest", *asked).out.split())


def test_with_prices_the_gpus_that_have_one_are_shown(cli, tmp_path):
    prices = tmp_path / "prices.yaml"
    prices.write_text("{rtx4090: 0.4, h100: 2.5}", encoding="utf-8")
    lines = cli("where", "llama-8b", "--qlora", "--price", prices).out.splitlines()
    assert [line.split()[:3] for line in lines if "|" in line] == [
        ["0.40", "1", "rtx4090"],
        ["2.50", "1", "h100-sxm-80gb"],
    ]


def test_a_screen_says_that_quantised_weights_are_not_sharded(cli):
    job = ("fit", "llama-8b", "--qlora", "--gpus", "2x rtx4090")
    said = "quantised weights whole on each GPU (parallel.engine=fsdp1 shards them)"
    assert said in " ".join(cli(*job).out.split())
    assert said not in " ".join(cli(*job, "--set", "parallel.engine=fsdp1").out.split())


def test_serving_has_a_screen(cli):
    asked = ("fit", "llama-8b", "--gpu", "rtx4090", "--method", "inference")
    lines = cli(*asked).out.splitlines()
    assert lines[0].startswith("FITS   16.")
    assert any(line.startswith("  kv_cache") and "#" in line for line in lines)
    assert max(map(len, lines)) <= 80


def test_what_is_generated_can_be_said_by_options(cli, refused):
    asked = ("fit", "qwen2.5-7b", "--gpu", "h100", "--lora", "--method", "grpo", "-b", 8)
    assert "method.rollout.completion_length" in refused(*asked, code=2)
    assert "grpo" in cli(*asked, "--set", "method.rollout.completion_length=512").out


def test_a_second_file_is_taken_for_a_config(refused, tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text("description: mine", encoding="utf-8")
    assert f"did you mean --config {file} or --with {file}?" in refused(
        "compare", "llama-8b", str(file), "--gpu", "rtx4090", code=2
    )


def test_the_address_of_a_repository_is_its_name(cli):
    said = [cli("fit", name, "--gpu", "rtx4090", "--qlora", "-q").out for name in ADDRESSES]
    assert said[0] == said[1]


ADDRESSES = ("Qwen/Qwen3-8B", "https://huggingface.co/Qwen/Qwen3-8B/tree/main")
