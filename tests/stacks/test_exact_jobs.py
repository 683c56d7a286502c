"""A few recorded jobs that the formula follows to 16 KiB at every instant, in every run; all of them are replayed by the thorough one."""

import json
from pathlib import Path

import pytest

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
