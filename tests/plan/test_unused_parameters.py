"""Replicas that look for unused parameters end with an error beside reentrant checkpointing, as torch 2.13.0 does."""

import json

import pytest

from memplan.errors import CannotAnswerError
from tests.survey.stacks.drawn_stack_jobs import StackJob
from tests.survey.stacks.judged_stack_jobs import planned
from tests.survey.stacks.stack_records import catalog_at

MODEL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 97,
}
TRAINING = {
    "activation_checkpointing": "full",
    "adapter": {"kind": "lora", "rank": 4, "dtype": "fp32"},
    "compute_dtype": "bf16",
    "description": "small",
    "gradient_accumulation_steps": 1,
    "micro_batch_size": 1,
    "optimizer": {"default": "adamw-fp32"},
    "sequence_length": 64,
    "stack": "transformers",
    "weights": {"default": "bf16"},
}


def plan(reentrant, **parallel):
    training = {**TRAINING, "parallel": {"data": 2, **parallel}}
    job = {"card": "9.0", "model": MODEL, "reentrant": reentrant, "training": training}
    return planned(StackJob.read(json.dumps(job)), catalog_at("5.23.0"))


@pytest.mark.parametrize("parallel", [{}, {"unused_parameters": True}])
def test_a_search_for_unused_parameters_is_refused_beside_reentrant_checkpointing(parallel):
    with pytest.raises(CannotAnswerError, match=r"ready only once.*unused_parameters: false"):
        plan(True, **parallel)


@pytest.mark.parametrize(
    ("reentrant", "parallel"), [(True, {"unused_parameters": False}), (False, {}), (True, {"data": 1})]
)
def test_one_of_both_alone_is_planned(reentrant, parallel):
    assert plan(reentrant, **parallel).requested_bytes > 0
