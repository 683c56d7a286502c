"""Models for a survey: released shapes cut in depth, and odd ones that no one has released."""

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from memplan.catalog.catalog import Catalog
from memplan.catalog.entries import ModelEntry
from memplan.model.families import families

Values = dict[str, Any]

HEADS = (1, 2, 3, 4, 6, 7, 8, 12, 16)
WIDTHS = (8, 16, 20, 24, 32, 40, 48, 64, 80, 96, 100, 128, 160, 256)
VOCABULARIES = (97, 1000, 8191, 32000, 50257, 65537)

DEPTH_KEYS = {**dict.fromkeys(("gpt2", "gpt_bigcode", "gptj", "bloom"), "n_layer"), "gpt_neo": "num_layers"}
"""Family -> key of its number of layers, where that is not ``num_hidden_layers``."""

LINEAR = ("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
"""Families with gated delta networks, which only models of transformers run."""

STATE_SPACE = ("falcon_h1", "granitemoehybrid", "nemotron_h")
"""Families with state space layers, likewise."""

ENCODERS = ("bert", "roberta", "xlm_roberta", "distilbert", "mpnet", "modernbert")
"""Families whose tokens see all others, of which embeddings and classes are learnt alone."""

NOT_BUNDLED = (
    *LINEAR,
    *STATE_SPACE,
    "apertus",
    "bloom",
    "gemma4_text",
    "gemma4_unified_text",
    "lfm2",
    "lfm2_moe",
    "llama4_text",
    *ENCODERS,
)
"""Families that memplan's own models do not run, ALiBi's, Gemma 4's, Llama 4's, encoders and short convolutions among them."""

OWN_HEAD_WIDTH = frozenset(
    {
        "llama",
        "mistral",
        "mixtral",
        "qwen3",
        "qwen3_moe",
        "gemma",
        "gemma2",
        "gemma3_text",
        "gemma4_text",
        "gemma4_unified_text",
        "llama4_text",
        "gpt_oss",
        "ministral3",
        "hunyuan_v1_dense",
        "minimax_m2",
        "seed_oss",
        "ernie4_5",
        "glm",
        "glm4",
        "glm4_moe",
        "arcee",
        *LINEAR,
        *STATE_SPACE,
    }
)
"""Families whose heads need not divide the residual stream."""

GPT2_NAMES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "n_inner": "intermediate_size",
}
UNGROUPED = frozenset(
    {*ENCODERS, "gpt2", "gpt_neox", "phi", "falcon", "opt", "gpt_bigcode", "gpt_neo", "gptj", "bloom"}
)
LEARNED = {
    **dict.fromkeys(("gpt2", "gpt_bigcode", "gptj"), "n_positions"),
    **dict.fromkeys(("opt", "gpt_neo", *ENCODERS), "max_position_embeddings"),
}
"""Family with rows for each position -> key of their number, which no sequence is longer than."""

TOWERS = {
    "gemma3": ("gemma3_text",),
    "gemma4": ("gemma4_text",),
    "gemma4_unified": ("gemma4_unified_text",),
    "mistral3": ("mistral", "ministral3", "mistral4"),
    "qwen2_5_vl": ("qwen2",),
    "qwen2_vl": ("qwen2",),
    **dict.fromkeys(("llava", "llava_next_video"), ("llama", "mistral", "qwen2")),
    "llava_next": ("granite", "llama", "mistral", "qwen2"),
    "paligemma": ("gemma", "gemma2"),
    "glm4v": ("glm4",),
    "mllama": ("llama",),
    **dict.fromkeys(("idefics3", "smolvlm"), ("llama",)),
    "lfm2_vl": ("lfm2",),
    "llava_onevision": ("qwen2",),
    "internvl": ("llama", "qwen2", "qwen3", "qwen3_moe"),
    "qwen3_vl": ("qwen3",),
    "qwen3_vl_moe": ("qwen3_moe",),
    "qwen3_5": ("qwen3_5_text",),
    "qwen3_5_moe": ("qwen3_5_moe_text",),
}
"""Vision-language family -> families of its text model."""


