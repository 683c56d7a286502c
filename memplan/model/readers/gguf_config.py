"""What a GGUF file says of a model's shapes, as keys of a released ``config.json``.

Key names: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and ``gguf-py/gguf/constants.py`` of llama.cpp.
"""

from collections.abc import Callable, Mapping
from typing import Any

from memplan.errors import CannotAnswerError, InvalidFileError, nearest_match
from memplan.model.readers.gguf_types import GgufValues

Config = dict[str, Any]

_SIGMOID_GATING = 2
"""``expert_gating_func`` of DeepSeek-V3, which V2 (softmax) shares its architecture name with."""


def config_of(values: GgufValues) -> Config:
    """Return the model's shapes under the names of a released ``config.json``.

    Raises:
        CannotAnswerError: The architecture is not supported, or varies in a way that is not modelled.
        InvalidFileError: Keys or tensors are missing or contradict each other.
    """
    build = _ARCHITECTURES.get(values.architecture)
    if build is None:
        match = nearest_match(values.architecture, _ARCHITECTURES)
        hint = f" (the nearest that is: {match})" if match else ""
        raise CannotAnswerError(
            f"{values.where}: GGUF architecture {values.architecture!r:.60} is not supported{hint}; "
            f"supported are {', '.join(sorted(_ARCHITECTURES))}"
        )
    layers, tensors = values.required("block_count"), len(values.tensors)
    if layers > tensors:
        raise InvalidFileError([f"{values.where}: block_count is {layers:,}, and the file holds {tensors:,} tensors"])
    return {key: value for key, value in build(values).items() if value is not None}


def _common(values: GgufValues) -> Config:
    """Return the keys of every family."""
    hidden = values.required("embedding_length")
    embedding = values.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.dimensions) != 2:
        raise InvalidFileError([f"{values.where}: no token_embd.weight with two dimensions; is it part of a model?"])
    if embedding.dimensions[0] != hidden:
        raise InvalidFileError(
            [f"{values.where}: embedding_length is {hidden}, and rows of token_embd.weight {embedding.dimensions[0]}"]
        )
    return {
        "hidden_size": hidden,
        "num_hidden_layers": values.layers,
        "num_attention_heads": values.required("attention.head_count"),
        "vocab_size": embedding.dimensions[1],
        "max_position_embeddings": values.optional("context_length"),
        "tie_word_embeddings": not values.has("output.weight"),
    }


def _dense(values: GgufValues) -> Config:
    """Return the keys of a family with grouped queries and a dense feed-forward part."""
    value_length = values.optional("attention.value_length") or values.key_length
    if value_length != values.key_length:
        raise CannotAnswerError(
            f"{values.where}: heads of {values.key_length} for keys and {value_length} for values are not modelled"
        )
    return {
        **_common(values),
        "num_key_value_heads": values.optional("attention.head_count_kv") or values.required("attention.head_count"),
        "head_dim": values.key_length,
        "intermediate_size": values.optional("feed_forward_length"),
        "sliding_window": values.optional("attention.sliding_window", minimum=0) or None,
    }


def _expert_width(values: GgufValues) -> int | None:
    return values.optional("expert_feed_forward_length", minimum=0) or values.width("blk.{}.ffn_gate_exps.weight")


def _rotated_share(values: GgufValues) -> float | None:
    """Return the share of a head's dimensions that are rotated."""
    rotated = values.optional("rope.dimension_count")
    if rotated is None:
        return None
    # A quarter more than the exact share, so that its product with the width rounds down to the count.
    return min((rotated + 0.25) / values.key_length, 1.0)


def _llama(values: GgufValues) -> Config:
    config = _dense(values)
    config |= {
        "attention_bias": values.has("blk.{}.attn_q.bias") or None,
        "mlp_bias": values.has("blk.{}.ffn_up.bias") or None,
    }
    experts = values.optional("expert_count", minimum=0)
    if not experts:
        return {"model_type": "llama", **config}
    width = values.optional("expert_feed_forward_length", minimum=0) or config["intermediate_size"]
    return {
        "model_type": "mixtral",
        **config,
        "intermediate_size": width,
        "num_local_experts": experts,
        "num_experts_per_tok": values.required("expert_used_count"),
    }


def _plain(model_type: str) -> Callable[[GgufValues], Config]:
    return lambda values: {"model_type": model_type, **_dense(values)}


def _gemma(model_type: str) -> Callable[[GgufValues], Config]:
    def build(values: GgufValues) -> Config:
        config = {"model_type": model_type, **_dense(values), "tie_word_embeddings": True}
        if model_type != "gemma":
            config["attn_logit_softcapping"] = values.number("attn_logit_softcapping")
            config["final_logit_softcapping"] = values.number("final_logit_softcapping")
        return config

    return build


def _qwen_moe(model_type: str) -> Callable[[GgufValues], Config]:
    def build(values: GgufValues) -> Config:
        config = {
            "model_type": model_type,
            **_dense(values),
            "num_experts": values.required("expert_count"),
            "num_experts_per_tok": values.required("expert_used_count"),
            "moe_intermediate_size": _expert_width(values),
        }
        if model_type == "qwen2_moe":
            shared = values.optional("expert_shared_feed_forward_length", minimum=0)
            config["shared_expert_intermediate_size"] = shared or values.width("blk.{}.ffn_gate_shexp.weight")
        return config

    return build


