"""Jobs of PPO: a drawn policy, with models of values and of rewards that are small or large beside it."""

from dataclasses import replace
from random import Random
from typing import Any

from tests.survey.drawn_jobs import Job
from tests.survey.drawn_models import LEARNED
from tests.survey.stacks.drawn_stack_jobs import WINDOWED, StackJob

JUDGES = ("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "phi3")
"""Families of models of values and rewards, which have a head of scores in transformers."""


UNANSWERED = (*LEARNED, "lfm2", "lfm2_moe")
"""Families whose policies are refused: rows of learned positions, and convolutions beside attention; judges' are drawn in their place."""


def policy_job(rng: Random, job: StackJob, training: dict[str, Any]) -> StackJob:
    """Return a job whose model is the policy of PPO, in one dtype as its loop runs it."""
    dtype, weights = rng.choice(("bf16", "bf16", "fp32")), dict(training["weights"])
    coded = {role: name for role, name in weights.items() if role == "hidden_matrix" and name.startswith("nf4")}
    training |= {"weights": {"default": dtype, **coded}, "compute_dtype": dtype}
    training["optimizer"] = {"default": "adamw-fp32" if dtype == "fp32" or "adapter" in training else "adamw-bf16"}
    for key in (
        "activation_checkpointing",
        "clip_gradients",
        "loss_scaling",
        "autocast",
        "zero_gradients",
        "evaluation",
        "offload",
    ):
        training.pop(key, None)
    training["gradient_accumulation_steps"] = accumulation = rng.choice((1, 2, 3, 4))
    training["sequence_length"] = length = max(6, min(160, int(training["sequence_length"])))
    method: dict[str, Any] = training["method"]
    method["rollout"] = {"completion_length": rng.choice((2, min(length - 1, 7), max(1, min(length // 3, 12))))}
    parts = [number for number in (1, 2, accumulation) if accumulation % number == 0]
    method["ppo"] = {
        "epochs": rng.choice((1, 4)),
        "mini_batches": rng.choice(parts),
        "forward_batch": rng.choice((1, 2, 3, 64)),
    }
    policy, vocabulary = job.job.model, job.job.model.get("text_config", job.job.model)["vocab_size"]
    if job.family in UNANSWERED or any("conv" in str(kind) for kind in policy.get("layer_types", ())):
        policy = _judge(rng, vocabulary)
        if policy["model_type"] in WINDOWED and rng.random() < 0.5:
            policy["sliding_window"] = rng.choice((5, 30, 90))
        training.get("adapter", {}).pop("targets", None)
    for role in ("value_model", "reward_model"):
        method[role] = {"model": _judge(rng, vocabulary), "dtype": rng.choice((dtype, dtype, "bf16", "fp32"))}
    if rng.random() < 0.2:
        method["reward_model"]["weights"] = rng.choice(("nf4", "nf4-dq"))
    return replace(job, job=Job(policy, training))


def _judge(rng: Random, vocabulary: int) -> dict[str, Any]:
    """Return a model of values or rewards, small or large."""
    family, heads, width = rng.choice(JUDGES), rng.choice((2, 4, 8)), rng.choice((16, 32, 64))
    model: dict[str, Any] = {
        "model_type": family,
        "hidden_size": heads * width,
        "num_hidden_layers": rng.choice((1, 2, 4, 8)),
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice((1, 2, heads)),
        "intermediate_size": rng.choice((40, 96, 512)),
        "vocab_size": vocabulary,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": rng.random() < 0.3,
    }
    return model | ({"head_dim": width} if family in ("gemma", "gemma2", "qwen3") else {})
