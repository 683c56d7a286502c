"""Plans of PPO: a policy, a model of values that trains beside it, and what judges answers, as a user sees them."""

import pytest

from memplan.errors import CannotAnswerError, InvalidFileError
from memplan.library.answers.planned_job import plan_by_share
from tests.plan.traced_steps import hold_traced, records_of

POLICY, JUDGE = "qwen2.5-0.5b", "qwen2.5-1.5b"
TRACED = records_of("ppo_steps.json")
"""What TRL's own code did, on tensors without memory: a job drawn by ``--stack trl --at 1.12 --stage ppo``, smaller ones alike, and one of GRPO within windows."""


@TRACED
def test_a_plan_is_what_trls_own_code_did(record):
    hold_traced(record, 0.005)


def plan(config="bf16-adamw", stack="trl@1.12", **settings):
    given = {"method.stage": "ppo", "method.reward_model.model": POLICY, "sequence_length": 128}
    given |= {key.replace("__", "."): value for key, value in settings.items()}
    return plan_by_share(POLICY, gpu="h200", config=config, stack=stack, set={k: v for k, v in given.items() if v})


def test_all_four_models_are_there_and_two_of_them_train():
    small, large = plan(), plan(method__value_model__model=JUDGE)
    weights = {role: next(iter(small.memory.components)).values[role] for role in ("value_model", "reward_model")}
    assert weights["value_model"] == weights["reward_model"]
    gone = large.components["weights"] - small.components["weights"]
    assert large.components["optimizer_states"] - small.components["optimizer_states"] > 1.9 * gone


def test_states_of_a_model_of_values_are_of_the_same_optimizer_and_of_its_own_width():
    names = {
        name: plan(
            **{"optimizer.default": name, "method.reward_model.dtype": "fp32"}
        ).memory.setup.value_model.setup.optimizer_names
        for name in ("adamw-bf16", "adamw-4bit-torchao", "lion-bnb")
    }
    assert {name: {*own.values()} for name, own in names.items()} == {
        "adamw-bf16": {"adamw-fp32"},
        "adamw-4bit-torchao": {"adamw-4bit-torchao"},
        "lion-bnb": {"lion-bnb"},
    }


def test_a_judge_of_fewer_words_is_said_to_be_one():
    judged = plan(method__reward_model__model="llama-3.2-1b")
    assert any("128,256 words of the policy's 151,936" in line for line in judged.memory.assumptions)


def test_logits_of_all_answers_stay_and_are_there_three_times_as_they_are_joined():
    sizes = [dict(plan(gradient_accumulation_steps=n).memory.instants) for n in (8, 16)]
    row = 4 * 151_936 * 53
    assert sizes[1]["generation"] - sizes[0]["generation"] > 3 * 8 * row
    assert 8 * row < sizes[1]["optimizer step"] - sizes[0]["optimizer step"] < 9 * row


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"stack": "trl"}, CannotAnswerError, "--stack trl@1.12"),
        ({"activation_checkpointing": "full"}, CannotAnswerError, "never switches checkpointing on"),
        ({"clip_gradients": "true"}, CannotAnswerError, "clips no gradients"),
        ({"parallel.data": 2}, CannotAnswerError, "ppo on several GPUs"),
        ({"weights.default": "fp32"}, InvalidFileError, "out of autocast"),
        ({"method.reward_model.model": None}, InvalidFileError, "name one: method.reward_model.model"),
        ({"method.value_model.weights": "nf4", "method.value_model.model": POLICY}, InvalidFileError, "codes do not"),
        ({"method.ppo.mini_batches": 3}, InvalidFileError, "not divided by 3"),
        (
            {"method.rollout.engine": "vllm", "method.rollout.completion_length": 20},
            CannotAnswerError,
            "by the policy itself",
        ),
    ],
)
def test_what_its_loop_never_does_is_refused_by_name(settings, error, text):
    with pytest.raises(error, match=text):
        plan(**settings)


