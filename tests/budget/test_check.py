"""``memplan check``: every job against its limits, the worst first, and an exit code that can be trusted."""

import json

import pytest

import memplan
from memplan.library.answers.budget_check import FIRST


def statuses(ran):
    return {(row["name"], row["gpu"]): row["status"] for row in ran.data["rows"]}


# ------------------------------------------------------------------ exit codes
def test_one_of_ten_jobs_over_budget_fails_and_is_named_with_its_component(cli, ten_jobs):
    ran = cli("check")
    assert (ran.exit_code, ran.err) == (1, "")
    assert ran.out.splitlines()[1].split()[:2] == ["OVER", "full"]
    last = ran.out.splitlines()[-1]
    assert last.startswith("OVER: 10 checks, 1 over budget: full on h100-sxm-80gb (optimizer_states)")


@pytest.mark.parametrize(
    ("keys", "code"),
    [
        ("", 0),
        (", limit: 14 GiB", 0),
        (", limit: 1 GiB", 1),
        (", limit: 1 GiB, level: warn", 0),
        (", components: {logits: 1 KiB}", 1),
        (", components: {logits: 100 GiB}", 0),
        (", max_increase: 3%", 3),
        (", max_increase: 3%, level: warn", 3),
        (", max_increase: 3%, limit: 1 GiB", 1),
        (", max_increase: 3%, limit: 1 GiB, level: warn", 3),
    ],
)
def test_exit_codes(cli, one, keys, code):
    one(keys)
    assert cli("check").exit_code == code


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ("model: llama-3.2-8b, config: lora, gpu: t4", "budgets.1.model: unknown model 'llama-3.2-8b'; did you mean 'llama-3"),
        ("model: gpt2, config: lorra, gpu: t4", "budgets.1.config: unknown training config 'lorra'; did you mean 'lora'?"),
        ("model: gpt2, config: lora, gpu: rtx490", "budgets.1.gpu: unknown GPU 'rtx490'; did you mean 'rtx4090'?"),
        ("model: gpt2, config: lora, gpus: [t4, rtx490]", "budgets.1.gpus.1: unknown GPU 'rtx490'; did you mean 'rtx4090'?"),
        ("model: gpt2, config: lora, gpu: t4, limit: 22", "budgets.1.limit: expected"),
        ("model: gpt2, config: lora, gpu: t4, limit: 22 Gi", "budgets.1.limit: '22 Gi' has an unknown unit"),
        ("model: gpt2, config: lora, gpu: t4, limits: 22 GiB", "budgets.1.limits: unknown key; did you mean 'limit'?"),
        ("model: gpt2, config: lora, gpu: t4, max_increase: much", "budgets.1.max_increase: 'much' is not an increase"),
        ("model: gpt2, config: lora, gpu: t4, components: {activation: 1 GiB}", "unknown component 'activation'; did you mean 'activations'?"),
        ("model: gpt2, config: lora, gpu: t4, level: erro", "budgets.1.level: expected error or warn, got 'erro'; did you mean 'error'?"),
        ("model: gpt2, config: lora, gpu: local", "budgets.1.gpu: local is another GPU on every machine"),
        ("model: gpt2, config: lora, gpus: [t4, T4]", "budgets.1.gpus.1: 'T4' is given twice"),
        ("model: gpt2, config: lora, gpus: []", "budgets.1: gpus: required key is missing"),
        ("model: gpt2, config: lora, gpu: t4, gpus: [t4]", "both gpu and gpus given"),
        ("config: lora, gpu: t4", "budgets.1: model: required key is missing"),
        ("model: gpt2, config: nowhere.yaml, gpu: t4", "budgets.1.config: nowhere.yaml: no such file"),
        (f"model: {'m' * 300}, config: lora, gpu: t4", "budgets.1.model: 'mmm"),
        ('model: "a\\0b", config: lora, gpu: t4', "budgets.1.model: "),
    ],
)  # fmt: skip
def test_a_mistake_is_bad_input_whatever_the_other_jobs_say(refused, budget, keys, said):
    budget(
        "version: 1\nbudgets:\n  - {name: over, model: llama-8b, config: bf16-adamw, gpu: t4, max_increase: 1%}\n"
        f"  - {{name: mistaken, {keys}}}\n"
    )
    line = refused("check")
    assert line.startswith("memplan: memplan-budget.yaml:4: ")
    assert said in line


