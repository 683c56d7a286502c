"""Jobs for stacks that train models of their own, or that take some families alone: Llamas of odd shapes."""

from collections.abc import Callable, Mapping
from random import Random
from typing import Any

from memplan.training.adapters import LITGPT_PARTS

Keys = dict[str, Any]

HEADS = (1, 2, 4, 6, 8, 12)
WIDTHS = (16, 32, 64, 80, 128)
LITGPT_FAMILIES: Mapping[str, Keys] = {
    "falcon": {
        "new_decoder_architecture": False,
        "multi_query": True,
        "parallel_attn": True,
        "bias": False,
        "alibi": False,
    },
    "gemma": {"tie_word_embeddings": True},
    "gemma2": {"tie_word_embeddings": True, "sliding_window": 4096},
    "gpt_neox": {"use_parallel_residual": True, "rotary_pct": 0.25},
    "llama": {},
    "mistral": {},
    "olmo2": {},
    "phi": {"partial_rotary_factor": 0.5, "qk_layernorm": False},
    "phi3": {"sliding_window": 2047},
    "qwen2": {},
    "qwen3": {},
    "stablelm": {"partial_rotary_factor": 0.25, "use_qkv_bias": False, "use_parallel_residual": False},
}
"""Families of LitGPT with what their models say besides, as it builds them."""

DIVIDED = ("falcon", "gpt_neox", "olmo2", "phi", "phi3", "stablelm")
"""Families whose heads together are as wide as the model."""
TORCHTUNE_FAMILIES = ("gemma", "gemma2", "llama", "llama", "mistral", "phi3", "qwen2")


def torchtitan_job(rng: Random) -> tuple[Keys, Keys]:
    """Return the keys of a model and of a training config, as torchtitan can train them."""
    heads, width = rng.choice(HEADS), rng.choice(WIDTHS)
    model = _llama(rng, heads, width, rng.choice((heads * width, 128, 256, 512, 768)))
    training = _training(rng, "torchtitan", (8, 64, 128, 256, 512, 1024, 2048))
    kernels = _some(
        rng, loss=("fp32",), loss_chunks=(1, 2, 4), optimizer=("foreach",), attention=_sdpa(training["compute_dtype"])
    )
    training |= {"kernels": kernels} if kernels else {}
    if rng.random() < 0.5:
        training["activation_checkpointing"] = rng.choice(("none", "full", "selective"))
    if rng.random() < 0.5:
        model["model_type"] = "qwen3"
    if rng.random() < 0.3:
        training["zero_gradients"] = "free"  # training.disable_cuda_graphs
    return model, training


def older_torchtitan_job(rng: Random) -> tuple[Keys, Keys]:
    """Return the keys of a model and of a training config, as torchtitan 0.2.2 can train them."""
    model, training = torchtitan_job(rng)
    model |= {"model_type": "llama", "tie_word_embeddings": False}
    model["hidden_size"] = model["num_attention_heads"] * model["head_dim"]
    kernels = {key: value for key, value in training.pop("kernels", {}).items() if key == "optimizer"}
    training |= {"kernels": kernels} if kernels else {}
    if training["compute_dtype"] == "bf16" and rng.random() < 0.7:
        training |= {"weights": {"default": "fp32"}, "optimizer": {"default": "adamw-fp32"}}
    if rng.random() < 0.3:
        training |= {"activation_checkpointing": "full", "checkpointed_layers": {"every": rng.choice((2, 3))}}
    return model, training