def model_values(rng: Random, catalog: Catalog, *, linear: bool = False) -> Values:
    """Return the keys of a model's config, its family under ``model_type``: every family is as likely.

    Args:
        linear: Whether only families with gated delta networks or state space layers are drawn, of which none is otherwise.
    """
    others = (*LINEAR, *STATE_SPACE, *ENCODERS)
    family = rng.choice((*LINEAR, *STATE_SPACE) if linear else tuple(name for name in families() if name not in others))
    if family in TOWERS:
        return _with_tower(rng, family, catalog)
    return _text_model(rng, family, catalog)


def _text_model(rng: Random, family: str, catalog: Catalog) -> Values:
    entries = [entry for _, entry in sorted(catalog.models.entries.items()) if entry.architecture == family]
    return _released(rng, family, entries) if entries and rng.random() < 0.6 else _odd(rng, family)


def encoder_model(rng: Random, catalog: Catalog) -> Values:
    """Return the keys of an encoder's config, some with the dropout that it is released with and some without."""
    family = rng.choice(ENCODERS)
    drawn = "bert" if family in ("distilbert", "modernbert") else family
    values = _text_model(rng, drawn, catalog)
    values |= {"model_type": family} if drawn != family else {}
    values.pop("tie_word_embeddings", None)
    if values["hidden_size"] % values["num_attention_heads"]:
        values["hidden_size"] = 32 * values["num_attention_heads"]
    keys = ("hidden_dropout_prob", "attention_probs_dropout_prob")
    values |= {key: rng.choice((0.1, 0.1, 0.0)) for key in keys}
    values["type_vocab_size"] = rng.choice((1, 2))
    values["max_position_embeddings"] = rng.choice((514, 2050))
    if family == "mpnet":
        values.pop("type_vocab_size")
    if family == "modernbert":
        shapes = ("hidden_size", "num_attention_heads", "intermediate_size", "vocab_size", "max_position_embeddings")
        own = {"classifier_pooling": rng.choice(("mean", "cls")), "local_attention": rng.choice((128, 128, 500))}
        own |= {"num_hidden_layers": rng.randint(2, 5), "global_attn_every_n_layers": rng.choice((2, 3, 3))}
        return {"model_type": family, **{key: values[key] for key in shapes}, **own}
    if family == "distilbert":
        none = ("type_vocab_size", "layer_norm_eps", "hidden_act")
        values = {DISTILBERT.get(key, key): value for key, value in values.items() if key not in none}
        values["seq_classif_dropout"] = rng.choice((0.2, 0.0))
    return values


DISTILBERT = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "intermediate_size": "hidden_dim",
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
}
"""Keys of BERT's configs, as DistilBERT's have them."""


IMAGE_FAMILIES = ("qwen2_5_vl", "gemma3")
"""Families of which rows with images are drawn; those of ``qwen3_vl`` where it is asked for alone."""

POOLED_IMAGES = ((56, 4), (112, 4), (112, 16), (224, 64), (448, 256))
"""Pixels of an image, each way, and the tokens that it becomes where patches are pooled."""


