"""What a config may say, and what is refused instead of guessed."""

import pytest

from memplan.errors import CannotAnswerError, InvalidFileError
from memplan.model.families import families, model_spec, read_config

from .tiny import BASE, CASES, FALCON, GROUPED, QWEN2_MOE, QWEN3_MOE

LLAMA = {"model_type": "llama"} | GROUPED


def read(config):
    return read_config(config, "tiny", "config.json")


def spec(config):
    return read(config)[0]


def test_unknown_family_is_refused_with_the_nearest_and_the_list():
    with pytest.raises(
        CannotAnswerError, match=r"'lama' is not supported.*nearest that is: llama.*qwen3_moe"
    ) as caught:
        read({"model_type": "lama"})
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("name", ["_values", "__init__", "../llama", "", None, 3, ["llama"], "llama\n"])
def test_family_names_open_no_other_file(name):
    with pytest.raises((CannotAnswerError, InvalidFileError)):
        read({"model_type": name})


@pytest.mark.parametrize(("given", "family"), [("qwen3-moe", "qwen3_moe"), ("GPT_NeoX", "gpt_neox")])
def test_family_names_ignore_case_and_dashes(given, family):
    assert given.lower().replace("-", "_") == family
    assert family in families()


def test_architecture_names_the_family_where_model_type_is_missing():
    assert spec({"architecture": "llama"} | GROUPED) == spec(LLAMA)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "hidden_size: required key is missing"),
        ({"hidden_size": True}, "hidden_size: expected an integer, got True"),
        ({"hidden_size": 64.0}, "hidden_size: expected an integer, got 64.0"),
        ({"hidden_size": "64"}, "hidden_size: expected an integer, got '64'"),
        ({"hidden_size": 0}, "hidden_size: expected an integer from 1"),
        ({"hidden_size": -64}, "hidden_size: expected an integer from 1"),
        ({"hidden_size": 10**40}, "hidden_size: expected an integer from 1"),
        ({"num_hidden_layers": 10_001}, "num_hidden_layers: expected an integer from 1 to 10,000"),
        ({"num_attention_heads": 6}, "num_attention_heads: 6 does not divide hidden_size, which is 64"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide num_attention_heads, which is 4"),
        ({"head_dim": 7}, "head_dim: 7 dimensions of a head are rotated"),
        ({"n_embd": 128}, "hidden_size: spelled in two ways that disagree"),
        ({"attention_dropout": float("nan")}, "attention_dropout: expected a number from 0 to 1"),
        ({"attention_dropout": 1.5}, "attention_dropout: expected a number from 0 to 1"),
        ({"attention_dropout": False}, "attention_dropout: expected a number"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings: expected true or false"),
        ({"hidden_act": 3}, "hidden_act: expected the name"),
        ({"layer_types": "full_attention"}, "layer_types: expected a list of names"),
        ({"hidden_size": 2**24, "intermediate_size": 2**24, "num_hidden_layers": 10_000}, "more than any model has"),
    ],
)
def test_wrong_values_are_named_with_file_and_key(change, message):
    with pytest.raises(InvalidFileError, match=message) as caught:
        read(LLAMA | change)
    assert str(caught.value).startswith("config.json: ")


@pytest.mark.parametrize("pair", [[], [56], [56, 28]])
def test_a_tower_whose_images_are_not_square_numbers_is_refused(pair):
    family, config = CASES["smolvlm"]
    vision = config["vision_config"] | {"image_size": pair}
    with pytest.raises(InvalidFileError, match="image_size: expected an integer"):
        read(config | {"model_type": family, "vision_config": vision})


def test_all_wrong_values_are_reported_at_once():
    with pytest.raises(InvalidFileError) as caught:
        read({"model_type": "llama", "hidden_size": "x", "vocab_size": 0, "num_attention_heads": 3})
    assert len(caught.value.problems) == 4  # two of them are missing keys


@pytest.mark.parametrize(
    "change",
    [
        {"num_experts": 8},
        {"num_local_experts": 8},
        {"n_routed_experts": 8},
        {"kv_lora_rank": 512},
        {"qk_layernorm": True},
        {"final_logit_softcapping": 30.0},
        {"partial_rotary_factor": 0.5},
        {"mamba_d_state": 16},
        {"layer_types": ["full_attention", "linear_attention", "full_attention"]},
        {"hidden_act": "relu2"},
        {"add_cross_attention": True},
        {"num_kv_shared_layers": 2},
    ],
    ids=str,
)
def test_keys_that_change_memory_and_are_not_modelled_are_refused(change):
    with pytest.raises(CannotAnswerError, match=next(iter(change))):
        read(LLAMA | change)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "falcon"} | FALCON | {"alibi": True},
        {"model_type": "stablelm"} | GROUPED | {"qk_layernorm": True},
        {"model_type": "gpt_neox"} | BASE | {"num_key_value_heads": 2},
        {"model_type": "mistral"} | GROUPED | {"attention_bias": True},
        {"model_type": "deepseek_v2"} | CASES["deepseek-v2"][1] | {"moe_layer_freq": 2},
    ],
    ids=["alibi", "per-head-norm", "grouped-neox", "mistral-bias", "moe-layer-frequency"],
)
def test_variants_that_a_family_does_not_model_are_refused(config):
    with pytest.raises(CannotAnswerError):
        read(config)


