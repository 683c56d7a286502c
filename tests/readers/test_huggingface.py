"""A ``config.json`` becomes a model, or one readable error."""

import copy
import json
import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memplan.errors import CannotAnswerError, InvalidFileError, MemplanError
from memplan.model.inventory import active_parameter_count, parameter_count
from memplan.model.readers.huggingface import read_huggingface

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 8.0, "rope_type": "llama3"},
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0",
    "vocab_size": 128256,
}
GEMMA3 = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {
        "hidden_size": 1152,
        "image_size": 896,
        "intermediate_size": 4304,
        "model_type": "siglip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
        "vision_use_head": False,
    },
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "first_k_dense_replace": 1,
    "hidden_size": 64,
    "intermediate_size": 80,
    "kv_lora_rank": 16,
    "moe_intermediate_size": 32,
    "moe_layer_freq": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "quantization_config": {"fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]},
    "v_head_dim": 8,
    "vocab_size": 96,
}


def write(folder, config, name="config.json"):
    path = folder / name
    path.write_text(config if isinstance(config, str) else json.dumps(config, indent=2), encoding="utf-8")
    return path


def test_file_and_directory_give_the_same_model(tmp_path):
    path = write(tmp_path, LLAMA)
    assert read_huggingface(path) == read_huggingface(tmp_path)
    assert parameter_count(read_huggingface(path).inventory) == 8_030_261_248


def test_model_is_named_after_its_directory_or_cache_entry(tmp_path):
    folder = tmp_path / "models--meta-llama--Llama-3.1-8B" / "snapshots" / "0e9e39f2"
    folder.mkdir(parents=True)
    write(folder, LLAMA)
    assert read_huggingface(folder).spec.name == "Llama-3.1-8B"


def test_released_dtype_is_noted(tmp_path):
    assert read_huggingface(write(tmp_path, LLAMA)).notes == ("released in bfloat16",)
    new = {key: value for key, value in LLAMA.items() if key != "torch_dtype"} | {"dtype": "float16"}
    assert read_huggingface(write(tmp_path, new)).notes == ("released in float16",)


def test_a_vision_language_config_is_read_with_its_tower(tmp_path):
    model = read_huggingface(write(tmp_path, GEMMA3))
    assert model.spec.architecture == "gemma3"
    assert parameter_count(model.inventory) == 4_300_079_472
    assert active_parameter_count(model.inventory) == 3_880_263_168


def test_of_other_multimodal_configs_the_text_part_is_read(tmp_path):
    config = {"model_type": "fuyu", "text_config": LLAMA, "vision_config": {"hidden_size": 1024}}
    model = read_huggingface(write(tmp_path, config))
    assert model.spec.architecture == "llama"
    assert any("text model only" in note for note in model.notes)


def test_a_tower_that_is_not_modelled_is_refused(tmp_path):
    with pytest.raises(CannotAnswerError, match="a head that pools patches"):
        read_huggingface(write(tmp_path, GEMMA3 | {"vision_config": {}}))
    with pytest.raises(CannotAnswerError, match="text model of family 'llama'"):
        read_huggingface(write(tmp_path, GEMMA3 | {"model_type": "mistral3", "text_config": LLAMA}))
    with pytest.raises(InvalidFileError, match="vision_config: expected an object"):
        read_huggingface(write(tmp_path, GEMMA3 | {"vision_config": "siglip"}))


def test_nested_text_part_inherits_tied_embeddings(tmp_path):
    model = read_huggingface(write(tmp_path, GEMMA3 | {"tie_word_embeddings": False}))
    assert not model.spec.tie_word_embeddings