def image_model(rng: Random, catalog: Catalog, families: Sequence[str] = IMAGE_FAMILIES) -> Values:
    """Return a model of one of these families, whose tower images pass through, some with blocks of a released width."""
    family = rng.choice(families)
    values = _with_tower(rng, family, catalog)
    vision: Values = values["vision_config"]
    if family == "gemma3":
        side, tokens = rng.choice(POOLED_IMAGES)
        vision["image_size"] = side
        if rng.random() < 0.3:
            vision |= {"hidden_size": 1152, "intermediate_size": 4304, "num_attention_heads": 16}
        return {**values, "vision_config": vision, "mm_tokens_per_image": tokens, "image_token_index": 5}
    if family == "qwen3_vl":
        if rng.random() < 0.4:
            vision |= {"hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16}
        deep = [n for n in range(vision["depth"]) if rng.random() < 0.5]
        return {
            **values,
            "vision_config": {**vision, "deepstack_visual_indexes": deep[: values["text_config"]["num_hidden_layers"]]},
        }
    if rng.random() < 0.4:
        vision |= {"hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16}
    blocks = range(vision["depth"])
    return {**values, "vision_config": {**vision, "fullatt_block_indexes": [n for n in blocks if rng.random() < 0.4]}}


def _with_tower(rng: Random, family: str, catalog: Catalog) -> Values:
    """Return a vision-language model: a drawn text model behind a small tower, which no release has."""
    text = _text_model(rng, rng.choice(TOWERS[family]), catalog)
    tied = text.pop("tie_word_embeddings", False)
    heads = rng.choice((1, 2, 4))
    kind = str(text.pop("model_type"))
    vision: Values = {
        "depth" if family.startswith("qwen") else "num_hidden_layers": rng.randint(1, 4),
        "num_heads" if family.startswith("qwen") else "num_attention_heads": heads,
        "hidden_size": heads * rng.choice((16, 24, 64)),
        "intermediate_size": rng.choice((40, 96, 257)),
        "patch_size": 14,
    }
    if family == "qwen2_vl":
        vision |= {"embed_dim": vision["hidden_size"], "hidden_size": text["hidden_size"]}
    if family in LINEAR:
        vision["out_hidden_size"] = text["hidden_size"]
    elif family.startswith("qwen"):
        vision["out_hidden_size"] = text["hidden_size"]
        half = int(text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]) // 2
        sections = [half - half // 3 * 2, half // 3, half // 3]
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections}
    if family.startswith("qwen3_vl"):
        vision["deepstack_visual_indexes"] = [0][: rng.randint(0, 1)]
    if family == "mllama":
        return _mllama(rng, text, vision)
    if family == "glm4v":
        return _glm4v(rng, text, vision, tied=tied)
    if family == "gemma4_unified":
        width = rng.choice((16, 40, 64))
        vision = {"patch_size": 4, "mm_embed_dim": width, "output_proj_dims": width, "mm_posemb_size": 20}
    if family in ("gemma3", "idefics3", "internvl", "llava_onevision", "paligemma", "smolvlm"):
        vision |= {"image_size": 56}
    if family in ("gemma3", "lfm2_vl", "llava_onevision"):
        vision |= {"vision_use_head": False}
    elif family == "paligemma":
        vision["vision_use_head"] = rng.random() < 0.3
    if family == "llava_next" and rng.random() < 0.3:
        vision |= {"model_type": "siglip_vision_model", "image_size": 56}
    if len(TOWERS[family]) > 1:
        text["model_type"] = kind
    own = {"projection_dim": text["hidden_size"]} if family == "paligemma" else {}
    return {"model_type": family, "text_config": text, "vision_config": vision, "tie_word_embeddings": tied, **own}


def _glm4v(rng: Random, text: Values, vision: Values, *, tied: bool) -> Values:
    """Return a GLM-4.1V: heads of its text model divide the residual stream, and half of one is rotated, as in all releases."""
    width, part = rng.choice((16, 32, 64)), 0.5
    text = {key: value for key, value in text.items() if key not in ("attention_bias", "head_dim")}
    text |= {"hidden_size": text["num_attention_heads"] * width}
    sections = [int(width * part) // 2 - 4, 2, 2]
    rotary = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections, "partial_rotary_factor": part}
    vision |= {"out_hidden_size": text["hidden_size"], "image_size": 56}
    return {
        "model_type": "glm4v",
        "text_config": {**text, "rope_parameters": rotary},
        "vision_config": vision,
        "tie_word_embeddings": tied,
    }


def _mllama(rng: Random, text: Values, vision: Values) -> Values:
    """Return a Llama 3.2 Vision, of whose layers some attend to images, and neither the first nor the last, as in all releases."""
    others = ("attention_bias", "mlp_bias", "head_dim")
    layers, blocks = rng.randint(3, 6), rng.randint(1, 3)
    crossed = sorted(rng.sample(range(1, layers - 1), rng.randint(1, min(2, layers - 2))))
    text = {key: value for key, value in text.items() if key not in others}
    text |= {"num_hidden_layers": layers, "cross_attention_layers": crossed, "pad_token_id": 0}
    text |= {"hidden_size": text["num_attention_heads"] * rng.choice((16, 32, 64))}
    width = 16 * rng.randint(1, 6)
    vision |= {"attention_heads": vision.pop("num_attention_heads"), "hidden_size": width, "num_global_layers": blocks}
    vision |= {"image_size": 28, "intermediate_layers_indices": [0], "vision_output_dim": 2 * width}
    return {"model_type": "mllama", "text_config": text, "vision_config": vision}


def _released(rng: Random, family: str, entries: Sequence[ModelEntry]) -> Values:
    """Return a released model of a family, one to three layers of it."""
    values: Values = {**rng.choice(entries).config, "model_type": family}
    values[DEPTH_KEYS.get(family, "num_hidden_layers")] = rng.randint(1, 3)
    if values.get("first_k_dense_replace"):
        values["first_k_dense_replace"] = 1 if family == "glm4_moe_lite" else rng.randint(0, 2)
    values.pop("no_rope_layers", None)
    values.pop("layer_types", None)
    if family == "gpt_neo":
        values["attention_types"] = [[["global", "local", "global"][: values["num_layers"]], 1]]
    if family.startswith("lfm2"):
        values["layer_types"] = _attended(rng, values["num_hidden_layers"])
    if family == "lfm2_moe":
        values |= {"num_experts": 8, "num_dense_layers": rng.randint(0, 1)}
    if family in LINEAR:
        values |= {"num_hidden_layers": rng.choice((2, 3)), "full_attention_interval": 2}
        if "num_experts" in values:
            values["num_experts"] = 16
    if family in STATE_SPACE and rng.random() < 0.5:
        values["chunk_size" if family == "nemotron_h" else "mamba_chunk_size"] = 64
    if family == "granitemoehybrid":
        values |= {"layer_types": ["mamba", "attention", "mamba"], "num_hidden_layers": 3}
        values["num_local_experts"] = min(8, values["num_local_experts"])
        values["num_experts_per_tok"] = 2
    if family == "nemotron_h":
        kinds = rng.choice(("ME*", "*EM", "M*EM") if "n_routed_experts" in values else ("M*-", "-M*", "M*-M"))
        values |= {"hybrid_override_pattern": kinds, "num_hidden_layers": len(kinds), "n_routed_experts": 8}
        values["num_experts_per_tok"] = 2
    if rng.random() < 0.2 and "tie_word_embeddings" in values:
        values["tie_word_embeddings"] = not values["tie_word_embeddings"]
    return values


def _odd(rng: Random, family: str) -> Values:
    """Return a small model of a family, of sizes that no release has."""
    whole = family in (
        "stablelm",
        "gpt_neox",
        "glm",
        "glm4",
        "glm4_moe",
        "minimax_m2",
        *LINEAR,
    )  # a quarter of a head's dimensions is rotated, in pairs
    heads, width = rng.choice(HEADS), rng.choice([n for n in WIDTHS if not whole or n % 8 == 0])
    hidden = heads * width
    if family in OWN_HEAD_WIDTH and rng.random() < 0.5:
        hidden = rng.choice((48, 72, 130, 256, 321, 768))
    groups = rng.choice([n for n in range(1, heads + 1) if heads % n == 0])
    values: Values = {
        "model_type": family,
        "hidden_size": hidden,
        "num_hidden_layers": rng.randint(1, 3),
        "num_attention_heads": heads,
        "intermediate_size": rng.choice((3, 40, 96, 257, 512, 1000)),
        "vocab_size": rng.choice(VOCABULARIES),
        "max_position_embeddings": 8192,
        "tie_word_embeddings": rng.random() < 0.5,
    }
    if family.startswith("gemma4"):  # whose last layer has no window, unlike others
        values["num_hidden_layers"] = max(2, values["num_hidden_layers"])
    if family not in UNGROUPED:
        values["num_key_value_heads"] = groups
    if family in OWN_HEAD_WIDTH:
        values["head_dim"] = width
    return {**values, **_particular(rng, family, values, groups)}


def _particular(rng: Random, family: str, values: Mapping[str, Any], groups: int) -> Values:
    """Return the keys that only this family has."""
    experts = {"num_experts_per_tok": rng.choice((1, 2, 3))}
    mixture = {**experts, "moe_intermediate_size": rng.choice((32, 48, 100, 192))}
    sparse = {**mixture, "num_experts": 4}
    flag, width = rng.random() < 0.5, max(2, values["hidden_size"] // values["num_attention_heads"])
    own: dict[str, Values] = {
        "gpt2": {name: values[key] for name, key in GPT2_NAMES.items()},
        "gpt_bigcode": {
            **{name: values[key] for name, key in GPT2_NAMES.items()},
            "multi_query": flag,
            "n_positions": 2048,
            "max_position_embeddings": 2048,
        },
        "bloom": {
            "n_layer": values["num_hidden_layers"],
            "n_head": values["num_attention_heads"],
            **dict.fromkeys(("hidden_dropout", "attention_dropout"), rng.choice((0.0, 0.0, 0.1))),
        },
        "gptj": {
            **{name: values[key] for name, key in GPT2_NAMES.items()},
            **dict.fromkeys(("n_positions", "max_position_embeddings"), rng.choice((2048, 2049))),
            "rotary_dim": width // rng.choice((2, 4, 1)) // 2 * 2,
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), rng.choice((0.0, 0.0, 0.1))),
        },
        "gpt_neo": {
            "num_layers": values["num_hidden_layers"],
            "num_heads": values["num_attention_heads"],
            "attention_types": [[["global", "local", "global"][: values["num_hidden_layers"]], 1]],
            "max_position_embeddings": 2048,
            **dict.fromkeys(("resid_dropout", "embed_dropout", "attention_dropout"), rng.choice((0.0, 0.0, 0.1))),
        },
        "opt": {
            "ffn_dim": values["intermediate_size"],
            "word_embed_proj_dim": values["hidden_size"],
            "enable_bias": rng.random() < 0.7,
            "layer_norm_elementwise_affine": rng.random() < 0.8,
            "dropout": rng.choice((0.0, 0.1)),
            "attention_dropout": rng.choice((0.0, 0.0, 0.1)),
            "max_position_embeddings": 2048,
        },
        "olmoe": {**experts, "num_experts": 4, "attention_bias": flag, "clip_qkv": rng.choice((None, 8.0))},
        "granitemoe": {
            **experts,
            "num_local_experts": 4,
            "attention_bias": flag,
            "residual_multiplier": 0.22,
            "embedding_multiplier": 12.0,
        },
        "internlm3": {"attention_bias": flag, "mlp_bias": flag, "head_dim": rng.choice(WIDTHS)},
        "minimax_m2": {**experts, "num_local_experts": 4, "partial_rotary_factor": 0.5},
        "llama": {"attention_bias": flag, "mlp_bias": rng.random() < 0.3},
        "falcon": {
            "num_kv_heads": groups,
            "new_decoder_architecture": flag,
            "parallel_attn": rng.random() < 0.7,
            "bias": rng.random() < 0.5,
            "ffn_hidden_size": values["intermediate_size"],
            "alibi": False,
        },
        "mixtral": {**experts, "num_local_experts": 4},
        "gpt_oss": {**experts, "num_local_experts": 4, "attention_bias": flag, "sliding_window": 128},
        "qwen2_moe": {**sparse, "shared_expert_intermediate_size": 48, "decoder_sparse_step": rng.choice((1, 2))},
        "qwen3_moe": {**sparse, "decoder_sparse_step": rng.choice((1, 2))},
        **{name: {"attention_bias": flag} for name in ("qwen3", "hunyuan_v1_dense", "gemma2")},
        "gemma4_text": {
            "attention_bias": rng.random() < 0.3,
            **_handed(rng, values),
            **_beside(rng, mixture),
            "global_head_dim": rng.choice((values.get("head_dim", 64) * 2, 512, 320)),
            "attention_k_eq_v": flag,
            "sliding_window": rng.choice((100, 1024)),
            "final_logit_softcapping": rng.choice((None, 30.0)),
        },
        "lfm2": {
            "layer_types": _attended(rng, values["num_hidden_layers"]),
            "conv_L_cache": rng.choice((3, 3, 4, 2)),
            "block_multiple_of": rng.choice((8, 100)),
            "block_ffn_dim_multiplier": rng.choice((1.0, 1.3)),
            "block_auto_adjust_ff_dim": flag,
        },
        "lfm2_moe": {
            **sparse,
            "layer_types": _attended(rng, values["num_hidden_layers"]),
            "conv_L_cache": rng.choice((3, 4)),
            "num_dense_layers": rng.randint(0, 2),
        },
        "llama4_text": {
            **experts,
            "num_local_experts": rng.choice((3, 4, 8)),
            "intermediate_size_mlp": rng.choice((40, 96, 512)),
            "interleave_moe_layer_step": rng.choice((1, 1, 2)),
            "no_rope_layer_interval": rng.choice((2, 2, 3, 4)),
            "use_qk_norm": rng.random() < 0.6,
            "attention_bias": rng.random() < 0.3,
            "attn_temperature_tuning": rng.random() < 0.7,
            "attention_chunk_size": rng.choice((100, 1024, 8192)),
        },
        "gemma4_unified_text": {
            "attention_bias": rng.random() < 0.3,
            "global_head_dim": rng.choice((values.get("head_dim", 64) * 2, 512, 320)),
            "attention_k_eq_v": flag,
            "sliding_window": rng.choice((100, 1024)),
            "final_logit_softcapping": rng.choice((None, 30.0)),
        },
        "stablelm": {"use_qkv_bias": flag, "use_parallel_residual": rng.random() < 0.5},
        "gpt_neox": {"use_parallel_residual": flag},
        "phi": {"qk_layernorm": flag, "partial_rotary_factor": 0.5},
        "olmo": {"attention_bias": flag, "clip_qkv": rng.choice((None, 8.0))},
        "cohere": {"attention_bias": flag, "use_qk_norm": rng.random() < 0.5},
        "cohere2": {"attention_bias": flag, "sliding_window": rng.choice((100, 4096))},
        "exaone4": {"sliding_window": rng.choice((100, 4096))},
        "granite": {"attention_bias": flag, "residual_multiplier": 0.22, "embedding_multiplier": 12.0},
        "glm4_moe": {
            **mixture,
            "use_qk_norm": flag,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "first_k_dense_replace": rng.randint(0, 2),
        },
        "seed_oss": {"attention_out_bias": flag, "residual_dropout": rng.choice((0.0, 0.1))},
        "ernie4_5": {"use_bias": flag},
        "apertus": {"attention_bias": flag},
        "arcee": {"attention_bias": flag, "mlp_bias": rng.random() < 0.3},
        "starcoder2": {
            "use_bias": flag,
            **dict.fromkeys(("residual_dropout", "embedding_dropout"), rng.choice((0.0, 0.1))),
        },
    }
    if family in LINEAR:
        return _linear(rng, family, mixture)
    if family == "nemotron_h":
        return _nemotron(rng, mixture)
    if family in STATE_SPACE:
        return _state_space(rng, family, values)
    if family == "youtu":
        return {key: value for key, value in _latent(rng, values).items() if key.endswith(("_rank", "_dim", "_heads"))}
    if family.startswith("deepseek") or family in ("glm4_moe_lite", "mistral4"):
        latent = {**mixture, **_latent(rng, values)}
        if family == "glm4_moe_lite":  # which says of each layer what it is
            kinds = ["sparse" if n >= latent["first_k_dense_replace"] else "dense" for n in range(3)]
            latent |= {"mlp_layer_types": kinds[: values["num_hidden_layers"]]}
            del latent["first_k_dense_replace"]
        return latent
    return own.get(family, {})