def test_all_mistakes_are_told_at_once_in_reading_order(cli, budget):
    budget(
        "version: 1\nbudgets:\n"
        "  - {name: a, model: llama-9b, config: lorra, gpus: [rtx490], limit: 1 Gi}\n"
        "  - {name: a, model: gpt2, config: lora, gpu: t5}\n"
    )
    ran = cli("check")
    assert (ran.exit_code, ran.out) == (2, "")
    keys = [line.split(": ")[1:3] for line in ran.err.splitlines()]
    assert [place for place, _ in keys] == ["memplan-budget.yaml:3"] * 4 + ["memplan-budget.yaml:4"] * 2
    assert sorted(key for _, key in keys[:4]) == [
        "budgets.0.config",
        "budgets.0.gpus.0",
        "budgets.0.limit",
        "budgets.0.model",
    ]


def test_a_mistake_in_a_training_config_names_both_files(refused, write, budget):
    write("jobs/my.yaml", "description: mine\nmicro_batch_siz: 2\n")
    budget("version: 1\nbudgets: [{name: a, model: gpt2, config: jobs/my.yaml, gpu: t4}]\n")
    assert "memplan-budget.yaml:2: budgets.0.config: jobs/my.yaml:2: micro_batch_siz: unknown key" in refused("check")


def test_what_is_not_modelled_is_no_answer(cli, write, budget):
    write("my.yaml", "description: sharded\nparallel: {tensor: 2}\n")
    budget(
        "version: 1\nbudgets:\n  - {name: sharded, model: gpt2, config: my.yaml, gpu: t4}\n"
        "  - {name: fine, model: gpt2, config: lora, gpu: t4}\n"
    )
    ran = cli("check", "--json")
    assert ran.exit_code == 3
    assert statuses(ran) == {("sharded", "t4"): "cannot", ("fine", "t4"): "within"}
    assert "tensor parallelism is not modelled" in cli("check").out


@pytest.mark.parametrize("text", ["", "version: 1\n", "version: 1\nbudgets: []\n", "[]", "version: 2\nbudgets: []\n"])
def test_a_budget_without_jobs_is_no_success(cli, budget, text):
    budget(text)
    ran = cli("check")
    assert (ran.exit_code, ran.out) == (2, "")


def test_a_missing_budget_is_bad_input(refused, folder):
    said = refused("check")
    assert said.startswith("memplan: memplan-budget.yaml: no such file; a first one may say {version: 1")


def test_the_first_budget_that_is_offered_is_one(cli, budget):
    budget(FIRST)
    assert cli("check").exit_code == 0


# ------------------------------------------------------------------ limits
def test_a_matrix_of_gpus_gives_one_result_each(cli, budget):
    budget("version: 1\nbudgets: [{name: a, model: gpt2, config: lora, gpus: [t4, RTX 4090, h100]}]\n")
    assert statuses(cli("check", "--json")) == {("a", gpu): "within" for gpu in ("t4", "rtx4090", "h100-sxm-80gb")}


def test_limits_are_those_of_a_plan(cli, budget):
    plan = memplan.job("llama-8b", config="qlora").plan("rtx4090", simulated=True)
    for basis, size in (("expected", plan.expected_bytes), ("upper", plan.upper_bytes)):
        for limit, code in ((size, 0), (size - 1, 1)):
            budget(
                f"version: 1\nbudgets: [{{name: a, model: llama-8b, config: qlora, gpu: rtx4090, limit: {limit} bytes, basis: {basis}}}]\n"
            )
            ran = cli("check", "--json")
            assert ran.exit_code == code
            (row,) = ran.data["rows"]
            assert row["components"] == {name: size for name, size in plan.components.items() if size}
            assert row["headroom_bytes"] == limit - size == row["limit_bytes"] - row["needed_bytes"]


def test_without_a_limit_the_gpu_is_the_limit(cli, budget):
    budget("version: 1\nbudgets: [{name: a, model: llama-8b, config: bf16-adamw, gpus: [rtx4090, h100-nvl-94gb]}]\n")
    ran = cli("check", "--json")
    assert statuses(ran) == {("a", "rtx4090"): "over", ("a", "h100-nvl-94gb"): "within"}
    assert all(row["limit_bytes"] == row["usable_bytes"] for row in ran.data["rows"])


