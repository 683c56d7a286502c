"""The loss of TRL 1.7 to 1.14, held against requested peaks of the trace of those releases' own SFTTrainer on transformers 5.23."""

import pytest

from tests.survey.drawn_jobs import Job
from tests.survey.stacks.drawn_stack_jobs import StackJob
from tests.survey.stacks.judged_stack_jobs import planned

STABLELM = {"model_type": "stablelm", "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 3}
STABLELM |= {"num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 100352, "partial_rotary_factor": 0.25}
STABLELM |= {"use_qkv_bias": True, "tie_word_embeddings": False, "max_position_embeddings": 4096}
FULL = {"weights": {"default": "bf16"}, "optimizer": {"default": "adamw-bf16"}, "sequence_length": 512}
FULL |= {"micro_batch_size": 1, "activation_checkpointing": "full", "clip_gradients": True}
QWEN3 = {"model_type": "qwen3", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 3, "head_dim": 128}
QWEN3 |= {"num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 151936, "tie_word_embeddings": False}
QLORA = {"weights": {"default": "bf16", "hidden_matrix": "nf4-dq"}, "optimizer": {"default": "adamw-fp32"}}
QLORA |= {"adapter": {"kind": "lora", "rank": 16, "dtype": "fp32"}, "sequence_length": 65, "micro_batch_size": 2}
QLORA |= {"activation_checkpointing": "none", "clip_gradients": False}


@pytest.mark.parametrize(
    ("version", "model", "training", "traced"),
    [
        ("1.12.0", STABLELM, FULL, 5_106_909_414),
        ("1.14.0", STABLELM, FULL, 5_106_909_414),
        ("1.12.0", QWEN3, QLORA, 3_295_800_720),  # the head copied to fp32 and to 16 bits for each chunk
        ("1.14.0", QWEN3, QLORA, 1_699_507_736),
    ],
)
def test_the_peak_is_that_of_the_releases_own_code(catalog, version, model, training, traced):
    job = Job(model, {"description": "", "stack": f"trl@{version}", "compute_dtype": "bf16", **training})
    plan = planned(StackJob(job, "8.6", reentrant=True), catalog)
    assert plan.requested_bytes == pytest.approx(traced, rel=1e-6)