def _rotating(model_type: str) -> Callable[[GgufValues], Config]:
    """Return the builder of a family that rotates part of each head."""
    return lambda values: {"model_type": model_type, **_dense(values), "partial_rotary_factor": _rotated_share(values)}


def _stablelm(values: GgufValues) -> Config:
    parallel = values.metadata.get("stablelm.use_parallel_residual")
    return {
        **_rotating("stablelm")(values),
        "use_qkv_bias": values.has("blk.{}.attn_q.bias"),
        "qk_layernorm": values.has("blk.{}.attn_q_norm.weight"),
        "use_parallel_residual": parallel if isinstance(parallel, bool) else not values.has("blk.{}.ffn_norm.weight"),
    }


def _gpt2(values: GgufValues) -> Config:
    common = _common(values)
    positions = values.tensors.get("position_embd.weight")
    return {
        "model_type": "gpt2",
        "n_embd": common["hidden_size"],
        "n_layer": common["num_hidden_layers"],
        "n_head": common["num_attention_heads"],
        "n_inner": values.optional("feed_forward_length"),
        "n_positions": positions.dimensions[-1] if positions else common["max_position_embeddings"],
        "vocab_size": common["vocab_size"],
        "tie_word_embeddings": True,
    }


def _gptneox(values: GgufValues) -> Config:
    parallel = values.metadata.get("gptneox.use_parallel_residual")
    return {
        "model_type": "gpt_neox",
        **_common(values),
        "intermediate_size": values.optional("feed_forward_length"),
        "rotary_pct": _rotated_share(values),
        "use_parallel_residual": parallel if isinstance(parallel, bool) else None,
    }


def _falcon(values: GgufValues) -> Config:
    groups = values.optional("attention.head_count_kv") or 1
    two_norms = values.has("blk.{}.attn_norm_2.weight")
    return {
        "model_type": "falcon",
        **_common(values),
        "new_decoder_architecture": two_norms,
        "multi_query": groups == 1,
        "num_kv_heads": groups,
        "parallel_attn": True,
        "bias": values.has("blk.{}.attn_qkv.bias"),
        "ffn_hidden_size": values.optional("feed_forward_length"),
        "alibi": False,
    }


def _deepseek2(values: GgufValues) -> Config:
    rotated = values.required("rope.dimension_count")
    # Newer files store the absorbed form, whose "heads" are as wide as the compressed keys; the real ones end in _mla.
    key_length = values.optional("attention.key_length_mla") or values.required("attention.key_length")
    value_length = values.optional("attention.value_length_mla") or values.required("attention.value_length")
    gating = values.optional("expert_gating_func", minimum=0)
    third = gating == _SIGMOID_GATING or values.has("blk.{}.exp_probs_b.bias")
    return {
        "model_type": "deepseek_v3" if third else "deepseek_v2",
        **_common(values),
        "intermediate_size": values.optional("feed_forward_length"),
        "q_lora_rank": values.optional("attention.q_lora_rank", minimum=0) or None,
        "kv_lora_rank": values.required("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key_length - rotated,
        "v_head_dim": value_length,
        "n_routed_experts": values.required("expert_count"),
        "num_experts_per_tok": values.required("expert_used_count"),
        "moe_intermediate_size": _expert_width(values),
        "n_shared_experts": values.optional("expert_shared_count", minimum=0),
        "first_k_dense_replace": values.optional("leading_dense_block_count", minimum=0) or 0,
    }


def _gpt_oss(values: GgufValues) -> Config:
    return {
        "model_type": "gpt_oss",
        **_dense(values),
        "intermediate_size": _expert_width(values),
        "num_local_experts": values.required("expert_count"),
        "num_experts_per_tok": values.required("expert_used_count"),
        "attention_bias": values.has("blk.{}.attn_q.bias"),
    }


_ARCHITECTURES: Mapping[str, Callable[[GgufValues], Config]] = {
    "deepseek2": _deepseek2,
    "falcon": _falcon,
    "gemma": _gemma("gemma"),
    "gemma2": _gemma("gemma2"),
    "gemma3": _gemma("gemma3_text"),
    "gpt-oss": _gpt_oss,
    "gpt2": _gpt2,
    "gptneox": _gptneox,
    "llama": _llama,
    "olmo": _plain("olmo"),
    "olmo2": _plain("olmo2"),
    "phi2": _rotating("phi"),
    "phi3": _rotating("phi3"),
    "qwen2": _plain("qwen2"),
    "qwen2moe": _qwen_moe("qwen2_moe"),
    "qwen3": _plain("qwen3"),
    "qwen3moe": _qwen_moe("qwen3_moe"),
    "smollm3": _plain("smollm3"),
    "stablelm": _stablelm,
}

TIED_ALWAYS = frozenset({"gemma", "gemma2", "gemma3", "gpt2"})
"""Architectures whose head is the embedding, also where a file stores it a second time."""
