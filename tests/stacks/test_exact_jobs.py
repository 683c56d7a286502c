"""A few recorded jobs that the formula follows to 16 KiB at every instant, in every run; all of them are replayed by the thorough one."""

import json
from pathlib import Path

import pytest

from memplan.allocator.streams.stream_replay import Stream
from memplan.plan.reserve.simulation import events_of
from tests.survey.stacks.drawn_stack_jobs import StackJob
from tests.survey.stacks.judged_stack_jobs import planned
from tests.survey.stacks.stack_records import catalog_at, read_records

RECORDS = Path(__file__).parent / "records"
EXACT = {
    "litgpt.0-4": (4, 6, 10, 11, 14, 17, 18, 19, 25, 26, 28, 29, 33, 35, 36, 41, 42, 43, 45),
    "transformers.offload.shards": (2, 4, 5, 7, 9, 10, 14, 19, 22, 23, 25, 34, 37),
    "transformers.fsdp1-offload.shards": (2, 4, 5, 7, 10, 12, 17, 18, 20, 21, 23, 27, 28, 29),
    "plain-loop.latent": (2, 3, 4, 13, 22, 25, 33),
    "transformers": (11, 18, 27),
    "transformers.classification": (8, 45),
    "transformers.earlier": (33, 42),
    "trl.pairs": (25,),
    "trl.frozen": (2, 8, 9, 17, 19, 21, 26, 29, 30, 37, 45, 49, 50, 51),
}
UNCOUNTED_BYTES = 16_384
"""Rotary frequencies, a loop's scalars and scratch of reductions, which no plan counts."""


@pytest.mark.parametrize("name", EXACT)
def test_every_instant_is_the_librarys_own(name):
    versions, records = read_records(RECORDS / f"{name}.json")
    for number in EXACT[name]:
        record = records[number]
        plan = planned(StackJob.read(record.job), catalog_at(versions.get("transformers", "")))
        own = dict(plan.instants)
        off = {key: own[key] - size for key, size in record.instants.items() if abs(own[key] - size) > UNCOUNTED_BYTES}
        assert not off, number


GPT_2 = """{"card": "8.0", "reentrant": false, "model": {"model_type": "gpt2", "n_embd": 1024, "n_head": 16, "n_layer": 4,
"n_positions": 1024, "vocab_size": 50257, "tie_word_embeddings": true, "activation_function": "gelu_new", "attn_pdrop": 0.1,
"embd_pdrop": 0.1, "resid_pdrop": 0.1}, "training": {"description": "", "stack": "transformers@4.44", "compute_dtype": "bf16",
"weights": {"default": "fp32"}, "optimizer": {"default": "adamw-fp32"}, "activation_checkpointing": "full", "clip_gradients": true,
"adapter": {"kind": "lora", "rank": 16, "dropout": 0.1, "dtype": "fp32"}, "gradient_accumulation_steps": 2,
"micro_batch_size": 1, "sequence_length": 256}}"""


def test_gpt_2_of_transformers_4_44_cuts_logits_and_keeps_a_mask_in_each_layer():
    plan = planned(StackJob.read(GPT_2), catalog_at(""))
    assert plan.requested_bytes == pytest.approx(694_831_678, abs=4096)  # as its own code was traced


EVALUATED = """{"card": "8.0", "reentrant": false, "model": {"model_type": "llama", "hidden_size": 512, "intermediate_size": 1376,
"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 3, "vocab_size": 1024, "tie_word_embeddings": false,
"rms_norm_eps": 1e-06, "max_position_embeddings": 4096}, "training": {"description": "", "stack": "transformers", "compute_dtype": "bf16",
"weights": {"default": "bf16"}, "optimizer": {"default": "adamw-bf16"}, "activation_checkpointing": "full", "evaluation": true,
"evaluation_batch_size": 8, "gradient_accumulation_steps": 3, "micro_batch_size": 2, "sequence_length": 512}}"""


@pytest.mark.parametrize(("rows", "traced"), [(8, 109_413_802), (None, 71_394_746)])
def test_rows_that_are_evaluated_lie_beside_those_of_the_last_step(rows, traced):
    job = json.loads(EVALUATED)
    job["training"]["evaluation_batch_size"] = rows
    plan = planned(StackJob.read(json.dumps(job)), catalog_at(""))
    assert dict(plan.instants)["evaluation"] == pytest.approx(traced, abs=512)  # as Trainer 5.24's own code was traced


