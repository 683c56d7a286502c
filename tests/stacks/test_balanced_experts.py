"""The loss of unbalanced experts, held against instants of the trace of TRL 1.16.0's SFTTrainer and of transformers 5.23.0's Trainer."""

import pytest

from memplan.errors import CannotAnswerError
from tests.survey.drawn_jobs import Job
from tests.survey.stacks.drawn_stack_jobs import StackJob
from tests.survey.stacks.judged_stack_jobs import planned

MODEL = {
    "model_type": "qwen3_moe", "hidden_size": 512, "intermediate_size": 1024, "moe_intermediate_size": 128, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 4096, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
    "tie_word_embeddings": False, "max_position_embeddings": 8192,
}  # fmt: skip
JOB = {
    "description": "",
    "stack": "trl",
    "compute_dtype": "bf16",
    "weights": {"default": "bf16"},
    "micro_batch_size": 2,
}
ADAPTED = {"adapter": {"kind": "lora", "rank": 8, "dtype": "fp32", "dropout": 0.05, "targets": ["q_proj", "v_proj"]}}
LOGITS_BYTES = 6 * 4096 * 128 * 2
"""Of the routers of six layers, for 4,096 tokens in 16 bits."""


def instants(catalog, model=MODEL, **training):
    training = {"optimizer": {"default": "adamw-bf16"}, "sequence_length": 2048, **JOB, **training}
    return dict(planned(StackJob(Job(model, training), "9.0", reentrant=False), catalog).instants)


TRACED = {
    "checkpointed": (
        {"sequence_length": 4096, "activation_checkpointing": "full"},
        {"loss backward": 1_365_979_140, "layer 6 backward": 1_578_219_070, "layer 1 backward": 1_785_979_710},
    ),
    "adapted": (
        {"activation_checkpointing": "none", "optimizer": {"default": "adamw-fp32"}, **ADAPTED},
        {"loss backward": 1_308_006_322, "layer 6 backward": 1_119_102_940, "layer 1 backward": 528_518_540},
    ),
    "transformers": (
        {"activation_checkpointing": "none", "stack": "transformers", "method": {"balances": True}},
        {"forward": 2_194_914_962, "loss backward": 2_203_253_902, "layer 1 backward": 1_501_963_070},
    ),
}


@pytest.mark.parametrize("name", TRACED)
def test_routers_logits_stay_until_their_layers_backward(catalog, name):
    training, traced = TRACED[name]
    answer = instants(catalog, **training)
    assert {key: answer[key] for key in traced} == {
        key: pytest.approx(value, rel=1e-4) for key, value in traced.items()
    }


@pytest.mark.parametrize("stack", ["trl", "trl@1.6", "transformers"])
def test_the_loss_is_on_where_the_trainer_asks_the_models_own_factor(catalog, stack):
    own, off, on = (
        instants(catalog, stack=stack, **({} if balances is None else {"method": {"balances": balances}}))
        for balances in (None, False, True)
    )
    assert on["loss backward"] - off["loss backward"] == LOGITS_BYTES
    assert own == (on if stack == "trl" else off)


def test_a_model_without_experts_has_none(catalog):
    experts = ("moe_intermediate_size", "num_experts", "num_experts_per_tok", "norm_topk_prob")
    dense = {**{key: value for key, value in MODEL.items() if key not in experts}, "model_type": "qwen3"}
    assert instants(catalog, dense) == instants(catalog, dense, method={"balances": False})


def test_a_model_whose_result_has_no_place_for_routers_logits_is_refused(catalog):
    vision = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    model = {
        "model_type": "internvl",
        "text_config": MODEL,
        "vision_config": {**vision, "image_size": 28, "patch_size": 14},
    }
    with pytest.raises(CannotAnswerError, match="router_logits"):
        instants(catalog, model)
    assert instants(catalog, model, method={"balances": False})


def test_a_mixture_names_what_its_router_returns_until_it_ends(catalog):
    small = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16, "vocab_size": 32}
    small |= {"intermediate_size": 64, "moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2}
    small |= {"norm_topk_prob": False, "max_position_embeddings": 2048}
    wide = {"weights": {"default": "fp32"}, "optimizer": {"default": "adamw-fp32"}, "compute_dtype": "fp32"}
    job = {**wide, "stack": "plain-loop", "sequence_length": 256, "activation_checkpointing": "full"}
    forward = instants(catalog, {**MODEL, **small}, **job)["forward"]
    traced = 8_956_292  # ``Qwen3MoeSparseMoeBlock.forward`` of transformers 5.24.0
    assert abs(forward - traced) < 2 * 256 * 8 * 4  # less than a router's fp32 logits