def _handed(rng: Random, values: Mapping[str, Any]) -> Values:
    """Return embeddings for every layer or none, and how many of the last layers share keys and values."""
    if rng.random() < 0.4:
        return {"hidden_size_per_layer_input": 0}
    layers = rng.choice((4, 5, 6))
    kinds = ["sliding_attention", "full_attention"] * layers
    return {
        "num_hidden_layers": layers,
        "layer_types": [*kinds[: layers - 1], "full_attention"],
        "hidden_size_per_layer_input": rng.choice((8, 24, 64)),
        "vocab_size_per_layer_input": values["vocab_size"],
        "num_kv_shared_layers": rng.choice((0, 1, layers - 2)),
        "use_double_wide_mlp": rng.random() < 0.5,
    }


def _beside(rng: Random, mixture: Values) -> Values:
    """Return the sizes of experts beside a dense part, which every other model has."""
    if rng.random() < 0.5:
        return {}
    inner, used = mixture["moe_intermediate_size"], mixture["num_experts_per_tok"]
    return {"enable_moe_block": True, "num_experts": 4, "top_k_experts": used, "moe_intermediate_size": inner}


def _attended(rng: Random, layers: int) -> list[str]:
    """Return for each layer whether it is attention or a convolution; one at least is attention."""
    attended = rng.sample(range(layers), rng.randint(1, layers))
    return ["full_attention" if index in attended else "conv" for index in range(layers)]


