"""What the allocator holds of adapters without autocast, whose sum with a projection is cast back, against a trace of PEFT's own code."""

import json

import pytest

import memplan

LLAMA = {
    "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 64, "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    "num_hidden_layers": 3, "rope_theta": 500000.0, "hidden_act": "silu",
}  # fmt: skip
CONFIG = {
    "autocast": False,
    "compute_dtype": "bf16",
    "weights.default": "bf16",
    "adapter.rank": 16,
    "adapter.dropout": 0.0,
    "adapter.dtype": "fp32",
    "adapter.targets": ["all-linear"],
    "optimizer.default": "adamw-fp32",
    "kernels.optimizer": "fused",
    "gradient_accumulation_steps": 4,
    "activation_checkpointing": "none",
    "clip_gradients": False,
}
TRACED = 2_134_900_736
"""Bytes of segments that ``memplan run`` says of the same job's script, on an A100 (transformers 5.24.0, peft 0.21.2)."""


def test_a_projection_goes_before_its_sum_with_an_adapter_is_cast(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    shape = {"micro_batch_size": 2, "sequence_length": 256}
    plan = memplan.plan(str(tmp_path), config="lora", gpu="a100-80gb", stack="transformers", set=CONFIG, **shape)
    assert plan.memory.reserved_bytes == pytest.approx(TRACED, rel=0.005)


GATHERED = 994_050_048
"""Bytes of segments that a trace of TRL's own loss, which gathers a head of its own, has on each of four GPUs (trl 1.16.0, torch 2.13.0)."""


def test_a_head_that_a_loss_gathers_comes_without_a_buffer(tmp_path):
    shape = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 4}
    own = LLAMA | shape | {"num_hidden_layers": 4, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(own))
    keys = {"autocast": None, "adapter.dtype": "bf16", "activation_checkpointing": "full", "clip_gradients": True}
    job = {"config": "lora", "gpu": "rtx4090", "gpus": 4, "stack": "trl", "sequence_length": 1000}
    plan = memplan.plan(str(tmp_path), set=CONFIG | keys | {"gradient_accumulation_steps": 1}, **job).memory
    assert not plan.reserve_by_share
    assert plan.reserved_bytes == pytest.approx(GATHERED, rel=0.02)
