"""Units of FSDP2 that are not resharded after forward: what stays gathered until its own backward, and what is refused."""

import pytest

from memplan.errors import CannotAnswerError
from memplan.library.answers.planned_job import plan_by_share

MIXED = {"parallel.zero_stage": 3, "weights.default": "fp32", "optimizer.default": "adamw-fp32"}
STAYS = {"parallel.reshard_after_forward": False}


def planned(stack="trl", model="llama-3.2-1b", **keys):
    return plan_by_share(model, gpu="h100", gpus=8, stack=stack, config="bf16-adamw", set={**MIXED, **keys})


@pytest.mark.parametrize(
    ("stack", "model", "instant", "ahead", "embedding"),
    [
        ("trl", "llama-3.2-1b", "loss backward", 1, 0),  # where units are resharded, the last layer is gathered ahead
        ("torchtitan", "llama-3.1-8b", "head backward", 0, 128256 * 4096 * 2),  # the embedding is a unit apart
    ],
)
def test_all_layers_are_gathered_beside_the_head(stack, model, instant, ahead, embedding):
    again, stays = planned(stack, model), planned(stack, model, **STAYS)
    states, layers = again.memory.states.tensors, again.memory.model.spec.num_hidden_layers
    layer = sum(entry.tensor.elements * 8 * 2 for entry in states if "{}" in entry.tensor.name)
    assert stays.instants[instant] - again.instants[instant] == layer * (layers - ahead) + embedding
    assert stays.memory.persistent_bytes == again.memory.persistent_bytes
    assert stays.instants["optimizer step"] == again.instants["optimizer step"]


def test_fsdp1s_layers_stay_until_their_own_backward():
    flat = {"parallel.engine": "fsdp1"}
    stays, again = planned(**flat, **STAYS), planned(**flat)
    assert stays.memory.persistent_bytes == again.memory.persistent_bytes
    assert stays.instants["loss backward"] > again.instants["loss backward"]
    assert stays.instants["optimizer step"] == again.instants["optimizer step"]
    assert "SHARD_GRAD_OP" in " ".join(stays.memory.assumptions)


def test_the_answer_says_that_nothing_is_resharded():
    said = " ".join(planned(**STAYS).memory.assumptions)
    assert "one unit per layer, not resharded after forward" in said


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"stack": "axolotl"}, "not under axolotl"),
        ({"parallel.engine": "fsdp1", "adapter.kind": "lora"}, "as SHARD_GRAD_OP is modelled without adapters"),
        ({"evaluation": True}, "leaves all layers gathered"),
        ({"stack": "torchtitan", "compile": "layers"}, "compiled layers"),
        ({"stack": "torchtitan", "parallel.tensor": 2, "parallel.data": 4}, "tensor parallelism"),
    ],
)
def test_what_was_not_followed_is_refused(keys, reason):
    with pytest.raises(CannotAnswerError, match=reason):
        planned(**keys, **STAYS)