def _linear(rng: Random, family: str, experts: Values) -> Values:
    """Return the sizes of gated delta networks, and of the experts of families that have any."""
    keys = rng.choice((1, 2, 3))
    sizes = {
        "num_hidden_layers": rng.choice((2, 3)),
        "full_attention_interval": 2,
        "linear_num_key_heads": keys,
        "linear_num_value_heads": keys * rng.choice((1, 2, 3)),
        "linear_key_head_dim": rng.choice((16, 24, 64, 128, 256)),
        "linear_value_head_dim": rng.choice((16, 40, 64, 128)),
        "linear_conv_kernel_dim": rng.choice((2, 4)),
        "partial_rotary_factor": rng.choice((0.25, 0.5, 1.0)),
    }
    shared = {"num_experts": 4, "shared_expert_intermediate_size": 48}
    return sizes if family == "qwen3_5_text" else {**sizes, **experts, **shared}


def _nemotron(rng: Random, mixture: Values) -> Values:
    """Return layers of Nemotron-H, of each kind but one that feeds forward, with the sizes of all."""
    kinds = ["linear_attention", "full_attention", rng.choice(("moe", "mlp"))]
    kinds += [rng.choice(("linear_attention", "moe", "mlp")) for _ in range(rng.randint(0, 2))]
    rng.shuffle(kinds)
    heads = rng.choice((2, 3, 4, 6, 12))
    groups = rng.choice((1, 1, 2, 4))
    return {
        "layers_block_type": kinds,
        "num_hidden_layers": len(kinds),
        "mamba_num_heads": heads,
        "mamba_head_dim": rng.choice((8, 24, 32, 64)),
        "n_groups": rng.choice([n for n in range(1, heads + 1) if heads % n == 0]),
        "ssm_state_size": rng.choice((2, 16, 24, 64, 128)),
        "conv_kernel": rng.choice((2, 4)),
        "chunk_size": rng.choice((16, 64, 128, 256)),
        "use_conv_bias": rng.random() < 0.7,
        "use_bias": rng.random() < 0.3,
        **mixture,
        "n_routed_experts": 8,
        "n_group": groups,
        "topk_group": rng.randint(1, groups),
        "moe_shared_expert_intermediate_size": rng.choice((40, 96, 257)),
        "moe_latent_size": rng.choice((None, None, 24, 64)),
        "routed_scaling_factor": rng.choice((1.0, 2.5)),
        "norm_topk_prob": rng.random() < 0.7,
        "tie_word_embeddings": False,
    }