@pytest.mark.parametrize("basis", ["expected", "upper"])
def test_a_job_that_does_not_fit_its_gpu_is_within_no_limit(cli, budget, basis):
    budget(
        f"version: 1\ndefaults: {{model: llama-8b, limit: 100 GiB, basis: {basis}}}\nbudgets:\n"
        "  - {name: full, config: bf16-adamw, gpu: rtx4090}\n  - {name: warned, config: tier1, gpu: rtx4090, level: warn}\n"
        "  - {name: tight, config: bf16-adamw, gpu: h100, set: {sequence_length: 2304}}\n"
    )
    ran = cli("check", "--json")
    rows = {(row["name"], row["gpu"]): row for row in ran.data["rows"]}
    fits = {"expected": "within", "upper": "over"}[basis]
    assert ran.exit_code == 1
    assert {key: row["status"] for key, row in rows.items()} == {
        ("full", "rtx4090"): "over",
        ("warned", "rtx4090"): "warn",
        ("tight", "h100-sxm-80gb"): fits,
    }
    assert rows["full", "rtx4090"]["limit_bytes"] == rows["full", "rtx4090"]["usable_bytes"] < 100 * 2**30
    assert "over the 23.65 GiB usable on rtx4090" in rows["full", "rtx4090"]["findings"][0]["message"]
    assert not any(row["status"] == "within" and row["verdict"] == "no" for row in rows.values())


def test_a_component_over_its_limit_is_named(cli, one):
    one(", components: {logits: 1 KiB, weights: 100 GiB}")
    ran = cli("check", "--json")
    (row,) = ran.data["rows"]
    (finding,) = row["findings"]
    assert (finding["rule"], finding["component"], finding["limit_bytes"]) == ("component", "logits", 1024)
    assert finding["bytes"] == row["components"]["logits"]
    assert "job on t4 (logits)" in ran.data["answer"]


def test_the_worst_job_comes_first(cli, budget):
    jobs = [
        ("within", "60 GiB", "error"),
        ("warn", "1 GiB", "warn"),
        ("over", "20 GiB", "error"),
        ("worse", "2 GiB", "error"),
    ]
    lines = "".join(
        f"  - {{name: {n}, model: llama-8b, config: lora, set: {{stack: bundled}}, gpu: h100, limit: {x}, level: {v}}}\n"
        for n, x, v in jobs
    )
    budget(f"version: 1\nbudgets:\n{lines}")
    assert [row["name"] for row in cli("check", "--json").data["rows"]] == ["worse", "over", "warn", "within"]


def test_paths_are_relative_to_the_budget(cli, write, folder):
    write("ci/train.yaml", "description: mine\nmicro_batch_size: 2\n")
    write("ci/model/config.json", json.dumps({
        "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": 1000,
    }))  # fmt: skip
    write(
        "ci/b.yaml",
        "version: 1\nbudgets: [{name: a, model: model, config: ./train.yaml, gpu: t4}, {name: b, model: model/config.json, config: train.yaml, gpu: t4}]\n",
    )
    first = cli("check", "ci/b.yaml", "--json")
    assert first.exit_code == 0
    assert len({row["device_bytes"] for row in first.data["rows"]}) == 1


def test_a_short_model_takes_a_shipped_config(cli, budget):
    budget(
        "version: 1\nbudgets: [{name: a, model: gpt2, config: lora, gpu: t4}, {name: b, model: llama-8b, config: lora, gpu: h100}]\n"
    )
    ran = cli("check", "--json")
    needed = {row["name"]: row["device_bytes"] for row in ran.data["rows"]}
    for name, model, gpu in (("a", "gpt2", "t4"), ("b", "llama-8b", "h100")):
        assert memplan.job(model, config="lora").plan(gpu, simulated=True).expected_bytes == needed[name]


def test_keys_of_the_config_can_be_set(cli, budget):
    budget(
        "version: 1\ndefaults: {model: llama-8b, gpu: rtx4090, set: {micro_batch_size: 2}}\nbudgets:\n"
        "  - {name: a, config: qlora, set: {sequence_length: 1024, kernels.optimizer: fused}}\n"
    )
    job = memplan.job("llama-8b", config="qlora", set={"kernels.optimizer": "fused"})
    plan = job.plan("rtx4090", micro_batch_size=2, sequence_length=1024, simulated=True)
    assert [row["device_bytes"] for row in cli("check", "--json").data["rows"]] == [plan.expected_bytes]


def test_a_mistyped_setting_gets_the_nearest_match(refused, budget):
    budget("version: 1\nbudgets:\n  - {name: a, model: gpt2, config: lora, gpu: t4, set: {micro_batch_siz: 2}}\n")
    line = refused("check")
    assert line.startswith("memplan: memplan-budget.yaml:3: budgets.0.config: set: micro_batch_siz: ")
    assert "did you mean 'micro_batch_size'" in line