HANDED = json.loads((Path(__file__).parent / "evaluated_instants.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", HANDED, ids=lambda case: case["case"].replace(" ", "-"))
def test_what_models_name_cache_and_keep_is_counted_as_often_as_it_is_there(case):
    instants = dict(planned(StackJob.read(json.dumps(case["job"])), catalog_at("")).instants)
    assert {name: instants[name] for name in case["instants"]} == pytest.approx(case["instants"], rel=1e-3)


TURNED = """{"card": "8.0", "model": {"hidden_size": 280, "intermediate_size": 40, "max_position_embeddings": 8192,
"model_type": "gpt2", "n_embd": 280, "n_head": 7, "n_inner": 40, "n_layer": 2, "n_positions": 8192,
"num_attention_heads": 7, "num_hidden_layers": 2, "tie_word_embeddings": true, "vocab_size": 1000}, "reentrant":
false, "training": {"activation_checkpointing": "none", "adapter": {"dtype": "fp32", "kind": "lora", "rank": 16},
"clip_gradients": true, "compute_dtype": "bf16", "description": "", "gradient_accumulation_steps": 2, "kernels":
{"attention": "eager"}, "micro_batch_size": 1, "optimizer": {"default": "adamw-fp32"}, "sequence_length": 65,
"stack": "trl", "weights": {"default": "bf16", "hidden_matrix": "llm-int8"}}}"""
LAST_PART = """{"card": "8.9", "model": {"model_type": "gemma4", "text_config": {"attention_bias": false, "attention_k_eq_v": true,
"enable_moe_block": true, "final_logit_softcapping": 30.0, "global_head_dim": 48, "head_dim": 24, "hidden_size":
288, "hidden_size_per_layer_input": 24, "intermediate_size": 96, "layer_types": ["sliding_attention",
"full_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"],
"max_position_embeddings": 8192, "moe_intermediate_size": 48, "num_attention_heads": 12, "num_experts": 4,
"num_hidden_layers": 6, "num_key_value_heads": 4, "num_kv_shared_layers": 0, "sliding_window": 100, "top_k_experts":
2, "use_double_wide_mlp": true, "vocab_size": 97, "vocab_size_per_layer_input": 97}, "tie_word_embeddings": true,
"vision_config": {"hidden_size": 16, "intermediate_size": 257, "num_attention_heads": 1, "num_hidden_layers": 4,
"patch_size": 14}}, "reentrant": false, "training": {"activation_checkpointing": "full", "adapter": {"dtype":
"fp32", "kind": "lora", "rank": 16}, "clip_gradients": true, "compute_dtype": "fp16", "description": "",
"gradient_accumulation_steps": 1, "micro_batch_size": 3, "optimizer": {"default": "adamw-fp32"}, "outputs_until":
"forward", "sequence_length": 2048, "stack": "plain-loop", "weights": {"default": "fp16", "hidden_matrix":
"nf4-dq"}}}"""


SHARDED_LAST = """{"card": "8.9", "model": {"model_type": "gemma4_unified", "text_config": {"attention_bias": true,
"attention_k_eq_v": true, "final_logit_softcapping": 30.0, "global_head_dim": 320, "head_dim": 48, "hidden_size": 96,
"intermediate_size": 512, "max_position_embeddings": 8192, "num_attention_heads": 2, "num_hidden_layers": 2,
"num_key_value_heads": 1, "sliding_window": 100, "vocab_size": 65537}, "tie_word_embeddings": true, "vision_config":
{"mm_embed_dim": 64, "mm_posemb_size": 20, "output_proj_dims": 64, "patch_size": 4}}, "reentrant": true, "training":
{"activation_checkpointing": "full", "adapter": {"dtype": "fp32", "kind": "lora", "rank": 4}, "clip_gradients": false,
"compute_dtype": "bf16", "description": "", "gradient_accumulation_steps": 2, "kernels": {"attention": "eager"},
"micro_batch_size": 2, "optimizer": {"default": "adamw-fp32"}, "parallel": {"data": 3, "replicate": 1, "zero_stage":
3}, "sequence_length": 512, "stack": "transformers", "weights": {"default": "bf16", "hidden_matrix": "nf4-dq"}}}"""
POOLED = """{"card": "8.0", "model": {"model_type": "llava_next", "text_config": {"hidden_size": 2048, "intermediate_size":
11008, "max_position_embeddings": 32768, "model_type": "qwen2", "num_attention_heads": 16, "num_hidden_layers": 2,
"num_key_value_heads": 2, "vocab_size": 151936}, "tie_word_embeddings": true, "vision_config": {"hidden_size": 64,
"image_size": 56, "intermediate_size": 96, "model_type": "siglip_vision_model", "num_attention_heads": 1,
"num_hidden_layers": 3, "patch_size": 14}}, "reentrant": false, "training": {"activation_checkpointing": "full",
"adapter": {"dtype": "fp32", "kind": "dora", "rank": 16}, "clip_gradients": true, "compute_dtype": "bf16",
"description": "", "gradient_accumulation_steps": 1, "kernels": {"attention": "eager"}, "micro_batch_size": 1,
"optimizer": {"default": "adamw-fp32"}, "sequence_length": 65, "stack": "transformers", "weights": {"default": "bf16",
"hidden_matrix": "nf4"}}}"""


@pytest.mark.parametrize(
    ("job", "traced"),
    [(TURNED, 7_034_944), (LAST_PART, 14_160_207), (SHARDED_LAST, 4_643_794), (POOLED, 739_816_616)],
    ids=["gpt2", "gemma4", "sharded", "pooled"],
)
def test_what_codes_lie_beside_is_stored_as_libraries_store_it(job, traced):
    """GPT-2's scales are one for each output, though its weights lie the other way.

    A tower's last matrix is a float like the norms, and divided like these; so is what a pooling head ends its attention with.
    """
    assert planned(StackJob.read(job), catalog_at("")).persistent_bytes == traced


TRANSPOSED = """{"card": "8.9", "model": {"alibi": false, "bias": false, "hidden_size": 14848, "model_type": "falcon",
"new_decoder_architecture": true, "num_attention_heads": 232, "num_hidden_layers": 1, "num_kv_heads": 8,
"parallel_attn": true, "vocab_size": 65024}, "reentrant": true, "training": {"activation_checkpointing": "none",
"clip_gradients": false, "compute_dtype": "bf16", "description": "", "evaluation": true, "evaluation_batch_size": 2,
"gradient_accumulation_steps": 1, "micro_batch_size": 1, "optimizer": {"default": "adamw-fp32"}, "sequence_length":
200, "stack": "plain-loop", "weights": {"default": "fp32"}}}"""


def test_autocast_keeps_no_copies_of_the_transposes_that_falcon_multiplies_by():
    instants = dict(planned(StackJob.read(TRANSPOSED), catalog_at("")).instants)
    assert instants["evaluation"] == pytest.approx(40_519_094_172, rel=0.002)  # as its own code was traced
    assert instants["forward"] == pytest.approx(44_906_315_236, rel=0.001)  # whose graph has saved them


WHOLE_LENGTH = """{"card": "8.0", "model": {"head_dim": null, "hidden_size": 1536, "intermediate_size": 64, "max_position_embeddings":
2048, "model_type": "phi", "num_attention_heads": 12, "num_hidden_layers": 2, "num_key_value_heads": 12,
"partial_rotary_factor": 0.5, "qk_layernorm": false, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
"tie_word_embeddings": false, "vocab_size": 32000}, "reentrant": false, "training": {"adapter": {"dropout": 0.0,
"kind": "lora", "rank": 8, "targets": ["value", "mlp"]}, "compute_dtype": "bf16", "description": "", "evaluation":
true, "gradient_accumulation_steps": 2, "micro_batch_size": 2, "optimizer": {"default": "adamw-fp32"},
"sequence_length": 2048, "stack": "litgpt", "weights": {"default": "fp32"}}}"""


def test_tables_of_litgpt_stay_wide_under_autocast_at_its_longest_rows_too():
    events = events_of(planned(StackJob.read(WHOLE_LENGTH), catalog_at("")))
    reserved = Stream(events.sizes, events.codes, streams=events.stream.streams).peaks().reserved_bytes
    assert reserved == 4_366_270_464  # of the events of its own code; 24 % more by tables in bf16
