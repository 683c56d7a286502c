"""Files, command lines and programs of TRL's two trainers of distillation."""

import pytest

from memplan.errors import MemplanError
from memplan.library.answers.planned_job import plan_by_share

FILE = {
    "model_name_or_path": "Qwen/Qwen2.5-0.5B-Instruct",
    "teacher_model_name_or_path": "Qwen/Qwen2.5-1.5B-Instruct",
    "dataset_name": "trl-lib/ultrafeedback-prompt",
    "dtype": "bfloat16",
    "output_dir": "out",
}
PROGRAM = """
from trl import {name}Config, {name}Trainer

args = {name}Config(output_dir="out", per_device_train_batch_size=2, model_init_kwargs={{"dtype": "bfloat16"}}, {more})
trainer = {name}Trainer("Qwen/Qwen2.5-0.5B-Instruct", teacher_model="Qwen/Qwen2.5-1.5B-Instruct", args=args, train_dataset=load())
trainer.train()
"""


def planned(tmp_path, length=1024, **keys):
    path = tmp_path / "distillation.yaml"
    path.write_text("\n".join(f"{key}: {value}" for key, value in (FILE | keys).items()), encoding="utf-8")
    return plan_by_share(str(path), gpu="h200", set={} if length is None else {"sequence_length": length})


def method(answer):
    return answer.training["method"]


def test_a_file_without_keys_of_gkds_is_one_of_the_core_trainer(tmp_path):
    own = method(planned(tmp_path))
    assert (own["trainer"], own["divergence"]) == ("distillation", "reverse-kl")
    assert (own["rollout"]["completion_length"], own["rollout"]["engine"]) == (512, "transformers")
    assert own["teacher"]["dtype"] == "bf16"
    with pytest.raises(MemplanError, match="no key bounds the prompt"):
        planned(tmp_path, length=None)


@pytest.mark.parametrize(("key", "value"), [("lmbda", 0.5), ("seq_kd", "false"), ("max_new_tokens", 64)])
def test_a_key_of_gkds_tells_its_trainer(tmp_path, key, value):
    own = method(planned(tmp_path, **{key: value}))
    assert (own["trainer"], own["divergence"]) == ("gkd", "jsd")


@pytest.mark.parametrize(
    ("beta", "divergence"), [(0, "forward-kl"), ("0.0", "forward-kl"), (0.5, "jsd"), (1.0, "reverse-kl")]
)
def test_beta_says_what_is_compared(tmp_path, beta, divergence):
    assert method(planned(tmp_path, beta=beta))["divergence"] == divergence


def test_weights_in_fp32_are_multiplied_in_fp32_whatever_bf16_says(tmp_path):
    answer = planned(tmp_path, dtype="float32", bf16="true")
    assert answer.training["compute_dtype"] == "fp32"
    assert method(answer)["teacher"]["dtype"] == "fp32"
    assert planned(tmp_path, dtype="float32", lmbda=0).training["compute_dtype"] == "bf16"


def test_the_core_trainers_script_quantises_the_student_alone(tmp_path):
    coded = {"load_in_4bit": "true", "use_peft": "true"}
    core, gkd = (method(planned(tmp_path, **coded, **more))["teacher"] for more in ({}, {"lmbda": 0}))
    assert (core["weights"], gkd["weights"]) == (None, "nf4")


def test_an_engine_on_the_same_gpu_takes_a_share_of_it(tmp_path):
    rollout = method(planned(tmp_path, use_vllm="true", max_completion_length=64))["rollout"]
    assert (rollout["engine"], rollout["completion_length"]) == ("vllm", 64)
    served = method(planned(tmp_path, use_vllm="true", vllm_mode="server"))["rollout"]
    assert served["engine"] == "server"


@pytest.mark.parametrize(
    ("name", "more", "trainer"),
    [("Distillation", "max_completion_length=256", "distillation"), ("GKD", "max_length=1024", "gkd")],
)
def test_a_program_says_which_trainer_it_makes(tmp_path, name, more, trainer):
    path = tmp_path / "train.py"
    path.write_text(PROGRAM.format(name=name, more=more), encoding="utf-8")
    answer = plan_by_share(str(path), gpu="h200", set={"sequence_length": 1024})
    assert method(answer)["trainer"] == trainer
    assert answer.training["micro_batch_size"] == 2


def test_a_teacher_on_a_server_is_refused(tmp_path):
    with pytest.raises(MemplanError, match="a server that a teacher runs on"):
        planned(tmp_path, teacher_model_server_url="http://localhost:8000")
