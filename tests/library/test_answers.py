"""Every function of the library answers what its command prints with ``--json``, to the key."""

from functools import cache

import pytest

import memplan
from memplan.library.answers.answer import Answer

LLAMA = ("llama-3.1-8b", "--gpu", "rtx4090")
ON = {"gpu": "rtx4090"}
BUDGET = """\
version: 1
budgets:
  - {name: adapters, model: llama-3.1-8b, config: lora, gpu: h100-sxm-80gb, limit: 70 GiB}
  - {name: all weights, model: llama-3.1-8b, config: bf16-adamw, gpu: rtx4090}
"""

QUESTIONS = {
    "plan": (lambda: memplan.plan("llama-3.1-8b", config="qlora", **ON), ("fit", *LLAMA, "--config", "qlora")),
    "plan-that-does-not-fit": (
        lambda: memplan.plan("llama-3.1-8b", config="bf16-adamw", micro_batch_size=2, sequence_length=4096, **ON),
        ("fit", *LLAMA, "--config", "bf16-adamw", "-b", 2, "-s", 4096),
    ),
    "plan-with-keys-set": (
        lambda: memplan.plan("gpt2", config="lora", set={"adapter.rank": 8, "kernels.optimizer": "fused"}, **ON),
        (
            "fit", "gpt2", "--gpu", "rtx4090", "-c", "lora", "--set", "adapter.rank=8", "--set",
            "kernels.optimizer=fused",
        ),
    ),
    "plan-of-several-gpus": (
        lambda: memplan.plan("llama-3.1-8b", gpu="h100", gpus=8, activation_checkpointing="full"),
        ("fit", "llama-3.1-8b", "--gpu", "h100", "--gpus", 8, "--config", "bf16-adamw", "--checkpointing", "full"),
    ),
    "plan-of-memory": (
        lambda: memplan.plan(memplan.Shapes(layers=12, hidden=768, heads=12), gpu_memory="24GiB", config="muon"),
        ("fit", "--layers", 12, "--hidden", 768, "--heads", 12, "--gpu-memory", "24GiB", "--config", "muon"),
    ),
    "fit": (lambda: memplan.fit("gpt2", **ON), ("fit", "gpt2", "-g", "rtx4090")),
    "fit-of-several-gpus": (lambda: memplan.fit("gpt2", gpus=2, **ON), ("fit", "gpt2", "-g", "rtx4090", "--gpus", 2)),
    "compare": (
        lambda: memplan.compare("gpt2", ["lora", "tier3"], on=["rtx4090", "h100"]),
        ("compare", "gpt2", "-c", "lora", "-c", "tier3", "-g", "rtx4090", "-g", "h100"),
    ),
    "compare-by-default": (lambda: memplan.compare("llama-3.1-8b", **ON), ("compare", *LLAMA)),
    "largest": (
        lambda: memplan.largest(gpu="rtx4090", config="tier3"),
        ("max", "--gpu", "rtx4090", "--config", "tier3"),
    ),
    "largest-batch": (
        lambda: memplan.largest("llama-3.2-1b", of="batch", config="qlora", **ON),
        ("max", "llama-3.2-1b", "--gpu", "rtx4090", "--for", "batch", "--config", "qlora"),
    ),
    "largest-rank": (
        lambda: memplan.largest("gpt2", of="lora-rank", gpus=2, **ON),
        ("max", "gpt2", "--for", "lora-rank", "--gpu", "rtx4090", "--gpus", 2),
    ),
    "where": (lambda: memplan.where("gpt2", config="lora"), ("where", "gpt2", "--config", "lora")),
    "frontier": (
        lambda: memplan.frontier("gpt2", batches=[4, 1], lengths=[512, 1024], config="lora", **ON),
        ("frontier", "gpt2", "--batches", "1,4", "--lengths", "512,1024", "-c", "lora", "-g", "rtx4090"),
    ),
    "frontier-by-default": (lambda: memplan.frontier("gpt2", **ON), ("frontier", "gpt2", "-g", "rtx4090")),
    "suggest": (
        lambda: memplan.suggest("llama-3.2-1b", min_batch=2, keep=["weights"], most=2, **ON),
        ("suggest", "llama-3.2-1b", "--gpu", "rtx4090", "--min-batch", 2, "--keep", "weights", "--most", 2),
    ),
    "suggest-configs": (
        lambda: memplan.suggest_configs(sequence_length=1024, **ON),
        ("recommend", "-g", "rtx4090", "-s", 1024),
    ),
    "suggest-what-does-not-fit": (
        lambda: memplan.suggest("llama-3.1-70b", gpu_memory="8GiB", config="lora", set=["sequence_length=1024"]),
        ("suggest", "llama-3.1-70b", "--gpu-memory", "8GiB", "--config", "lora", "--set", "sequence_length=1024"),
    ),
}  # fmt: skip


