"""Gated delta networks: transformers' own code traced, beside the formula, on small models of every kind."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("peft")

from memplan.errors import CannotAnswerError
from tests.survey.drawn_jobs import Job, compared
from tests.survey.stacks.drawn_stack_jobs import StackJob
from tests.survey.stacks.judged_stack_jobs import planned, traced

pytestmark = pytest.mark.thorough

SHAPE = {
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "full_attention_interval": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 97,
    "tie_word_embeddings": True,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 32,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
TRAINING = {
    "description": "test",
    "stack": "plain-loop",
    "weights": {"default": "bf16"},
    "compute_dtype": "bf16",
    "optimizer": {"default": "adamw-bf16"},
    "activation_checkpointing": "none",
    "sequence_length": 392,
    "micro_batch_size": 2,
}
AUTOCAST = {"stack": "transformers", "weights": {"default": "fp32"}, "optimizer": {"default": "adamw-fp32"}}
ADAPTED = {
    "activation_checkpointing": "full",
    "weights": {"default": "bf16", "hidden_matrix": "nf4"},
    "optimizer": {"default": "adamw-fp32"},
    "adapter": {"kind": "lora", "rank": 4, "dtype": "fp32", "targets": ["in_proj_qkvz", "out_proj", "q_proj"]},
}
FLA = {"kernels": {"linear_attention": "fla"}}
JOBS = {
    "dense": ("qwen3_5_text", {}, {}),
    "experts-autocast": ("qwen3_5_moe_text", EXPERTS, AUTOCAST),
    "joined-adapted": ("qwen3_next", EXPERTS, ADAPTED),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", JOBS)
def test_formula_and_trace_agree(name, catalog):
    family, sizes, training = JOBS[name]
    job = StackJob(Job({"model_type": family, **SHAPE, **sizes}, {**TRAINING, **training}), "8.0", reentrant=False)
    verdict = compared(job.job, planned(job, catalog), traced(job, catalog))
    assert verdict.outcome == "agrees", dict(verdict.differences)
    assert verdict.peak_share < 2e-4


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["qwen3_5_moe_text", "qwen3_next"])
def test_kernels_save_and_allocate_what_their_libraries_say(family, catalog):
    pytest.importorskip("fla", reason="needs fla-core and causal-conv1d")
    job = StackJob(Job({"model_type": family, **SHAPE, **EXPERTS}, {**TRAINING, **FLA}), "8.0", reentrant=False)
    verdict = compared(job.job, planned(job, catalog), traced(job, catalog))
    assert verdict.outcome == "agrees", dict(verdict.differences)


def test_kernels_need_less_and_are_named(catalog):
    model = {"model_type": "qwen3_5_text", **SHAPE}
    plain, kernels = (
        planned(StackJob(Job(model, {**TRAINING, **chosen}), "8.0", reentrant=False), catalog) for chosen in ({}, FLA)
    )
    assert kernels.requested_bytes < plain.requested_bytes
    assert any("linear attention fla" in text for text in kernels.assumptions)
    assert any("linear attention torch" in text for text in plain.assumptions)


def test_shapes_that_kernels_do_not_take_are_refused(catalog):
    wide = {"model_type": "qwen3_5_text", **SHAPE, "linear_key_head_dim": 320}
    with pytest.raises(CannotAnswerError, match="wider than 256"):
        planned(StackJob(Job(wide, {**TRAINING, **FLA}), "8.0", reentrant=False), catalog)
