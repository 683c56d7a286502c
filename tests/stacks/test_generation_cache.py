"""The cache of keys and values that transformers' own models fill equals the formula's, family by family."""

from inspect import signature

import pytest

pytest.importorskip("transformers")

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from memplan.model.families import model_spec
from memplan.model.families.layer_windows import layer_windows
from memplan.plan.inference.served_plan import Request, cache_bytes, cached_layers

TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 96,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "head_dim": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": 8},
    "mistral-whole": {"sliding_window": None},
    "qwen2": {},
    "qwen2-windowed": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3},
    "qwen3": {},
    "qwen3_moe": MIXTURE,
    "gemma2": {"sliding_window": 8},
    "gemma3_text": {"sliding_window": 8},
    "phi3": {"sliding_window": 8},
    "olmo2": {},
    "smollm3": {},
    "gpt_oss": {"sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "mixtral": {"sliding_window": None, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_neox": {"num_key_value_heads": None, "rotary_pct": 0.25},
    "deepseek_v3": LATENT | {"q_lora_rank": 16},
    "deepseek_v2": LATENT,
}


def keys_of(name):
    family = name.split("-")[0]
    return TINY | FAMILIES[name] | {"model_type": family}


QUICK = ("llama", "gemma3_text", "qwen3")
"""Families that every run checks; the others are slow."""


@pytest.mark.parametrize("tokens", [5, 21])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FAMILIES]
)
def test_cached_bytes_equal_those_of_transformers(name, tokens):
    keys = keys_of(name)
    given = {
        key: value
        for key, value in keys.items()
        if key != "model_type" and (key, value) != ("num_key_value_heads", None)
    }
    config = AutoConfig.for_model(keys["model_type"], **given)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    cache = DynamicCache(config=model.config)
    given_as = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"  # its name before 5.24
    with torch.no_grad():
        model(torch.randint(3, 90, (2, tokens - 1)), **{given_as: cache})
        model(torch.randint(3, 90, (2, 1)), **{given_as: cache})
    held = sum(part.numel() * part.element_size() for layer in cache.layers for part in (layer.keys, layer.values))
    read = {key: value for key, value in keys.items() if key not in ("pad_token_id", "bos_token_id", "eos_token_id")}
    spec = model_spec({key: value for key, value in read.items() if value is not None}, name, name)
    layers = cached_layers(spec, keys)
    assert cache_bytes(layers, Request(tokens, 2, 4, 64, "dynamic")) == held


@pytest.mark.parametrize(
    "family", ["gemma2", "gemma3_text", "gpt_oss", "mistral", "qwen2", "qwen3", "smollm3", "phi3", "mixtral"]
)
def test_windows_of_a_config_that_states_nothing_are_those_of_its_class(family):
    config = AutoConfig.for_model(family, **TINY)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * 7
    window = config.sliding_window or 0
    stated = {"sliding_window": window} if family == "mistral" else {}
    expected = tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    if family == "mistral":
        expected = (window,) * 7
    assert layer_windows({"model_type": family} | stated, 7) == expected


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen2_moe", "smollm3"])
def test_windows_that_a_config_asks_for_are_in_the_layers_that_its_class_says(family):
    stated = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}
    config = AutoConfig.for_model(family, **TINY, **stated)
    expected = tuple(8 if kind == "sliding_attention" else 0 for kind in config.layer_types)
    assert layer_windows({"model_type": family} | stated, 7) == expected
    assert any(expected)
    del stated["sliding_window"]
    window = AutoConfig.for_model(family, **TINY, **stated).sliding_window or 0
    assert max(layer_windows({"model_type": family} | stated, 7)) == window
    assert not all(expected)