def test_neutral_values_of_memory_keys_are_accepted():
    neutral = {"num_experts": 0, "kv_lora_rank": None, "partial_rotary_factor": 1.0, "qk_layernorm": False}
    assert read(LLAMA | neutral) == read(LLAMA)


def test_harmless_keys_are_ignored_and_unknown_ones_noted():
    notes = read(LLAMA | {"bos_token_id": 1, "rope_theta": 1e4, "my_key": 1, "bad\x1b[31m": 2, "nothing": None})[1]
    assert notes == ("ignored keys that memplan does not know: my_key, 'bad\\x1b[31m'",)


def test_long_lists_of_unknown_keys_are_cut():
    (note,) = read(LLAMA | {f"key_{index}": 1 for index in range(100)})[1]
    assert note.endswith("key_11 and 88 more")


def test_sliding_window_is_noted_where_it_is_used():
    mistral = {"model_type": "mistral"} | GROUPED
    qwen = {"model_type": "qwen2"} | GROUPED | {"sliding_window": 4096}
    assert read(mistral | {"sliding_window": 4096})[1]
    assert not read(mistral | {"sliding_window": None})[1]
    assert not read(qwen | {"use_sliding_window": False})[1]
    assert not read(qwen | {"use_sliding_window": True})[1]
    assert read(qwen | {"use_sliding_window": True, "max_window_layers": 1})[1]


def test_more_experts_per_token_than_experts_is_wrong():
    with pytest.raises(InvalidFileError, match="5 of 4 experts"):
        read({"model_type": "qwen3_moe"} | QWEN3_MOE | {"num_experts_per_tok": 5})


def test_equal_layers_form_runs():
    runs = spec({"model_type": "qwen2_moe"} | QWEN2_MOE | {"mlp_only_layers": [0]}).runs
    assert [(run.first, run.count) for run in runs] == [(0, 1), (1, 2)]
    smollm3 = spec({"model_type": "smollm3"} | GROUPED | {"num_hidden_layers": 8})
    assert [(run.count, run.layer.attention.rotary_dim) for run in smollm3.runs] == [(3, 16), (1, 0), (3, 16), (1, 0)]


def test_rotary_width_is_read_from_old_and_new_spellings():
    phi = {"model_type": "phi"} | BASE
    for change in ({"partial_rotary_factor": 0.25}, {"rope_parameters": {"partial_rotary_factor": 0.25}}):
        assert spec(phi | change).runs[0].layer.attention.rotary_dim == 4
    assert spec(phi).runs[0].layer.attention.rotary_dim == 8
    assert spec({"model_type": "gpt_neox"} | BASE | {"rotary_pct": 0.5}).runs[0].layer.attention.rotary_dim == 8


def test_dropout_is_the_largest_probability():
    assert spec({"model_type": "gpt2"} | CASES["gpt2"][1]).dropout == 0.1
    assert spec({"model_type": "phi"} | BASE | {"resid_pdrop": 0.1}).dropout == 0.1
    assert spec(LLAMA).dropout == 0.0


def test_soft_caps_follow_the_released_defaults():
    gemma2 = {"model_type": "gemma2"} | GROUPED
    assert spec(gemma2).final_logit_softcap
    assert spec(gemma2).runs[0].layer.attention.logit_softcap
    assert not spec(gemma2 | {"final_logit_softcapping": None}).final_logit_softcap
    assert not spec({"model_type": "gemma3_text"} | GROUPED).final_logit_softcap


def test_spec_is_named_and_sourced():
    found = model_spec(LLAMA, "Tiny", "somewhere")
    assert (found.name, found.architecture, found.source) == ("Tiny", "llama", "somewhere")


ARITHMETIC = {
    "residual_multiplier": 0.22,
    "embedding_multiplier": 12.0,
    "logits_scaling": 8.0,
    "attention_multiplier": 0.0078125,
    "mup_scale": 2.0,
    "query_pre_attn_scalar": 144,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "attn_logit_softcapping": 50.0,
    "router_logit_softcapping": 30.0,
    "partial_rotary_factor": 0.5,
    "clip_qkv": 8.0,
    "scale_emb": 12,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}


@pytest.mark.parametrize("key", ARITHMETIC)
def test_a_key_of_arithmetic_that_a_family_does_not_read_is_refused_by_its_name(key):
    with pytest.raises(CannotAnswerError, match=rf"{key}: .*family 'llama' does not model"):
        spec({"model_type": "llama"} | GROUPED | {key: ARITHMETIC[key]})


@pytest.mark.parametrize("key", [key for key in ARITHMETIC if not isinstance(ARITHMETIC[key], dict)])
@pytest.mark.parametrize("value", [None, 0, False])
def test_a_key_of_arithmetic_without_effect_is_let_pass(key, value):
    assert spec({"model_type": "llama"} | GROUPED | {key: value}) == spec({"model_type": "llama"} | GROUPED)


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("gpt_oss", "swiglu_limit", 5.0),
        ("gpt2", "scale_attn_by_inverse_layer_idx", True),
        ("gpt2", "reorder_and_upcast_attn", True),
        ("deepseek_v3", "scoring_func", "softmax"),
        ("deepseek_v2", "topk_method", "noaux_tc"),
        ("mixtral", "router_jitter_noise", 0.1),
    ],
)
def test_arithmetic_that_a_family_fixes_is_refused_where_it_differs(family, key, value):
    config = next(config for architecture, config in CASES.values() if architecture == family)
    with pytest.raises(CannotAnswerError, match=f"{key}: is {value!r}"):
        spec({"model_type": family} | config | {key: value})