def test_a_command_of_trls_script_is_planned_with_its_own_keys(tmp_path):
    command = "python examples/scripts/ppo/ppo_tldr.py --dataset_name a/b --output_dir o --per_device_train_batch_size 2 --dtype bfloat16"
    paths = "--sft_model_path Qwen/Qwen2.5-0.5B --reward_model_path Qwen/Qwen2.5-1.5B --gradient_accumulation_steps 4"
    (tmp_path / "job.sh").write_text(f"{command} {paths} --num_mini_batches 2 --local_rollout_forward_batch_size 4\n")
    said = {"method.ppo.mini_batches": 2, "method.ppo.forward_batch": 4, "gradient_accumulation_steps": 4}
    said |= {"micro_batch_size": 2, "sequence_length": 512 + 53, "padded_rows": "true", "kernels.optimizer": "fused"}
    own = plan(**said, **{"method.reward_model.model": JUDGE})
    assert plan_by_share(str(tmp_path / "job.sh"), gpu="h200").memory.requested_bytes == own.memory.requested_bytes


def test_a_policy_by_a_trainer_with_another_loop_is_refused_with_what_plans_one(tmp_path):
    (tmp_path / "ppo.yaml").write_text(
        "model_name_or_path: Qwen/Qwen2.5-0.5B\nreward_model: a/b\nstage: ppo\ndo_train: true\nfinetuning_type: full\n"
        "dataset: a\ntemplate: qwen\noutput_dir: o\nbf16: true\n"
    )
    with pytest.raises(
        CannotAnswerError, match=r"ppo by a loop of this trainer's own is not modelled.*--stack trl@1.12"
    ):
        plan_by_share(str(tmp_path / "ppo.yaml"), gpu="h200")


PROGRAM = """
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, BitsAndBytesConfig
from trl.experimental.ppo import PPOConfig, PPOTrainer
codes = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="bfloat16")
policy = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B", quantization_config=codes, dtype="bfloat16")
scores = AutoModelForSequenceClassification.from_pretrained("Qwen/Qwen2.5-1.5B", num_labels=1, dtype="bfloat16")
values = AutoModelForSequenceClassification.from_pretrained("Qwen/Qwen2.5-0.5B", num_labels=1, dtype="float32")
args = PPOConfig(output_dir="o", per_device_train_batch_size=2, response_length=20, bf16=BF16)
adapters = LoraConfig(r=8, target_modules=["q_proj"], task_type="CAUSAL_LM")
trainer = PPOTrainer(args=args, model=policy, reward_model=scores, value_model=values, train_dataset=d, peft_config=adapters)
trainer.train()
"""


def test_models_of_a_program_are_those_that_it_gives_its_trainer(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM.replace("BF16", "False"))
    setup = plan_by_share(str(tmp_path / "train.py"), gpu="h200", set={"sequence_length": 100}).memory.setup
    assert (setup.format_names["hidden_matrix"], setup.config.adapter.dtype) == ("nf4", "fp32")
    seconds = [(setup.value_model, "fp32", 896), (setup.reward_model, "bf16", 1536)]
    assert [(one.setup.config.compute_dtype, one.model.spec.hidden_size) for one, *_ in seconds] == [
        x[1:] for x in seconds
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (PROGRAM.replace("BF16", "True"), "bf16 with a 4-bit policy"),
        (PROGRAM.replace("AutoModelForCausalLM", "AutoModelForCausalLMWithValueHead"), "PPOTrainer of TRL before 0.12"),
    ],
)
def test_a_program_whose_policy_another_trainer_has_or_none_runs_is_refused(text, says, tmp_path):
    (tmp_path / "train.py").write_text(text)
    with pytest.raises(CannotAnswerError, match=says):
        plan_by_share(str(tmp_path / "train.py"), gpu="h200", set={"sequence_length": 100})
