"""What fit suggests is true: each change saves what it says, and what flips the answer fits."""

import json

import pytest

import memplan

pytestmark = pytest.mark.usefixtures("answered_once")

JOBS = [
    ("llama-8b", "rtx4090", "bf16-adamw"),
    ("llama-8b", "rtx4090", "mixed-adamw"),
    ("llama-8b", "rtx4090", "tier3"),
    ("llama-8b", "rtx4090", "lora"),
    ("llama-3.2-1b", "t4", "fp16-adam"),
    ("llama-3.2-1b", "rtx3060", "muon"),
    ("gpt2-xl", "rtx4090", "bf16-adamw"),
    ("qwen3-8b", "h100", "fp32-adamw"),
    ("mixtral-8x7b", "h100", "bf16-adamw-8bit"),
    ("llama-70b", "t4", "bf16-adamw"),
    ("gpt2-xl", "rtx3050", "bf16-adamw"),
    ("llama-8b", "rtx3060", "lora"),
]


def ask(job, *more):
    model, gpu, config = job
    return ("fit", model, "--gpu", gpu, "--config", config, "--json", *more)


def changed_by(arguments: tuple[str, ...], change: str) -> list[str]:
    """Return settings with a change put in the place of what sets the same key, which counts once."""
    shorthands = {"-b": "micro_batch_size=", "-s": "sequence_length=", "--set": ""}
    given = [shorthands[flag] + value for flag, value in zip(arguments[::2], arguments[1::2], strict=True)]
    keys = {setting.partition("=")[0] for setting in change.split(" ")}
    return [*(setting for setting in given if setting.partition("=")[0] not in keys), *change.split(" ")]


def planned(job, settings) -> memplan.Plan:
    """Plan as the command does (tests/library/test_answers.py), but without suggestions of its own."""
    model, gpu, config = job
    return memplan.plan(model, gpu=gpu, config=config, set=settings)


SIZED = [*((job, ()) for job in JOBS), (JOBS[0], ("-b", "8")), (JOBS[2], ("-b", "8")), (JOBS[0], ("-s", "512"))]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("job", "size"), SIZED, ids=lambda words: " ".join(words) or "as it is")
def test_suggestions_give_the_bytes_of_planning_with_them_and_what_flips_the_answer_comes_first(cli, job, size):
    plan = cli(*ask(job, *size)).data
    for suggestion in plan["suggestions"]:
        changed = planned(job, changed_by(size, suggestion["change"]))
        assert changed.expected_bytes == suggestion["device_bytes"], suggestion["change"]
        assert changed.memory.needed_bytes == suggestion["needed_bytes"]
        assert plan["peak"]["device_bytes"] - suggestion["device_bytes"] == suggestion["saves_bytes"] > 0
        assert (changed.verdict == "fits") == suggestion["flips_verdict"]
        assert suggestion["cost"]

    assert bool(plan["suggestions"]) == (plan["verdict"] != "fits")
    flips = [item["flips_verdict"] for item in plan["suggestions"]]
    assert flips == sorted(flips, reverse=True)
    if any(flips):
        assert plan["suggestions"][0]["change"] in plan["answer"]


def test_a_key_is_set_once(refused):
    line = refused(*ask(JOBS[0], "-b", 8, "--set", "micro_batch_size=4"))
    assert "--set micro_batch_size contradicts --micro-batch-size" in line


# ------------------------------------------------------------------ round trip
CONFIGS = [
    "tier1", "tier3", "bf16-adamw", "mixed-adamw", "fp16-adam", "q4-adam", "lora", "qlora", "muon",
    "bf16-adamw-8bit",
]  # fmt: skip
ROUND_TRIPS = [
    *(("llama-8b", name) for name in CONFIGS),
    ("gpt2", "tier1"),
    ("gpt2", "mixed-adamw"),
    ("mixtral-8x7b", "q4-adam"),
]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("model", "name"), ROUND_TRIPS)
def test_the_training_of_an_answer_given_back_as_a_config_gives_the_same_answer(cli, write, model, name):
    plan = cli("fit", model, "--gpu", "h100", "--config", name, "--json").data
    path = write("again.json", json.dumps(plan["training"]))
    again = cli("fit", model, "--gpu", "h100", "--config", path, "--json").data
    for key in (
        "components",
        "instants",
        "peak",
        "training",
        "bytes_per_parameter",
        "persistent_bytes",
        "host",
        "verdict",
    ):
        assert again[key] == plan[key]


def test_changes_on_the_command_line_are_in_the_training_of_the_answer(cli, write):
    changed = (
        "-b", 2, "-s", 1024, "--checkpointing", "full", "--set", "kernels.loss=chunked", "--set", "reserve=1 GiB",
    )  # fmt: skip
    plan = cli("fit", "llama-8b", "--gpu", "h100", "--config", "tier1", "--json", *changed).data
    again = cli(
        "fit", "llama-8b", "--gpu", "h100", "--config", write("again.json", json.dumps(plan["training"])), "--json"
    ).data
    assert (again["peak"], again["training"], again["gpu"]) == (plan["peak"], plan["training"], plan["gpu"])


def test_a_whole_answer_is_read_as_its_training(cli, write):
    first = cli("fit", "llama-8b", "--gpu", "h100", "--config", "tier1", "--json")
    again = cli("fit", "llama-8b", "--gpu", "h100", "--config", write("plan.json", first.out), "--json").data
    assert again["peak"] == first.data["peak"]


def test_suggestions_undo_what_does_not_go_with_them(cli):
    more = ("--set", "clip_gradients=true", "--set", "zero_gradients=fill", "--set", "master_weights=fp32")
    plan = cli(*ask(JOBS[0], *more)).data
    assert any("lifetime" in item["change"] for item in plan["suggestions"])
    for suggestion in plan["suggestions"]:
        changed = planned(JOBS[0], changed_by(more, suggestion["change"]))
        assert changed.expected_bytes == suggestion["device_bytes"], suggestion["change"]
        assert changed.memory.needed_bytes == suggestion["needed_bytes"]