def torchtune_job(rng: Random) -> tuple[Keys, Keys]:
    """Return the keys of a model and of a training config, as torchtune's recipes on one device can train them."""
    heads, width, family = rng.choice(HEADS), rng.choice(WIDTHS), rng.choice(TORCHTUNE_FAMILIES)
    model = _llama(rng, heads, width, heads * width) | {"model_type": family}
    model["max_position_embeddings"] = rng.choice((2048, 4096, 32768))
    tied = {"gemma": True, "gemma2": True, "mistral": False, "phi3": False}
    model["tie_word_embeddings"] = tied.get(family, model["tie_word_embeddings"])
    if family in ("gemma", "gemma2"):
        model["hidden_size"] = heads * rng.choice((32, 64))
    if family == "gemma2":
        model |= {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window": 4096}
    training = _training(rng, "torchtune", (8, 65, 128, 300, 512, 1024, 2048))
    attention = "flash" if training["compute_dtype"] == "bf16" else "efficient"
    training["kernels"] = {
        "attention": attention,
        **_some(rng, loss=("fp32",), loss_chunks=(2, 4), optimizer=("foreach", "fused")),
    }
    training["activation_checkpointing"] = rng.choice(("none", "full"))
    training["clip_gradients"] = rng.random() < 0.3
    if rng.random() < 0.7:
        training |= _torchtune_adapter(rng, model, training)
    return model, training


def _torchtune_adapter(rng: Random, model: Keys, training: Keys) -> Keys:
    """Return adapters, on attention alone or on all projections, and maybe codes below them, of whole blocks."""
    parts = ["gate_proj", "up_proj", "down_proj"] if rng.random() < 0.6 else []
    targets = [name for name in ("q_proj", "k_proj", "v_proj", "o_proj") if rng.random() < 0.7] or ["q_proj", "v_proj"]
    keys: Keys = {"kind": rng.choice(("lora", "lora", "dora")), "rank": rng.choice((4, 16)), "targets": targets + parts}
    if rng.random() < 0.3:
        keys["dropout"] = 0.05
    if training["compute_dtype"] != "bf16" or rng.random() < 0.4:
        return {"adapter": keys}
    width = 256 * rng.choice((2, 3, 4))
    model |= {"head_dim": width // 4, "num_attention_heads": 4, "num_key_value_heads": rng.choice((1, 2, 4))}
    model |= {"hidden_size": width, "intermediate_size": 256 * rng.choice((1, 3, 8))}
    if model["model_type"] == "qwen2":  # whose other projections stay floats
        keys["targets"] = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return {"adapter": keys, "weights": {"default": "bf16", "hidden_matrix": "nf4-torchao"}}


def litgpt_job(rng: Random) -> tuple[Keys, Keys]:
    """Return the keys of a model and of a training config, as LitGPT can finetune them on one GPU: whole, or adapters."""
    heads, width, family = rng.choice(HEADS), rng.choice(WIDTHS), rng.choice(tuple(LITGPT_FAMILIES))
    hidden = rng.choice((heads * width, 128, 256, 512, 768))
    model = _llama(rng, heads, width, heads * width if family in DIVIDED else hidden)
    model |= {"model_type": family, "tie_word_embeddings": False, **LITGPT_FAMILIES[family]}
    if family in DIVIDED:
        model["head_dim"] = None
    if family == "falcon":
        del model["num_key_value_heads"]
        model |= {"num_kv_heads": 1, "ffn_hidden_size": model["intermediate_size"]}
    if family in ("gpt_neox", "phi"):
        model["num_key_value_heads"] = heads
    if family == "mistral" and rng.random() < 0.5:
        model["sliding_window"] = rng.choice((100, 4096))
    training = _training(rng, "litgpt", (8, 64, 65, 128, 129, 300, 512, 1024, 2048))
    dtype = training["compute_dtype"]
    if rng.random() < 0.3:
        training |= {"weights": {"default": "fp32"}, "compute_dtype": "bf16", "optimizer": {"default": "adamw-fp32"}}
    elif dtype == "bf16" and rng.random() < 0.3:
        training |= {"weights": {"default": "fp16"}, "compute_dtype": "fp16", "optimizer": {"default": "adamw-bf16"}}
    training.pop("clip_gradients", None)
    training["evaluation"] = rng.random() < 0.5
    model["max_position_embeddings"] = rng.choice((training["sequence_length"], 4096))
    return model, _litgpt_adapters(rng, training) if rng.random() < 0.75 else training


def _litgpt_adapters(rng: Random, training: Keys) -> Keys:
    """Return the keys of a training config with adapters on some parts of a model, on plain weights or on quantised ones."""
    dtype, weights = training["compute_dtype"], training["weights"]["default"]
    adapter = {"kind": "lora", "rank": rng.choice((1, 4, 8, 32)), "dropout": rng.choice((0.0, 0.05))}
    targets = [part for part in LITGPT_PARTS if rng.random() < 0.5] or ["query", "value"]
    training |= {"adapter": {**adapter, "targets": targets}}
    if weights == dtype and rng.random() < 0.6:
        training["weights"] = {"default": dtype, "hidden_matrix": rng.choice(("nf4", "nf4-dq"))}
        training["optimizer"] = {"default": "adamw-paged-bnb"}
    return training


def _sdpa(dtype: str) -> tuple[str, ...]:
    """Return what a card of compute capability 8.0 runs in place of flex attention."""
    return ("flash",) if dtype == "bf16" else ("flex",)


def _llama(rng: Random, heads: int, width: int, hidden: int) -> Keys:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": rng.choice((64, 256, 688, 1024, 2048)),
        "num_hidden_layers": rng.choice((1, 2, 3)),
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice([n for n in range(1, heads + 1) if heads % n == 0]),
        "head_dim": width,
        "vocab_size": rng.choice((97, 1000, 8191, 32000)),
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "tie_word_embeddings": rng.random() < 0.4,
    }


def _training(rng: Random, stack: str, lengths: tuple[int, ...]) -> Keys:
    dtype = rng.choice(("bf16", "bf16", "fp32"))
    training: Keys = {
        "description": "drawn at random",
        "stack": stack,
        "compute_dtype": dtype,
        "weights": {"default": dtype},
        "optimizer": {"default": f"adamw-{dtype}"},
        "micro_batch_size": rng.choice((1, 2, 3, 5)),
        "sequence_length": rng.choice(lengths),
    }
    if rng.random() < 0.3:
        training["gradient_accumulation_steps"] = rng.choice((2, 3))
    if rng.random() < 0.3:
        training["clip_gradients"] = False
    return training


def _some(rng: Random, **choices: tuple[Any, ...]) -> Keys:
    """Return a value for some of the keys."""
    return {name: rng.choice(values) for name, values in choices.items() if rng.random() < 0.3}


def nanogpt_job(rng: Random) -> tuple[Keys, Keys]:
    """Return the keys of a model and of a training config, as nanoGPT trains it: compiled, which takes half a minute and more."""
    heads, width, length = rng.choice((2, 4, 8, 12)), rng.choice((32, 64, 128)), rng.choice((64, 256, 512, 1024))
    model: Keys = {"model_type": "gpt2", "n_embd": heads * width, "n_head": heads, "n_positions": length}
    model |= {"vocab_size": rng.choice((65, 512, 8000, 50257, 50304)), "n_layer": rng.choice((1, 2, 3))}
    training: Keys = {"description": "drawn at random", "stack": "nanogpt", "weights": {"default": "fp32"}}
    training |= {"compute_dtype": rng.choice(("bf16", "bf16", "fp16")), "dropout": rng.choice((0.0, 0.0, 0.1))}
    training |= {"sequence_length": length, "micro_batch_size": rng.choice((1, 2, 4, 12)), "compile": "model"}
    training |= {"gradient_accumulation_steps": rng.choice((1, 1, 2)), "clip_gradients": rng.random() < 0.5}
    return model | {"activation_function": "gelu"}, training


def nanochat_job(rng: Random) -> tuple[Keys, Keys]:
    """Return the flags of a model and the keys of a training config, as nanochat trains it: compiled, which takes a minute and more."""
    heads, width, length = (
        rng.choice((1, 2, 3, 4, 6)),
        rng.choice((64, 128)),
        rng.choice((64, 200, 256, 512, 1024, 2048)),
    )
    hidden, ranks = heads * width, rng.choice((1, 1, 1, 2, 4, 8))
    model: Keys = {"hidden_size": hidden, "num_attention_heads": heads, "head_dim": width, "window_pattern": "L"}
    model |= {"intermediate_size": 4 * hidden, "num_hidden_layers": rng.choice((1, 2, 3, 4)), "sequence_length": length}
    model |= {"vocab_size": rng.choice((1000, 4096, 8192, 32768, 50257, 65536))}
    training: Keys = {
        "description": "drawn at random",
        "stack": "nanochat",
        "compute_dtype": "bf16",
        "compile": "model",
    }
    training |= {"weights": {"default": "fp32", "embedding": "bf16", "head": "fp32"}, "sequence_length": length}
    training |= {"optimizer": {"hidden_matrix": "nanochat-muon", "default": "nanochat-adamw"}}
    training |= {
        "micro_batch_size": rng.choice((1, 2, 3, 4, 8, 16)),
        "gradient_accumulation_steps": rng.choice((1, 1, 2, 3)),
    }
    return model, training | {"parallel": {"data": ranks, "zero_stage": int(ranks > 1)}}


UNSLOTH_FAMILIES = ("llama", "llama", "mistral", "qwen2", "qwen3")

UNSLOTH_TARGETS = (
    ("q_proj", "k_proj", "v_proj", "o_proj"),
    ("q_proj", "v_proj"),
    ("gate_proj", "up_proj", "down_proj"),
    ("q_proj", "v_proj", "up_proj", "down_proj"),
)
"""Some of the projections, which unsloth's functions take as whole groups alone."""


def unsloth_job(rng: Random) -> tuple[Keys, Keys]:
    """Return the keys of a model and of a training config, as unsloth's scripts train adapters; each runs in half a minute."""
    heads, width = rng.choice((4, 8, 12, 16)), rng.choice((64, 128))
    model = _llama(rng, heads, width, 64 * rng.choice((8, 12, 16, 24, 32, 40)))
    model |= {"model_type": rng.choice(UNSLOTH_FAMILIES), "num_hidden_layers": rng.choice((2, 2, 2, 3, 4))}
    model |= {
        "intermediate_size": 64 * rng.choice((11, 32, 43, 86)),
        "vocab_size": rng.choice((1000, 32000, 49152, 128256)),
    }
    model |= {"max_position_embeddings": rng.choice((2048, 8192, 131072))}
    length = rng.choice((65, 200, 512, 1000, 1024, 2048, 3000))
    training: Keys = {"description": "drawn at random", "stack": "unsloth", "compute_dtype": "bf16"}
    training |= {"sequence_length": length, "micro_batch_size": rng.choice((1, 2, 2, 3, 4))}
    training |= {"weights": {"default": "bf16"}, "gradient_accumulation_steps": rng.choice((1, 1, 2, 4))}
    if rng.random() < 0.65:
        training["weights"]["hidden_matrix"] = "nf4-dq"
    training["optimizer"] = {"default": rng.choice(("adamw-8bit-bnb", "adamw-8bit-bnb", "adamw-fp32"))}
    training["clip_gradients"] = rng.random() < 0.7
    adapter: Keys = {"kind": "lora", "rank": rng.choice((8, 16, 64)), "targets": ["all-linear"]}
    training["adapter"] = adapter
    checkpointing = rng.choice(("own", "own", "own", "full", "none"))
    training |= {} if checkpointing == "own" else {"activation_checkpointing": checkpointing}
    if rng.random() < 0.3:
        adapter["targets"] = list(rng.choice(UNSLOTH_TARGETS))
    return model, training


OWN_MODELS: Mapping[str, Callable[[Random], tuple[Keys, Keys]]] = {
    "torchtitan": torchtitan_job,
    "torchtune": torchtune_job,
    "litgpt": litgpt_job,
    "nanochat": nanochat_job,
    "nanogpt": nanogpt_job,
    "unsloth": unsloth_job,
}
"""Stack -> what draws a job for it."""

REENTRANT = ("unsloth",)
"""Those of them that always compute layers again by the older kind of checkpointing."""

OLDER_MODELS: Mapping[str, Callable[[Random], tuple[Keys, Keys]]] = {"torchtitan@0.2.2": older_torchtitan_job}
"""The same at versions whose models or configs are others."""

OWN_CARD = "8.0"
"""Compute capability of the card that they run on: flash attention is what torch takes for bf16 there."""
