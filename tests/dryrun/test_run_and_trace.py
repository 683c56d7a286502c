"""A script and the trace of its stack, two ways to the same number: jobs drawn at random peak at the same byte in both."""

import json
from pathlib import Path
from random import Random

import pytest

import memplan

SCRIPTS = Path(__file__).parent / "scripts"
PROGRAMS = {"transformers": "drawn_trainer.py", "plain-loop": "drawn_loop.py", "trl": "drawn_sft.py"}
SEED = 1911
FAMILIES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
}
OPTIMIZERS = {"adamw_torch": "foreach", "adamw_torch_fused": "fused"}


def drawn(number, stack="transformers"):
    """Return a model's keys, a training config and the arguments of Trainer, or of a loop, that ask for the same."""
    rng = Random(f"run and trace {SEED} {number}")
    family, heads, width = rng.choice(sorted(FAMILIES)), rng.choice((2, 4, 8)), rng.choice((32, 64))
    model = {
        "architectures": [FAMILIES[family]], "model_type": family, "hidden_size": heads * width, "head_dim": width,
        "intermediate_size": rng.choice((256, 688)), "num_hidden_layers": rng.choice((1, 2, 3)), "num_attention_heads": heads,
        "num_key_value_heads": rng.choice((heads, heads // 2)), "vocab_size": rng.choice((500, 2048, 8191)),
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": rng.random() < 0.5,
        "sliding_window": None,
    }  # fmt: skip
    dtype, optimizer = rng.choice(("bf16", "fp32", "autocast")), rng.choice(sorted(OPTIMIZERS))
    plain, compute = ("fp32" if dtype == "autocast" else dtype), ("bf16" if dtype == "autocast" else dtype)
    clips, steps = rng.random() < 0.5, rng.choice((1, 1, 2))
    checkpointing = rng.choice(("none", "none", "full"))
    training = {
        "description": "drawn", "stack": stack, "weights": {"default": plain}, "compute_dtype": compute,
        "optimizer": {"default": f"adamw-{plain}"}, "kernels": {"optimizer": OPTIMIZERS[optimizer]}, "clip_gradients": clips,
        "gradient_accumulation_steps": steps, "activation_checkpointing": checkpointing,
        "micro_batch_size": rng.choice((1, 2, 3)), "sequence_length": rng.choice((64, 200, 512)),
    }  # fmt: skip
    arguments = {
        "optim": optimizer, "bf16": dtype == "autocast", "max_grad_norm": float(clips), "save_strategy": "no",
        "gradient_accumulation_steps": steps, "gradient_checkpointing": checkpointing == "full",
    }  # fmt: skip
    if stack != "plain-loop":  # TRL's own default is autocast for 16-bit weights too, which adapters in fp32 show
        training["autocast"] = arguments["bf16"]
    if stack == "trl" and rng.random() < 0.6:
        arguments["rank"] = rng.choice((4, 8))
        training["adapter"] = {"kind": "lora", "rank": arguments["rank"], "targets": ["all-linear"]}
    return model, training, arguments


@pytest.mark.slow
@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("stack", PROGRAMS)
def test_a_drawn_job_peaks_at_the_byte_of_its_trace(stack, number, tmp_path):
    for package in ("transformers", "accelerate", "peft", "bitsandbytes", *(("trl",) if stack == "trl" else ())):
        pytest.importorskip(package)
    model, training, arguments = drawn(number, stack)
    (tmp_path / "config.json").write_text(json.dumps({key: value for key, value in model.items() if value is not None}))
    dtype = {"bf16": "bfloat16", "fp32": "float32"}[training["weights"]["default"]]
    shape = [str(training["micro_batch_size"]), str(training["sequence_length"])]
    words = [str(tmp_path), *shape, dtype, json.dumps(arguments)]
    ran = memplan.run(SCRIPTS / PROGRAMS[stack], words, gpu="h100", quiet=True)
    traced = memplan.trace(str(tmp_path), config=training, gpu="h100")
    assert ran.outcome.persistent_bytes == traced.step.trace.persistent_bytes
    assert ran.requested_bytes == traced.requested_bytes
