"""What keys of a released config mean to families that do not read them."""

from collections.abc import Mapping
from typing import Any

_CHANGES: Mapping[str, str] = {
    "routed experts": "num_experts num_local_experts n_routed_experts moe_intermediate_size moe_num_experts num_moe_experts",
    "shared experts": "n_shared_experts num_shared_experts shared_expert_intermediate_size shared_intermediate_size",
    "latent attention": "kv_lora_rank q_lora_rank qk_rope_head_dim",
    "biases": "attention_bias qkv_bias use_qkv_bias mlp_bias bias use_bias lm_head_bias add_bias_linear",
    "a norm of queries and keys": "qk_layernorm use_qk_norm qk_norm",
    "soft caps of logits": "attn_logit_softcapping final_logit_softcapping",
    "cross attention": "add_cross_attention is_encoder_decoder",
    "ALiBi position biases": "alibi use_alibi",
    "partly rotated heads": "partial_rotary_factor rotary_pct rotary_dim",
    "experts in some layers only": "moe_layer_freq decoder_sparse_step interleave_moe_layer_step mlp_only_layers",
    "embeddings of each layer": "hidden_size_per_layer_input vocab_size_per_layer_input",
    "parallel attention and feed-forward parts": "use_parallel_residual parallel_attn",
    "keys and values shared between layers": "num_kv_shared_layers",
    "layers without attention": "attn_layer_indices",
    "an embedding narrower than the model": "word_embed_proj_dim embedding_size",
    "heads of another width": "head_dim",
    "grouped queries": "num_key_value_heads multi_query",
    "clipped queries, keys and values": "clip_qkv",
}
MEMORY_KEYS: Mapping[str, str] = {key: reason for reason, keys in _CHANGES.items() for key in keys.split()}
"""Keys that change memory: a family that does not read one refuses a config that sets it."""

MEMORY_PREFIXES: Mapping[str, str] = {
    "mamba_": "state-space layers",
    "ssm_": "state-space layers",
    "linear_": "linear attention",
    "attn_layer_": "layers without attention",
    "expert_layer_": "experts in some layers only",
    "index_": "sparse attention",
}

NEUTRAL_ONE = frozenset(
    {
        "scale_attn_weights",
        "partial_rotary_factor",
        "rotary_pct",
        "moe_layer_freq",
        "decoder_sparse_step",
        "interleave_moe_layer_step",
    }
)
"""Keys for which 1 means the ordinary case."""

ARITHMETIC_KEYS = frozenset(
    {
        "apply_residual_connection_post_layernorm",
        "attention_chunk_size",
        "dim_model_base",
        "logit_scale",
        "logits_scaling",
        "n_group",
        "norm_topk_prob",
        "query_pre_attn_scalar",
        "reorder_and_upcast_attn",
        "resid_scale",
        "residual_scale",
        "routed_scaling_factor",
        "router_jitter_noise",
        "scale_attn_by_inverse_layer_idx",
        "scale_attn_weights",
        "scale_depth",
        "scale_emb",
        "scoring_func",
        "swiglu_alpha",
        "swiglu_limit",
        "topk_group",
        "topk_method",
        "use_bidirectional_attention",
    }
)
ARITHMETIC_PARTS = ("multiplier", "softcap")
"""Keys, and parts of keys, that change what is computed: a family that does not read one refuses a config that
sets it, since the tensors of an operation that is not modelled are in no figure. A factor of 1 has no effect."""

NOTED_KEYS: Mapping[str, str] = {
    "num_nextn_predict_layers": "multi-token prediction modules are left out, as transformers leaves them out",
    "mtp_num_hidden_layers": "multi-token prediction modules are left out, as transformers leaves them out",
    "vision_config": "the vision tower is left out: text only",
    "audio_config": "the audio tower is left out: text only",
}
"""Keys whose effect is left out, and what the model's notes say then."""

# fmt: off
HARMLESS_KEYS = frozenset({
    "_attn_implementation", "_attn_implementation_autoset", "_commit_hash", "_name_or_path",
    "_sliding_window_pattern", "architecture", "architectures", "boi_token_id", "boi_token_index",
    "attn_implementation", "auto_map", "aux_loss_alpha", "bad_words_ids",
    "begin_suppress_tokens", "beta_fast", "beta_slow", "bos_token_id", "cache_implementation",
    "chunk_size_feed_forward", "classifier_dropout", "cross_attention_hidden_size", "decoder_start_token_id",
    "description", "diversity_penalty", "do_sample", "dtype", "early_stopping",
    "encoder_no_repeat_ngram_size", "eoi_token_id", "eoi_token_index", "eos_token_id", "ep_size",
    "exponential_decay_length_penalty", "finetuning_task", "first_last_layers", "forced_bos_token_id",
    "forced_eos_token_id", "gradient_checkpointing", "head_dim_original", "id2label", "image_token_id",
    "image_token_index", "initial_context_length",
    "initializer_factor", "initializer_range", "is_decoder", "is_llama_config", "keys_to_ignore_at_inference",
    "label2id", "layer_norm_eps", "layer_norm_epsilon", "layer_types", "length_penalty", "max_length",
    "max_new_tokens", "max_sequence_length", "max_window_layers", "min_length", "model_max_length", "model_type", "mtp_use_dedicated_embeddings",
    "n_ctx", "no_repeat_ngram_size", "norm_eps", "num_beam_groups", "num_beams",
    "num_labels", "num_return_sequences", "original_max_position_embeddings", "output_attentions",
    "output_hidden_states", "output_router_logits", "output_scores", "pad_token_id", "position_embedding_type",
    "prefix", "pretraining_tp", "problem_type", "pruned_heads", "qk_head_dim", "quantization_config",
    "remove_invalid_values", "repetition_penalty",
    "return_dict", "return_dict_in_generate", "rms_norm_eps", "rope_interleave", "rope_interleaved",
    "rope_local_base_freq", "rope_parameters", "rope_scaling", "rope_theta", "rotary", "rotary_emb_base",
    "router_aux_loss_coef",
    "sep_token_id", "seq_aux", "seq_length", "sliding_window",
    "sliding_window_pattern", "summary_activation", "summary_first_dropout", "summary_proj_to_labels",
    "summary_type", "summary_use_proj", "suppress_tokens", "task_specific_params",
    "temperature", "tf_legacy_loss", "tie_encoder_decoder", "tokenizer_class", "top_k", "top_p",
    "torch_dtype", "torchscript", "transformers.js_config", "transformers_version", "typical_p",
    "unk_token_id", "unsloth_fixed", "unsloth_version", "use_bfloat16", "use_cache",
    "use_mrope", "use_sliding_window", "video_token_id", "vision_end_token_id", "vision_start_token_id",
    "vision_token_id", "zloss_coef",
})
# fmt: on
"""Keys that change no tensor and no byte."""


def is_neutral(key: str, value: Any) -> bool:
    """Tell whether ``value`` leaves a key of memory or arithmetic without effect."""
    factor = changes_arithmetic(key) and not isinstance(value, bool)
    return not value or (value == 1 and (factor or key in NEUTRAL_ONE))


def changes_arithmetic(key: str) -> bool:
    """Tell whether a key is known to change what a model computes."""
    return key in ARITHMETIC_KEYS or key.startswith("mup_") or any(part in key for part in ARITHMETIC_PARTS)


def memory_reason(key: str) -> str | None:
    """Return what a key would change in memory, or None for a key not known to."""
    if key in MEMORY_KEYS:
        return MEMORY_KEYS[key]
    return next((reason for prefix, reason in MEMORY_PREFIXES.items() if key.startswith(prefix)), None)