def _state_space(rng: Random, family: str, values: Mapping[str, Any]) -> Values:
    """Return the sizes of state space layers."""
    heads, width = rng.choice((2, 3, 4, 6, 12)), rng.choice((8, 24, 32, 64))
    if family == "granitemoehybrid":
        twice = 2 * values["hidden_size"]
        heads = rng.choice([n for n in (2, 3, 4, 6, 12) if twice % n == 0])
        width = twice // heads
    sizes = {
        "mamba_n_heads": heads,
        "mamba_d_head": width,
        "mamba_n_groups": rng.choice([n for n in range(1, heads + 1) if heads % n == 0]),
        "mamba_d_state": rng.choice((2, 16, 24, 64, 128)),
        "mamba_d_conv": rng.choice((2, 4)),
        "mamba_chunk_size": rng.choice((16, 64, 128, 256)),
        "mamba_conv_bias": rng.random() < 0.7,
        "mamba_proj_bias": rng.random() < 0.3,
        "attention_bias": rng.random() < 0.3,
    }
    if family == "granitemoehybrid":
        return {**sizes, **_granite(rng, int(values["num_hidden_layers"]))}
    return {
        **sizes,
        "mamba_d_ssm": heads * width,
        "mamba_rms_norm": rng.random() < 0.5,
        "mamba_norm_before_gate": False,
        "projectors_bias": rng.random() < 0.3,
        "mlp_bias": rng.random() < 0.3,
    }


