"""Jobs of families whose own code does what few families do, planned as that code was traced."""

import json

import pytest

from memplan.allocator.streams.stream_replay import Stream
from memplan.plan.reserve.simulation import events_of
from tests.survey.stacks.drawn_stack_jobs import StackJob
from tests.survey.stacks.judged_stack_jobs import planned
from tests.survey.stacks.stack_records import catalog_at

UNCOUNTED_BYTES = 2048
"""Rotary frequencies and a loop's scalars, which no plan counts."""
WHOLE_HEADS = """{"card": "8.0", "reentrant": false, "model": {"hidden_size": 256, "intermediate_size": 512,
"num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 2, "vocab_size": 512,
"max_position_embeddings": 1024, "tie_word_embeddings": false}, "training": {"description": "", "stack":
"plain-loop", "compute_dtype": "bf16", "weights": {"default": "bf16"}, "optimizer": {"default": "adamw-bf16"},
"activation_checkpointing": "none", "micro_batch_size": 2, "sequence_length": 256, "kernels": {"attention":
"flash"}}}"""
GROUPS = {"head_dim": 64, "num_key_value_heads": 2, "partial_rotary_factor": 1.0}
EXPERTS = {
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 64,
}
ROTATED: dict[str, tuple[int, dict[str, object]]] = {
    "glm": (24_047_420, GROUPS),
    "glm4": (27_207_484, GROUPS),
    "glm4_moe": (23_416_668, GROUPS | EXPERTS | {"n_routed_experts": 4, "n_shared_experts": 1, "use_qk_norm": False}),
    "gpt_neox": (19_034_428, {"rotary_pct": 1.0, "hidden_act": "gelu"}),
    "minimax_m2": (46_909_804, GROUPS | {"rotary_dim": 64, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "phi": (21_644_604, {"partial_rotary_factor": 1.0, "qk_layernorm": False}),
    "stablelm": (23_207_228, {"partial_rotary_factor": 1.0, "use_qkv_bias": False, "hidden_act": "silu"}),
}


@pytest.mark.parametrize("family", ROTATED)
def test_heads_that_are_rotated_whole_are_joined_with_nothing_and_copied(family):
    traced, keys = ROTATED[family]
    if family == "minimax_m2":
        keys = {key: value for key, value in keys.items() if key != "partial_rotary_factor"}
    job = json.loads(WHOLE_HEADS)
    job["model"].update(keys, model_type=family)
    plan = planned(StackJob.read(json.dumps(job)), catalog_at(""))
    assert plan.requested_bytes == pytest.approx(traced, abs=UNCOUNTED_BYTES)


GPT_OSS = """{"card": "8.0", "reentrant": false, "model": {"model_type": "gpt_oss", "hidden_size": 256, "intermediate_size":
64, "head_dim": 32, "num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 2,
"num_local_experts": 4, "num_experts_per_tok": 2, "vocab_size": 128, "sliding_window": 128,
"max_position_embeddings": 1024, "tie_word_embeddings": false}, "training": {"description": "", "stack":
"plain-loop", "compute_dtype": "fp16", "weights": {"default": "fp16"}, "optimizer": {"default": "adamw-bf16"},
"activation_checkpointing": "none", "micro_batch_size": 1, "sequence_length": 64}}"""


@pytest.mark.parametrize(("dtype", "traced"), [("fp16", 6_814_528), ("bf16", 6_804_800)])
def test_norms_of_gpt_oss_and_their_states_are_in_fp32_where_weights_are_loaded_in_fp16(dtype, traced):
    job = json.loads(GPT_OSS)
    job["training"].update(compute_dtype=dtype, weights={"default": dtype})
    instants = dict(planned(StackJob.read(json.dumps(job)), catalog_at("")).instants)
    assert instants["layer 1 backward"] == pytest.approx(traced, abs=UNCOUNTED_BYTES)


WIDE_STREAM = """{"card": "7.5", "model": {"attention_bias": false, "hidden_size": 96, "intermediate_size": 40,
"max_position_embeddings": 8192, "model_type": "apertus", "num_attention_heads": 4, "num_hidden_layers": 2,
"num_key_value_heads": 2, "tie_word_embeddings": true, "vocab_size": 32000}, "reentrant": true, "training":
{"activation_checkpointing": "none", "adapter": {"dtype": "fp32", "kind": "dora", "rank": 16}, "clip_gradients":
false, "compute_dtype": "fp16", "description": "", "gradient_accumulation_steps": 2, "loss_scaling": true,
"method": {"reference_model": "adapter-off", "stage": "dpo"}, "micro_batch_size": 2, "optimizer": {"default":
"adamw-fp32"}, "sequence_length": 1000, "stack": "trl", "weights": {"default": "fp16", "hidden_matrix":
"llm-int8"}}}"""


def test_a_reference_models_head_is_given_the_residual_stream_in_its_width():
    """Apertus' activation forms fp32 under autocast, and LLM.int8 returns what it is given."""
    instants = dict(planned(StackJob.read(WIDE_STREAM), catalog_at("")).instants)
    assert instants["forward"] == pytest.approx(458_441_704, rel=0.0002)


SHARED_EXPERTS = """{"card": "9.0", "reentrant": false, "model": {"first_k_dense_replace": 0, "hidden_size": 896,
"intermediate_size": 3, "kv_lora_rank": 64, "max_position_embeddings": 8192, "model_type": "deepseek_v3",
"moe_intermediate_size": 192, "n_group": 1, "n_routed_experts": 8, "n_shared_experts": 1, "num_attention_heads":
7, "num_experts_per_tok": 3, "num_hidden_layers": 1, "num_key_value_heads": 7, "q_lora_rank": null,
"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "tie_word_embeddings": true, "topk_group": 1, "v_head_dim": 32,
"vocab_size": 1000}, "training": {"adapter": {"kind": "lora", "rank": 1}, "compute_dtype": "bf16",
"description": "", "dropout": 0.5, "evaluation": true, "gradients": {"lifetime": "layer"}, "kernels":
{"activation": "fused", "muon_batch_bytes": 1000000000, "rotary": "fused"}, "micro_batch_size": 5, "optimizer":
{"default": "lion"}, "sequence_length": 300, "weights": {"default": "bf16"}, "stack": "bundled"}}"""


def test_gradients_of_shared_experts_rows_are_added_in_place():
    """The mixture's rows are one matrix, of which the products with adapters return no views."""
    events = events_of(planned(StackJob.read(SHARED_EXPERTS), catalog_at("")))
    reserved = Stream(events.sizes, events.codes, streams=events.stream.streams).peaks().reserved_bytes
    assert reserved == 190_840_832  # of the trace's events; 11 % more with sums of their own


DROPPED_INSIDE = """{"card": "9.0", "model": {"head_dim": 128, "hidden_size": 5120, "intermediate_size": 27648, "model_type":
"seed_oss", "num_attention_heads": 80, "num_hidden_layers": 2, "num_key_value_heads": 8, "tie_word_embeddings":
false, "vocab_size": 155136}, "reentrant": true, "training": {"activation_checkpointing": "full",
"clip_gradients": true, "compute_dtype": "bf16", "description": "", "gradient_accumulation_steps": 2, "kernels":
{"attention": "eager"}, "micro_batch_size": 2, "optimizer": {"default": "adamw-bf16"}, "sequence_length": 200,
"stack": "trl", "weights": {"default": "bf16"}}}"""


def test_attention_that_drops_what_it_adds_has_names_for_its_heads_meanwhile():
    events = events_of(planned(StackJob.read(DROPPED_INSIDE), catalog_at("")), 3)
    reserved = Stream(events.sizes, events.codes, streams=events.stream.streams).peaks().reserved_bytes
    assert reserved == 26_547_847_168  # of the events of its own code; 5.7 % more where heads are gone before


DROPPED: dict[str, tuple[int, dict[str, object]]] = {
    "bloom": (
        130_708_488,
        {"hidden_size": 512, "n_head": 4, "n_layer": 2, "vocab_size": 512, "tie_word_embeddings": True},
    ),
    "phi3": (95_792_716, {"pad_token_id": 0}),
    "seed_oss": (93_713_996, {"head_dim": 128}),
    "stablelm": (84_097_228, {}),
}


@pytest.mark.parametrize("family", DROPPED)
def test_dropout_that_a_job_gives_applies_where_a_familys_code_has_any(family):
    """Of these none drops embeddings, and StableLM nothing that attention adds."""
    traced, keys = DROPPED[family]
    job = json.loads(WHOLE_HEADS)
    sizes = {"hidden_size": 512, "intermediate_size": 1024}
    job["model"] = {**(job["model"] | sizes if family != "bloom" else {}), **keys, "model_type": family}
    job["training"].update(sequence_length=512, dropout=0.1, kernels={})
    plan = planned(StackJob.read(json.dumps(job)), catalog_at(""))
    assert plan.requested_bytes == pytest.approx(traced, abs=UNCOUNTED_BYTES)