@cache
def answer_to(name: str) -> Answer:
    return QUESTIONS[name][0]()


@pytest.mark.parametrize("name", QUESTIONS)
def test_to_dict_is_what_the_command_prints(cli, name):
    answer = answer_to(name)
    ran = cli(*QUESTIONS[name][1], "--json")
    assert isinstance(answer, Answer)
    assert ran.err == ""
    assert answer.to_dict() == ran.data
    assert answer.document().exit_code == ran.exit_code


@pytest.mark.parametrize("name", QUESTIONS)
def test_an_answer_is_one_line_and_one_piece_of_html(name):
    answer = answer_to(name)
    assert repr(answer).startswith(f"<memplan.{type(answer).__name__}: ")
    assert len(repr(answer).splitlines()) == 1
    assert answer._repr_html_().startswith("<div")


def test_check_is_what_the_command_prints(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "memplan-budget.yaml").write_text(BUDGET)
    answer = memplan.check()
    ran = cli("check", "--json")
    assert answer.to_dict() == ran.data
    assert (answer.verdict, ran.exit_code) == ("over", 1)
    assert memplan.check(tmp_path / "memplan-budget.yaml").to_dict() == ran.data


def test_check_writes_a_baseline_when_it_is_told_to(tmp_path):
    budget = tmp_path / "budget.yaml"
    budget.write_text(BUDGET)
    assert not memplan.check(budget).baseline.exists()
    written = memplan.check(budget, update_baseline=True).baseline
    assert written.exists()
    assert written.parent == tmp_path


def test_trace_is_what_the_command_prints(cli):
    pytest.importorskip("torch")
    shapes = {"layers": 2, "hidden": 64, "heads": 2, "vocab": 256}
    flags = [text for name, value in shapes.items() for text in (f"--{name}", value)]
    command = ("trace", *flags, "--config", "fp32-adamw", "-s", 16, "--gpu", "rtx4090", "--largest", 3, "-q")
    told: list[str] = []
    answer = memplan.trace(
        memplan.Shapes(**shapes), config="fp32-adamw", sequence_length=16, largest=3, progress=told.append, **ON
    )
    assert answer.to_dict() == cli(*command, "--json").data
    assert (answer.difference_bytes, answer.survives) == (0, True)
    assert sum(answer.components.values()) == answer.requested_bytes
    assert told[0] == "loading torch"
    assert answer.timeline("json").startswith("{")


def test_a_prices_file_orders_where(cli, tmp_path):
    prices = tmp_path / "prices.yaml"
    prices.write_text("{currency: EUR, prices: {rtx4090: 0.4, h100-sxm-80gb: 2.5}}")
    answer = memplan.where("llama-3.1-8b", config="qlora", price=prices)
    assert answer.to_dict() == cli("where", "llama-3.1-8b", "-c", "qlora", "--price", prices, "--json").data
    assert answer.counts["rtx4090"] == 1


def test_a_key_of_adapters_is_for_configs_that_have_them():
    answer = memplan.fit("gpt2", set={"adapter.rank": 8}, **ON)
    assert {row.config for row in answer.rows} == {"lora", "qlora"}
    assert any(
        "bf16-adamw" in line and "adapter.rank was set, and it trains all weights" in line for line in answer.left_out
    )
    with pytest.raises(memplan.MemplanError, match="did you mean 'rank'"):
        memplan.fit("gpt2", set={"adapter.rnk": 8}, **ON)


@pytest.mark.parametrize(
    "asked",
    [
        lambda progress: memplan.largest("gpt2", of="sequence", gpu="rtx3060", config="lora", progress=progress),
        lambda progress: memplan.suggest(
            "gpt2", gpu="rtx3060", config="lora", keep=["kernels"], most=1, progress=progress
        ),
    ],
    ids=["largest", "suggest"],
)
def test_a_search_tells_of_each_part_and_never_that_all_are_done(asked):
    told = []
    asked(lambda done, parts: told.append((done, parts)))
    assert [done for done, _ in told[:2]] == [1, 2]
    assert all(done < parts for done, parts in told)
