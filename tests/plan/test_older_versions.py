"""Plans of stacks as they were at older versions."""

from __future__ import annotations

import json

import pytest

import memplan
from memplan.errors import CannotAnswerError

ROWS = 8


def planned(stack, model="llama-3.2-1b", length=1024):
    sizes = {"micro_batch_size": ROWS, "sequence_length": length}
    return memplan.plan(model, gpu="a100-sxm-80gb", config="bf16-adamw", stack=stack, **sizes, set={"autocast": False})


def test_repeated_keys_and_values_and_copies_stay_until_backward():
    repeated, copied, views = (planned(f"transformers@{at}") for at in ("4.53", "4.55", "4.57"))
    layers, tokens, hidden, grouped = 16, ROWS * 1024, 2048, 512
    retained = [plan.components["activations"] for plan in (repeated, copied, views)]
    attention = layers * tokens * 2  # bytes of one number for each token in all layers
    assert retained[1] - retained[2] == attention * hidden
    assert retained[0] - retained[1] == attention * 2 * (hidden - grouped)


def test_what_ran_otherwise_then_is_refused_by_name():
    with pytest.raises(CannotAnswerError, match="8192 is beyond the window of 4096 tokens"):
        planned("transformers@4.51", "mistral-7b-v0.1", 8192)
    with pytest.raises(CannotAnswerError, match="models of family mixtral are not modelled for transformers"):
        planned("transformers@4.57", "mixtral-8x7b")
    with pytest.raises(CannotAnswerError, match="is older than"):
        planned("transformers@4.44")


def held_bytes(length):
    plan = memplan.plan(
        "llama-3.2-1b",
        gpu="h200-sxm-141gb",
        config="bf16-adamw",
        stack="plain-loop",
        micro_batch_size=ROWS,
        sequence_length=length,
    )
    return next(
        instant["requested_bytes"] for instant in plan.to_dict()["instants"] if instant["name"] == "optimizer step"
    )


def test_a_plain_loops_outputs_hold_keys_and_values_until_the_next_forward():
    ids, logits, cache = 3 * 8, 128256 * 2, 2 * 16 * 512 * 2
    assert held_bytes(2048) - held_bytes(1024) == ROWS * 1024 * (ids + logits + cache)


def test_a_config_that_says_so_returns_no_cache(tmp_path):
    shape = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 100,
    }
    peaks = []
    for name, use_cache in (("with", True), ("without", False)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(
            json.dumps({**shape, "architectures": ["LlamaForCausalLM"], "use_cache": use_cache})
        )
        plan = memplan.plan(
            tmp_path / name, gpu="h200-sxm-141gb", config="bf16-adamw", stack="plain-loop", sequence_length=1024
        )
        peaks.append({one["name"]: one["requested_bytes"] for one in plan.to_dict()["instants"]}["optimizer step"])
    assert peaks[0] - peaks[1] == 2 * 2 * 64 * 2 * 1024