def test_multi_token_prediction_is_noted_and_left_out(tmp_path):
    model = read_huggingface(write(tmp_path, DEEPSEEK))
    assert any("multi-token prediction" in note for note in model.notes)
    assert not any("e_score_correction_bias" in tensor.name for tensor in model.inventory)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "nf4"),
        ({"load_in_4bit": True}, "fp4"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "int8"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "gptq-int4"),
        ({"quant_method": "awq", "bits": 4}, "awq-int4"),
        ({"quant_method": "fp8", "fmt": "e4m3"}, "fp8-e4m3"),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, "mxfp4"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int"}}},
            },
            "int4",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}},
            },
            "fp8-e4m3",
        ),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "nvfp4"),
        ({"quant_method": "something-new"}, None),
        ({"quant_method": ["gptq"], "bits": True}, None),
    ],
)
def test_quantization_is_named(tmp_path, given, expected):
    model = read_huggingface(write(tmp_path, LLAMA | {"quantization_config": given}))
    assert model.quantization == expected
    assert any(note.startswith(("released weights are quantised", "quantization_config")) for note in model.notes)


def test_adapter_is_refused_with_what_to_do(tmp_path):
    write(tmp_path, {"peft_type": "LORA", "r": 16, "base_model_name_or_path": "meta-llama/x"}, "adapter_config.json")
    with pytest.raises(CannotAnswerError, match=r"base model \('meta-llama/x'\).*adapter\.rank=16"):
        read_huggingface(tmp_path)


def test_directory_without_a_config_is_named(tmp_path):
    with pytest.raises(InvalidFileError, match=r"has no config\.json"):
        read_huggingface(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not valid JSON"),
        ("[1]", "expected an object"),
        ('{"hidden_size": 1, "hidden_size": 2}', "given twice"),
        ('{"hidden_size": NaN}', "NaN is no number"),
        ('{"hidden_size": 1e999}', "too large"),
        ('{"a": ' * 100_000, "nested too deeply"),
        ('{"hidden_size": ' + "9" * 5000 + "}", "not valid JSON"),
        ("{}", "model_type: required"),
    ],
)
def test_broken_json_is_one_readable_error(tmp_path, text, message):
    with pytest.raises(InvalidFileError, match=message) as caught:
        read_huggingface(write(tmp_path, text))
    assert len(str(caught.value)) < 600


def test_all_problems_are_reported_with_their_lines(tmp_path):
    bad = LLAMA | {"hidden_size": "4096", "num_hidden_layers": True, "vocab_size": -1}
    with pytest.raises(InvalidFileError) as caught:
        read_huggingface(write(tmp_path, bad))
    assert len(caught.value.problems) == 3
    assert "config.json:12: hidden_size: expected an integer, got '4096'" in str(caught.value)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=True)
    | st.text(max_size=8)
    | st.sampled_from([0, 1, -1, 10**9, "silu", "gelu"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@pytest.mark.parametrize("base", [LLAMA, GEMMA3, DEEPSEEK], ids=["llama", "gemma3", "deepseek"])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_nothing_but_our_errors_escapes_from_changed_configs(tmp_path, base, data):
    config = copy.deepcopy(base)
    place = config.get("text_config", config) if data.draw(st.booleans()) else config
    for key in data.draw(st.lists(st.sampled_from(sorted(place)), max_size=4)):
        if data.draw(st.booleans()):
            place[key] = data.draw(json_values)
        else:
            place.pop(key, None)
    place |= data.draw(st.dictionaries(st.text(max_size=6), json_values, max_size=2))
    try:
        model = read_huggingface(write(tmp_path, config))
    except MemplanError as error:
        refusal = str(error)
        assert refusal
    else:
        assert parameter_count(model.inventory) > 0
        assert math.isfinite(model.spec.dropout)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_nothing_but_our_errors_escapes_from_changed_bytes(tmp_path, data):
    raw = bytearray(json.dumps(LLAMA, indent=1).encode())
    for _ in range(data.draw(st.integers(1, 6))):
        index = data.draw(st.integers(0, len(raw) - 1))
        raw[index : index + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
    path = tmp_path / "config.json"
    path.write_bytes(raw)
    try:
        read_huggingface(path)
    except MemplanError as error:
        refusal = str(error)
        assert refusal