def _granite(rng: Random, layers: int) -> Values:
    """Return kinds of layers, whether heads are rotated, and experts or none."""
    return {
        "num_hidden_layers": layers + 1,
        "layer_types": rng.sample(["mamba", "attention"], 2) + [rng.choice(("mamba", "attention"))] * (layers - 1),
        "position_embedding_type": rng.choice(("nope", "nope", "rope")),
        "num_local_experts": rng.choice((0, 0, 4, 8)),
        "num_experts_per_tok": 2,
        "shared_intermediate_size": rng.choice((40, 96, 257)),
        "embedding_multiplier": 12.0,
        "logits_scaling": 6.0,
        "residual_multiplier": 0.22,
    }


def _latent(rng: Random, values: Mapping[str, Any]) -> Values:
    """Return the sizes of multi-head latent attention, and of DeepSeek's experts."""
    return {
        "num_key_value_heads": values["num_attention_heads"],
        "q_lora_rank": rng.choice((None, 24, 96)),
        "kv_lora_rank": rng.choice((16, 64, 100)),
        "qk_nope_head_dim": rng.choice((8, 24, 64, 128)),
        "qk_rope_head_dim": rng.choice((4, 16, 64)),
        "v_head_dim": rng.choice((12, 32, 64, 128)),
        "n_routed_experts": 8,
        "n_shared_experts": rng.choice((1, 2)),
        "first_k_dense_replace": rng.randint(0, 2),
        "n_group": 1,
        "topk_group": 1,
    }
