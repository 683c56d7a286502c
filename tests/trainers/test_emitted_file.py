"""Starting files for trainers: they read back to the same bytes, or are refused."""

import pytest

import memplan
from memplan.errors import CannotAnswerError, UnknownNameError
from memplan.library.answers.planned_job import plan_by_share

JOBS = [
    ("axolotl", "qlora"),
    ("trl", "lora"),
    ("trl", "mixed-adamw"),
    ("llama-factory", "qlora"),
    ("llama-factory", "bf16-adamw"),
]


@pytest.mark.parametrize(("trainer", "config"), JOBS)
def test_a_starting_file_reads_back_to_the_same_bytes(tmp_path, trainer, config):
    options = {"config": config, "gpu": "a100-80gb", "micro_batch_size": 2, "sequence_length": 512}
    path = tmp_path / "start.yaml"
    path.write_text(memplan.emit("llama-3.2-1b", trainer, **options))
    said = plan_by_share("llama-3.2-1b", stack=trainer, **options, set=["padded_rows=true"])  # as trainers pad
    assert plan_by_share(path, gpu="a100-80gb").expected_bytes == said.expected_bytes
    assert memplan.import_file(path).to_dict()["keys"]["unknown"] == []


def test_a_trainer_is_found_whatever_its_case_and_separators():
    options = {"config": "lora", "gpu": "h100"}
    texts = {memplan.emit("llama-3.2-1b", name, **options) for name in ("llama-factory", "LLaMAFactory")}
    assert len(texts) == 1


@pytest.mark.parametrize("trainer", ["axolotl", "trl", "llama-factory"])
def test_a_starting_file_says_that_nothing_runs_under_autocast(tmp_path, trainer):
    options = {"config": "lora", "gpu": "a100-80gb", "micro_batch_size": 1, "sequence_length": 512}
    path = tmp_path / "start.yaml"
    path.write_text(memplan.emit("llama-3.2-1b", trainer, **options, set=["autocast=false"]))
    assert plan_by_share(path, gpu="a100-80gb").training["autocast"] is False


@pytest.mark.parametrize("trainer", ["axolotl", "trl", "llama-factory"])
def test_a_starting_file_evaluates_where_the_config_does(tmp_path, trainer):
    options = {"config": "lora", "gpu": "a100-80gb", "micro_batch_size": 2, "sequence_length": 512}
    path = tmp_path / "start.yaml"
    path.write_text(memplan.emit("llama-3.2-1b", trainer, **options, set=["evaluation=true"]))
    training = memplan.import_file(path).to_dict()["training"]
    assert (training["evaluation"], training["evaluation_batch_size"]) == (True, 2)


def test_an_evaluation_that_a_trainer_has_no_keys_for_is_refused():
    with pytest.raises(CannotAnswerError, match="it differs in evaluation"):
        memplan.emit("qwen3-0.6b", "torchtitan", config="fp32-adamw", gpu="a100-80gb", set=["evaluation=true"])


def test_fp16_without_autocast_is_written_where_a_trainer_can_say_it():
    options = {"config": "lora", "gpu": "a100-80gb", "sequence_length": 512}
    settings = ["autocast=false", "compute_dtype=fp16", "weights.default=fp16"]
    text = memplan.emit("llama-3.2-1b", "trl", **options, set=settings)
    assert "bf16: false\n" in text
    assert "fp16: true" not in text
    with pytest.raises(CannotAnswerError, match=r"it differs in .*compute_dtype"):
        memplan.emit("llama-3.2-1b", "axolotl", **options, set=settings)


def test_a_starting_file_for_torchtitan_is_toml(tmp_path):
    options = {"gpu": "h200", "set": ["weights.default=bf16"], "micro_batch_size": 1, "sequence_length": 512}
    path = tmp_path / "start.toml"
    path.write_text(memplan.emit("llama-3-8b", "torchtitan", **options))
    assert memplan.import_file(path).to_dict()["model"]["given"] == "llama3-8B"
    assert plan_by_share(str(path), gpu="h200").training["stack"] == "torchtitan@0.2.2"
    path.write_text(memplan.emit("qwen3-0.6b", "torchtitan", **options))
    assert plan_by_share(str(path), gpu="h200").memory.setup.profile.loss == "fp32"
    with pytest.raises(CannotAnswerError, match="torchtitan has llama-3-8b"):
        memplan.emit("llama-3.2-1b", "torchtitan", **options)


def test_deepspeeds_file_says_stage_precision_and_batch(tmp_path):
    path = tmp_path / "ds.json"
    settings = ["parallel.zero_stage=2", "parallel.engine=deepspeed", "parallel.deepspeed.reduce_bucket_size=1000"]
    path.write_text(memplan.emit("llama-3.2-1b", "deepspeed", config="lora", micro_batch_size=3, set=settings))
    answer = memplan.import_file(path).to_dict()
    parallel = {"zero_stage": 2, "engine": "deepspeed", "deepspeed": {"reduce_bucket_size": 1000}}
    assert (answer["role"], answer["training"]["parallel"]) == ("launcher", parallel)
    assert (answer["training"]["micro_batch_size"], answer["training"]["compute_dtype"]) == (3, "bf16")
    with pytest.raises(CannotAnswerError, match="engine: torch is not what DeepSpeed's file starts"):
        memplan.emit("llama-3.2-1b", "deepspeed", config="lora", set=["parallel.zero_stage=3", "parallel.data=8"])


def test_what_a_trainer_has_no_keys_for_is_refused():
    with pytest.raises(CannotAnswerError, match="cannot be said in axolotl's keys"):
        memplan.emit("llama-3.2-1b", "axolotl", config="mixed-adamw", gpu="a100-80gb")
    with pytest.raises(UnknownNameError, match="llama-factory"):
        memplan.emit("llama-3.2-1b", "llama-factori", config="lora", gpu="a100-80gb")


def test_a_budget_job_may_name_a_trainers_file(tmp_path, cli):
    (tmp_path / "job.yaml").write_text(memplan.emit("llama-3.2-1b", "trl", config="lora", gpu="a100-80gb"))
    (tmp_path / "budget.yaml").write_text("version: 1\nbudgets:\n  - {name: one, model: job.yaml, gpu: a100-80gb}\n")
    assert cli("check", tmp_path / "budget.yaml").exit_code == 0
