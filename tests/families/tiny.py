"""Small configs that take every branch of every family, shared by the tests of this folder."""

BASE = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 96,
    "intermediate_size": 80,
    "max_position_embeddings": 128,
}
GROUPED = BASE | {"num_key_value_heads": 2}
GPT2 = {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 96, "n_positions": 32}
BLOOM = {"hidden_size": 64, "n_layer": 3, "n_head": 4, "vocab_size": 96}
GPTJ = GPT2 | {"rotary_dim": 8}
GPT_NEO = {"hidden_size": 64, "num_layers": 3, "num_heads": 4, "vocab_size": 96, "max_position_embeddings": 32}
GPT_NEO |= {"attention_types": [[["global", "local", "global"], 1]]}
OPT = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 96, "ffn_dim": 80}
OPT |= {"word_embed_proj_dim": 64, "max_position_embeddings": 32}
FALCON = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 96}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
QWEN2_MOE = GROUPED | {"num_experts_per_tok": 2, "num_experts": 4, "shared_expert_intermediate_size": 48}
QWEN3_MOE = GROUPED | {"num_experts_per_tok": 2, "num_experts": 4, "head_dim": 32}
LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12}
DEEPSEEK = BASE | EXPERTS | LATENT | {"num_key_value_heads": 4, "n_routed_experts": 8, "n_shared_experts": 2}
DEEPSEEK |= {"first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "q_lora_rank": 24}
GLM4_MOE = GROUPED | EXPERTS | {"head_dim": 16, "n_routed_experts": 8, "n_group": 2, "topk_group": 1}
DELTA = GROUPED | {"head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
DELTA |= {"linear_value_head_dim": 12, "num_hidden_layers": 4}
DELTA_MOE = DELTA | EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 48}
SCAN = GROUPED | {"mamba_d_ssm": 48, "mamba_n_heads": 6, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 12}
SCAN |= {"mamba_chunk_size": 16, "mamba_norm_before_gate": False}
GRANITE4 = GROUPED | {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 12, "mamba_chunk_size": 16}
GRANITE4 |= {"shared_intermediate_size": 48, "num_local_experts": 0, "layer_types": ["mamba", "attention", "mamba"]}
NEMOTRON_H = (
    GROUPED | EXPERTS | {"head_dim": 24, "mamba_num_heads": 6, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 12}
)
NEMOTRON_H |= {
    "chunk_size": 16,
    "moe_shared_expert_intermediate_size": 48,
    "layers_block_type": ["mamba", "moe", "attention"],
}
SCAN_BIASES = dict.fromkeys(
    ("mamba_proj_bias", "projectors_bias", "attention_bias", "mlp_bias", "mamba_rms_norm"), True
)
GEMMA4 = GROUPED | {"head_dim": 16, "global_head_dim": 32, "hidden_size_per_layer_input": 0, "num_hidden_layers": 8}
GEMMA4_SMALL = GEMMA4 | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96, "num_kv_shared_layers": 2}
GEMMA4_SOUND = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "output_proj_dims": 24}
LFM2 = GROUPED | {"full_attn_idxs": [1], "block_multiple_of": 8}
LFM2_MOE = (
    GROUPED | EXPERTS | {"num_experts": 4, "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1}
)
LLAMA4 = GROUPED | {"head_dim": 16, "num_local_experts": 4, "intermediate_size_mlp": 48, "no_rope_layer_interval": 2}
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
TOWER = {"hidden_size": 48, "intermediate_size": 50, "patch_size": 14}
EPSILON = {"rms_norm_eps": 1e-6}
QWEN_TOWER = TOWER | {"depth": 2, "num_heads": 3, "out_hidden_size": 64}
OTHER_TOWER = TOWER | {"num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 56}
GEMMA4_TOWER = TOWER | {"num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 16}
SIGLIP = OTHER_TOWER | {"vision_use_head": False}
GLM_TOWER = TOWER | {"depth": 2, "num_heads": 3, "out_hidden_size": 64, "image_size": 56}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
MLLAMA = GROUPED | {"num_hidden_layers": 5, "cross_attention_layers": [1, 3], "pad_token_id": 0}
MLLAMA_TOWER = {
    "hidden_size": 48,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_global_layers": 3,
    "vision_output_dim": 96,
}
MLLAMA_TOWER |= {"intermediate_layers_indices": [0], "attention_heads": 3, "image_size": 28}
IS_SIGLIP = {"model_type": "siglip_vision_model"}
GEMMA_TEXT = GROUPED | {"head_dim": 16}

DISTIL = {"dim": 64, "n_layers": 3, "n_heads": 4, "hidden_dim": 96, "vocab_size": 100}

CASES: dict[str, tuple[str, dict[str, object]]] = {
    "bert": ("bert", BASE),
    "roberta": ("roberta", BASE | {"type_vocab_size": 1, "pad_token_id": 0}),
    "xlm-roberta": ("xlm_roberta", BASE | {"hidden_act": "gelu_new", "pad_token_id": 0}),
    "distilbert": ("distilbert", DISTIL),
    "mpnet": ("mpnet", BASE),
    "modernbert": ("modernbert", BASE | {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}),
    "llama": ("llama", BASE),
    "llama-grouped": ("llama", GROUPED),
    "llama-tied": ("llama", GROUPED | TIED),
    "llama-attention-bias": ("llama", GROUPED | {"attention_bias": True}),
    "llama-mlp-bias": ("llama", GROUPED | {"mlp_bias": True}),
    "llama-head-dim": ("llama", GROUPED | {"head_dim": 24}),
    "internlm3": ("internlm3", GROUPED | {"head_dim": 16}),
    "internlm3-bias": ("internlm3", GROUPED | {"head_dim": 24, "attention_bias": True, "mlp_bias": True} | TIED),
    "mistral": ("mistral", GROUPED),
    "mistral-default-groups": ("mistral", BASE | {"num_attention_heads": 16}),
    "mistral-head-dim": ("mistral", GROUPED | {"head_dim": 32} | TIED),
    "mixtral": ("mixtral", GROUPED | {"num_local_experts": 4}),
    "mixtral-head-dim": ("mixtral", GROUPED | {"num_local_experts": 4, "head_dim": 8} | TIED),
    "minimax-m2": ("minimax_m2", GROUPED | {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": ("qwen2", GROUPED),
    "qwen2-tied": ("qwen2", GROUPED | TIED),
    "qwen2-moe": ("qwen2_moe", QWEN2_MOE),
    "qwen2-moe-step": ("qwen2_moe", QWEN2_MOE | {"decoder_sparse_step": 2} | TIED),
    "qwen2-moe-dense-layers": ("qwen2_moe", QWEN2_MOE | {"mlp_only_layers": [0, 2]}),
    "qwen2-moe-no-bias": ("qwen2_moe", QWEN2_MOE | {"qkv_bias": False}),
    "qwen3": ("qwen3", GROUPED),
    "qwen3-tied": ("qwen3", GROUPED | {"head_dim": 24} | TIED),
    "qwen3-bias": ("qwen3", GROUPED | {"head_dim": 16, "attention_bias": True}),
    "qwen3-moe": ("qwen3_moe", QWEN3_MOE),
    "qwen3-moe-mixed": ("qwen3_moe", QWEN3_MOE | {"decoder_sparse_step": 2, "mlp_only_layers": [1]}),
    "qwen3-moe-bias": ("qwen3_moe", QWEN3_MOE | {"attention_bias": True} | TIED),
    "qwen3-next": ("qwen3_next", DELTA_MOE),
    "qwen3-next-mixed": ("qwen3_next", DELTA_MOE | {"decoder_sparse_step": 2, "mlp_only_layers": [1]} | TIED),
    "qwen3.5": ("qwen3_5_text", DELTA),
    "qwen3.5-listed": ("qwen3_5_text", DELTA | {"layer_types": ["full_attention"] + ["linear_attention"] * 3} | TIED),
    "qwen3.5-moe": ("qwen3_5_moe_text", DELTA_MOE | {"attention_bias": True}),
    "falcon-h1": ("falcon_h1", SCAN),
    "falcon-h1-biases": ("falcon_h1", SCAN | SCAN_BIASES | TIED | {"mamba_conv_bias": False, "head_dim": 24}),
    "granite-4": ("granitemoehybrid", GRANITE4 | TIED),
    "granite-4-experts": ("granitemoehybrid", GRANITE4 | {"num_local_experts": 4, "mamba_proj_bias": True}),
    "granite-4-attention": (
        "granitemoehybrid",
        GRANITE4 | {"layer_types": ["attention"] * 3, "position_embedding_type": "rope", "attention_bias": True},
    ),
    "nemotron-h": ("nemotron_h", NEMOTRON_H),
    "nemotron-h-pattern": (
        "nemotron_h",
        {key: value for key, value in NEMOTRON_H.items() if key != "layers_block_type"}
        | {"hybrid_override_pattern": "M-E*", "num_hidden_layers": 4, "use_bias": True, "moe_latent_size": 40},
    ),
    "gemma": ("gemma", GROUPED | {"head_dim": 32}),
    "gemma-untied": ("gemma", GROUPED | {"num_key_value_heads": 1, "attention_bias": True} | UNTIED),
    "gemma2": ("gemma2", GROUPED | {"head_dim": 32}),
    "gemma2-bias": ("gemma2", BASE | {"attention_bias": True} | UNTIED),
    "gemma3-text": ("gemma3_text", GROUPED | {"head_dim": 32}),
    "gemma3-text-bias": ("gemma3_text", GROUPED | {"attention_bias": True} | UNTIED),
    "gemma4-text": ("gemma4_text", GEMMA4),
    "gemma4-text-keys": (
        "gemma4_text",
        GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "attention_bias": True} | UNTIED,
    ),
    "gemma4-text-small": ("gemma4_text", GEMMA4_SMALL | {"use_double_wide_mlp": True}),
    "gemma4-text-experts": (
        "gemma4_text",
        GEMMA4 | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24},
    ),
    "lfm2": ("lfm2", LFM2),
    "lfm2-listed": (
        "lfm2",
        GROUPED
        | {"layer_types": ["full_attention", "conv", "conv"], "conv_L_cache": 4, "block_auto_adjust_ff_dim": False}
        | UNTIED,
    ),
    "lfm2-moe": ("lfm2_moe", LFM2_MOE),
    "lfm2-moe-dense": ("lfm2_moe", LFM2_MOE | {"num_dense_layers": 2, "norm_topk_prob": False} | UNTIED),
    "llama4-text": ("llama4_text", LLAMA4),
    "llama4-text-mixed": (
        "llama4_text",
        LLAMA4
        | {"interleave_moe_layer_step": 2, "use_qk_norm": False, "attention_bias": True, "no_rope_layers": [0, 1, 1]}
        | TIED,
    ),
    "phi": ("phi", BASE),
    "phi-query-key-norm": ("phi", GROUPED | {"qk_layernorm": True} | TIED),
    "phi3": ("phi3", BASE),
    "phi3-grouped": ("phi3", GROUPED | {"partial_rotary_factor": 0.75} | TIED),
    "gpt2": ("gpt2", GPT2),
    "gpt2-inner": ("gpt2", GPT2 | {"n_inner": 100} | UNTIED),
    "gpt-neox": ("gpt_neox", BASE),
    "gpt-neox-sequential": ("gpt_neox", BASE | {"use_parallel_residual": False, "attention_bias": False} | TIED),
    "falcon-multi-query": ("falcon", FALCON),
    "falcon-bias": ("falcon", FALCON | {"bias": True, "ffn_hidden_size": 100} | UNTIED),
    "falcon-sequential": ("falcon", FALCON | {"parallel_attn": False, "multi_query": False}),
    "falcon-grouped": ("falcon", FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-one-norm": (
        "falcon",
        FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "olmoe": ("olmoe", GROUPED | {"num_experts_per_tok": 2, "num_experts": 4}),
    "olmoe-clipped": (
        "olmoe",
        GROUPED | {"num_experts_per_tok": 2, "num_experts": 4, "clip_qkv": 8.0, "attention_bias": True} | TIED,
    ),
    "granite-moe": ("granitemoe", GROUPED | {"num_local_experts": 4}),
    "granite-moe-factors": (
        "granitemoe",
        GROUPED | {"num_local_experts": 4, "logits_scaling": 6.0, "residual_multiplier": 0.22} | TIED,
    ),
    "opt": ("opt", OPT),
    "opt-no-bias": ("opt", OPT | {"enable_bias": False, "layer_norm_elementwise_affine": False} | UNTIED),
    "gpt-neo": ("gpt_neo", GPT_NEO),
    "gpt-neo-inner": ("gpt_neo", GPT_NEO | {"intermediate_size": 100, "window_size": 8} | UNTIED),
    "bloom": ("bloom", BLOOM),
    "bloom-untied": ("bloom", BLOOM | {"n_head": 2} | UNTIED),
    "gptj": ("gptj", GPTJ),
    "gptj-inner": ("gptj", GPTJ | {"n_inner": 100, "rotary_dim": 16} | TIED),
    "gpt-bigcode": ("gpt_bigcode", GPT2),
    "gpt-bigcode-heads": ("gpt_bigcode", GPT2 | {"multi_query": False, "n_inner": 100} | UNTIED),
    "olmo": ("olmo", GROUPED),
    "olmo-bias": ("olmo", BASE | {"attention_bias": True} | TIED),
    "olmo2": ("olmo2", GROUPED),
    "olmo2-bias": ("olmo2", BASE | {"attention_bias": True} | TIED),
    "olmo3": ("olmo3", GROUPED),
    "olmo3-listed": ("olmo3", GROUPED | {"layer_types": ["full_attention"] + ["sliding_attention"] * 2} | TIED),
    "olmo-clipped": ("olmo", GROUPED | {"clip_qkv": 0.1}),
    "cohere": ("cohere", GROUPED),
    "cohere-query-key-norm": ("cohere", GROUPED | {"use_qk_norm": True, "attention_bias": True} | UNTIED),
    "cohere2": ("cohere2", GROUPED | {"attention_bias": True}),
    "cohere2-listed": ("cohere2", GROUPED | {"layer_types": ["full_attention"] + ["sliding_attention"] * 2} | UNTIED),
    "granite": (
        "granite",
        GROUPED | {"embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22},
    ),
    "granite-bias": (
        "granite",
        GROUPED | {"attention_multiplier": 0.1, "attention_bias": True, "mlp_bias": True} | TIED,
    ),
    "hunyuan": ("hunyuan_v1_dense", GROUPED | {"head_dim": 24}),
    "hunyuan-bias": ("hunyuan_v1_dense", BASE | {"head_dim": 16, "attention_bias": True} | TIED),
    "seed-oss": ("seed_oss", GROUPED | {"head_dim": 24}),
    "seed-oss-bias": (
        "seed_oss",
        GROUPED | {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True} | TIED,
    ),
    "exaone4": ("exaone4", GROUPED | {"num_hidden_layers": 4}),
    "exaone4-listed": ("exaone4", GROUPED | {"layer_types": ["full_attention"] + ["sliding_attention"] * 2} | TIED),
    "arcee": ("arcee", GROUPED),
    "arcee-bias": ("arcee", GROUPED | {"head_dim": 24, "attention_bias": True, "mlp_bias": True} | TIED),
    "apertus": ("apertus", GROUPED),
    "apertus-bias": ("apertus", BASE | {"attention_bias": True} | TIED),
    "starcoder2": ("starcoder2", GROUPED),
    "starcoder2-no-bias": ("starcoder2", GROUPED | {"use_bias": False, "sliding_window": 64} | UNTIED),
    "glm": ("glm", GROUPED | {"head_dim": 32}),
    "glm-whole": ("glm", GROUPED | {"head_dim": 16, "partial_rotary_factor": 1.0, "attention_bias": False} | TIED),
    "glm4": ("glm4", GROUPED | {"head_dim": 32}),
    "glm4-moe": ("glm4_moe", GLM4_MOE),
    "glm4-moe-norm": (
        "glm4_moe",
        GLM4_MOE | {"use_qk_norm": True, "attention_bias": True, "first_k_dense_replace": 2} | TIED,
    ),
    "ernie4.5": ("ernie4_5", GROUPED | {"head_dim": 24}),
    "ernie4.5-bias": ("ernie4_5", GROUPED | {"use_bias": True} | UNTIED),
    "stablelm": ("stablelm", GROUPED),
    "stablelm-bias": ("stablelm", GROUPED | {"use_qkv_bias": True} | TIED),
    "stablelm-parallel": ("stablelm", GROUPED | {"use_parallel_residual": True}),
    "smollm3": ("smollm3", GROUPED),
    "smollm3-bias": ("smollm3", GROUPED | {"attention_bias": True, "mlp_bias": True} | UNTIED),
    "smollm3-listed": ("smollm3", GROUPED | {"no_rope_layers": [0, 1, 1]}),
    "deepseek-v2": ("deepseek_v2", DEEPSEEK),
    "deepseek-v2-direct-query": ("deepseek_v2", DEEPSEEK | {"q_lora_rank": None, "first_k_dense_replace": 0}),
    "deepseek-v2-bias": ("deepseek_v2", DEEPSEEK | {"attention_bias": True} | TIED),
    "glm4-moe-lite": ("glm4_moe_lite", DEEPSEEK | {"n_shared_experts": 1}),
    "glm4-moe-lite-listed": (
        "glm4_moe_lite",
        BASE
        | EXPERTS
        | LATENT
        | {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_key_value_heads": 4, "q_lora_rank": None}
        | {"mlp_layer_types": ["dense", "dense", "sparse"]}
        | TIED,
    ),
    "deepseek-v3": ("deepseek_v3", DEEPSEEK),
    "deepseek-v3-direct-query": ("deepseek_v3", DEEPSEEK | {"q_lora_rank": None, "first_k_dense_replace": 2}),
    "youtu": ("youtu", BASE | LATENT | {"num_key_value_heads": 4, "q_lora_rank": 24}),
    "youtu-direct-query": ("youtu", BASE | LATENT | UNTIED | {"num_key_value_heads": 4, "q_lora_rank": None}),
    "deepseek-v3-bias": ("deepseek_v3", DEEPSEEK | {"attention_bias": True, "n_shared_experts": 1} | TIED),
    "ministral3": ("ministral3", GROUPED | {"head_dim": 32}),
    "qwen2.5-vl": ("qwen2_5_vl", {"text_config": GROUPED | EPSILON, "vision_config": QWEN_TOWER}),
    "qwen2.5-vl-flat": ("qwen2_5_vl", GROUPED | EPSILON | TIED | {"vision_config": QWEN_TOWER}),
    "qwen2-vl": (
        "qwen2_vl",
        {
            "text_config": GROUPED | EPSILON,
            "vision_config": {"embed_dim": 48, "depth": 2, "num_heads": 3, "hidden_size": 64},
        },
    ),
    "llava": ("llava", UNTIED | {"text_config": GROUPED | EPSILON, "vision_config": OTHER_TOWER}),
    "llava-next": ("llava_next", UNTIED | {"text_config": GROUPED | EPSILON, "vision_config": OTHER_TOWER}),
    "llava-pixtral": (
        "llava",
        {"text_config": GROUPED | {"model_type": "mistral"}, "vision_config": OTHER_TOWER | {"model_type": "pixtral"}}
        | {"multimodal_projector_bias": False}
        | UNTIED,
    ),
    "qwen3-vl": ("qwen3_vl", {"text_config": GROUPED, "vision_config": QWEN_TOWER | {"deepstack_visual_indexes": [1]}}),
    "qwen3-vl-tied": (
        "qwen3_vl",
        TIED | {"text_config": GROUPED | {"attention_bias": True}, "vision_config": QWEN_TOWER},
    ),
    "qwen3.5-whole": ("qwen3_5", {"text_config": DELTA, "vision_config": QWEN_TOWER}),
    "qwen3-vl-moe": (
        "qwen3_vl_moe",
        {"text_config": QWEN3_MOE | EXPERTS, "vision_config": QWEN_TOWER | {"deepstack_visual_indexes": [1]}} | UNTIED,
    ),
    "qwen3.5-moe-whole": ("qwen3_5_moe", TIED | {"text_config": DELTA_MOE, "vision_config": QWEN_TOWER}),
    "gemma3": ("gemma3", {"text_config": GROUPED | {"head_dim": 32}, "vision_config": SIGLIP}),
    "gemma4": (
        "gemma4",
        {"text_config": GEMMA4, "vision_config": GEMMA4_TOWER},
    ),
    "gemma4-sound": (
        "gemma4",
        {"text_config": GEMMA4_SMALL, "vision_config": GEMMA4_TOWER, "audio_config": GEMMA4_SOUND},
    ),
    "gemma4-unified-text": (
        "gemma4_unified_text",
        {key: value for key, value in GEMMA4.items() if "per_layer" not in key},
    ),
    "gemma4-unified": (
        "gemma4_unified",
        {
            "text_config": {key: value for key, value in GEMMA4.items() if "per_layer" not in key},
            "vision_config": {"patch_size": 4, "mm_embed_dim": 24, "output_proj_dims": 24, "mm_posemb_size": 20},
            "audio_config": {"audio_embed_dim": 32},
        },
    ),
    "mistral3": ("mistral3", UNTIED | {"text_config": GROUPED, "vision_config": OTHER_TOWER}),
    "mistral3-bias": (
        "mistral3",
        TIED
        | {"text_config": GROUPED | {"model_type": "ministral3"}, "vision_config": OTHER_TOWER}
        | {"multimodal_projector_bias": True},
    ),
    "mistral4": (
        "mistral3",
        UNTIED
        | {
            "text_config": DEEPSEEK | {"model_type": "mistral4", "first_k_dense_replace": 0},
            "vision_config": OTHER_TOWER,
        },
    ),
    "mistral4-direct-query": (
        "mistral3",
        TIED
        | {"text_config": DEEPSEEK | {"model_type": "mistral4", "q_lora_rank": None, "attention_bias": True}}
        | {"vision_config": OTHER_TOWER},
    ),
    "smolvlm": ("smolvlm", UNTIED | {"text_config": GROUPED | EPSILON, "vision_config": OTHER_TOWER}),
    "idefics3": ("idefics3", TIED | {"text_config": GROUPED, "vision_config": OTHER_TOWER, "scale_factor": 3}),
    "lfm2-vl": ("lfm2_vl", TIED | {"text_config": LFM2, "vision_config": SIGLIP | {"num_patches": 16}}),
    "lfm2-vl-no-norm": (
        "lfm2_vl",
        UNTIED
        | {"text_config": LFM2, "vision_config": SIGLIP, "projector_use_layernorm": False, "projector_bias": False},
    ),
    "llava-next-granite": (
        "llava_next",
        TIED | {"text_config": GROUPED | {"model_type": "granite"}, "vision_config": OTHER_TOWER | IS_SIGLIP},
    ),
    "llava-next-video": (
        "llava_next_video",
        UNTIED | {"text_config": GROUPED | EPSILON, "vision_config": OTHER_TOWER, "vision_feature_layer": [-2, -1]},
    ),
    "mllama": ("mllama", {"text_config": MLLAMA, "vision_config": MLLAMA_TOWER}),
    "paligemma": ("paligemma", {"text_config": GEMMA_TEXT, "vision_config": SIGLIP, "projection_dim": 64}),
    "paligemma-2": (
        "paligemma",
        {"text_config": GEMMA_TEXT | {"model_type": "gemma2"}, "vision_config": SIGLIP, "projection_dim": 64},
    ),
    "llava-onevision": ("llava_onevision", UNTIED | {"text_config": GROUPED | EPSILON, "vision_config": SIGLIP}),
    "llava-onevision-tied": ("llava_onevision", {"text_config": GROUPED | TIED, "vision_config": SIGLIP}),
    "internvl": ("internvl", UNTIED | {"text_config": GROUPED | EPSILON, "vision_config": OTHER_TOWER}),
    "glm4v": ("glm4v", UNTIED | {"text_config": GROUPED | {"rope_parameters": MROPE}, "vision_config": GLM_TOWER}),
    "internvl-llama": (
        "internvl",
        UNTIED | {"text_config": GROUPED | {"model_type": "llama"}, "vision_config": OTHER_TOWER},
    ),
    "internvl-moe": (
        "internvl",
        UNTIED | {"text_config": QWEN3_MOE | EXPERTS | {"model_type": "qwen3_moe"}, "vision_config": OTHER_TOWER},
    ),
    "internvl-qwen3": (
        "internvl",
        TIED
        | {"text_config": GROUPED | {"model_type": "qwen3"}, "downsample_ratio": 0.25}
        | {"vision_config": OTHER_TOWER | {"use_qk_norm": True, "norm_type": "rms_norm", "use_mask_token": True}},
    ),
    "gpt-oss": ("gpt_oss", GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt-oss-no-bias": (
        "gpt_oss",
        GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2, "attention_bias": False} | TIED,
    ),
}

THEIRS = (
    "bert",
    "roberta",
    "xlm_roberta",
    "distilbert",
    "mpnet",
    "modernbert",
    "apertus",
    "bloom",
    "llava",
    "qwen2_vl",
    "qwen3_5",
    "qwen3_next",
    "falcon_h1",
    "granitemoehybrid",
    "nemotron_h",
    "gemma3",
    "paligemma",
    "gemma4",
    "idefics3",
    "glm4v",
    "mllama",
    "internvl",
    "lfm2",
    "smolvlm",
    "llama4",
    "mistral3",
    "qwen2_5_vl",
    "qwen3_vl",
)
OWN_CASES = [case for case, (family, _) in CASES.items() if family == "gemma3_text" or not family.startswith(THEIRS)]
OWN_CASES.remove("cohere-query-key-norm")
"""Those that memplan's own models run as well as transformers': without ALiBi, gated delta networks, state space layers, vision towers and norms with a scale
for each head."""
