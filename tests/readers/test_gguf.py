"""GGUF files: exact bytes, shapes of every supported architecture, and no surprise from a damaged file."""

import contextlib
import struct
import tracemalloc
from pathlib import Path

import gguf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memplan.errors import CannotAnswerError, InvalidFileError, MemplanError
from memplan.model.families import model_spec
from memplan.model.inventory import parameter_count
from memplan.model.parameter_tensors import inventory_of
from memplan.model.readers.gguf import read_gguf
from memplan.model.readers.gguf_types import Skipped, read_header

from .conftest import F32, LLAMA_CONFIG, LLAMA_KEYS, Q4_K, llama_tensors, tensor_data, write_gguf, write_gguf_header

Q4_0 = gguf.GGMLQuantizationType.Q4_0
Q8_0 = gguf.GGMLQuantizationType.Q8_0
CHANGED_SINCE_THE_PACKAGE = {"Q8_1": (32, 36)}
"""ggml-common.h stores Q8_1's scale and sum as fp16; the package has the older fp32 layout."""


# --- the table of formats ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", gguf.GGMLQuantizationType, ids=lambda kind: kind.name)
def test_every_type_of_the_package_is_in_the_table_with_its_layout(kind, layouts):
    assert kind.value in layouts, f"configs/weight_formats.yaml has no entry of ggml_type {kind.value}, {kind.name}"
    layout = layouts[kind.value]
    expected = CHANGED_SINCE_THE_PACKAGE.get(kind.name, gguf.GGML_QUANT_SIZES[kind])
    assert (layout.block_elements, layout.block_bytes) == expected
    plain = {"F16": "fp16", "F32": "fp32", "F64": "fp64", "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64"}
    assert layout.name == plain.get(kind.name, kind.name.lower().replace("_", "-"))


def test_the_table_is_sorted_and_each_entry_has_a_source(formats):
    assert list(formats) == sorted(formats)
    assert all(entry["sources"] and entry["kind"] == "exact" for entry in formats.values())
    types = [entry["ggml_type"] for entry in formats.values() if "ggml_type" in entry]
    assert len(types) == len(set(types))


@pytest.mark.parametrize(
    ("name", "measured"),
    [("nf4", 8_388_608 + 1_048_576 + 64), ("nf4-dq", 8_388_608 + 262_144 + 4_096 + 1_024 + 64 + 4)],
)
def test_nf4_takes_what_bitsandbytes_allocates_for_a_matrix(name, measured, formats):
    """Codes, maxima, tables and mean of a 4096 x 4096 matrix: ``quantize_4bit`` of bitsandbytes 0.50.2 on a CPU."""
    entry = formats[name]
    blocks = 4096 * 4096 // entry["block_elements"]
    assert blocks * entry["block_bytes"] + entry["tensor_bytes"] == measured


# --- a whole file -----------------------------------------------------------------------------------------------------


def test_bytes_by_format_equal_those_that_the_package_reads(llama_gguf, layouts):
    model = read_gguf(llama_gguf, layouts)
    expected: dict[str, int] = {}
    for tensor in gguf.GGUFReader(llama_gguf).tensors:
        name = layouts[tensor.tensor_type.value].name
        expected[name] = expected.get(name, 0) + int(tensor.n_bytes)
    assert model.storage is not None
    assert dict(model.storage.bytes_by_format) == expected
    assert model.storage.tensors == len(llama_tensors())
    assert model.quantization == "q4-k"


def test_shapes_equal_those_of_the_config(llama_gguf, layouts):
    model = read_gguf(llama_gguf, layouts)
    expected = model_spec(LLAMA_CONFIG, "Tiny", str(llama_gguf))
    assert model.spec == expected
    assert model.inventory == inventory_of(expected)
    assert model.notes == ()


def test_header_is_what_the_package_reads(llama_gguf):
    header = read_header(llama_gguf)
    reader = gguf.GGUFReader(llama_gguf)
    assert [tensor.name for tensor in header.tensors] == [tensor.name for tensor in reader.tensors]
    assert header.data_start == reader.data_offset
    for mine, theirs in zip(header.tensors, reader.tensors, strict=True):
        assert mine.dimensions == tuple(int(size) for size in theirs.shape)
        assert header.data_start + mine.offset == theirs.data_offset


def test_head_is_tied_without_output_weight(tmp_path, layouts):
    path = write_gguf(tmp_path / "tied.gguf", "llama", LLAMA_KEYS, llama_tensors(head=False))
    model = read_gguf(path, layouts)
    assert model.spec.tie_word_embeddings
    assert model.notes == ()
    assert model.spec.name == "tied"


def test_tables_of_rotary_factors_are_no_parameters(tmp_path, layouts):
    tensors = llama_tensors() | {"rope_freqs.weight": ((32,), F32)}
    model = read_gguf(write_gguf(tmp_path / "f.gguf", "llama", LLAMA_KEYS, tensors), layouts)
    assert [note for note in model.notes if "rope_freqs.weight" in note and "32 elements" in note]
    assert not [note for note in model.notes if "follow from its shapes" in note]


def test_a_parameter_too_many_is_noted(tmp_path, layouts):
    tensors = llama_tensors() | {"blk.0.extra.weight": ((7,), F32)}
    model = read_gguf(write_gguf(tmp_path / "f.gguf", "llama", LLAMA_KEYS, tensors), layouts)
    assert "7 more than the" in model.notes[-1]


def test_version_2_is_read(llama_gguf, layouts):
    data = bytearray(llama_gguf.read_bytes())
    data[4:8] = struct.pack("<I", 2)
    llama_gguf.write_bytes(data)
    assert read_gguf(llama_gguf, layouts).spec.num_hidden_layers == 2


def test_metadata_of_every_type_is_read(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    values = {"uint8": 200, "int8": -3, "uint16": 60_000, "int16": -4, "uint32": 2**32 - 1, "int32": -5,
              "float32": 0.5, "uint64": 2**63, "int64": -6, "float64": 0.25, "bool": True, "string": "x"}  # fmt: skip
    for kind, value in values.items():
        getattr(writer, f"add_{kind}")(f"a.{kind}", value)
    writer.add_array("a.numbers", [1, 2, 3])
    writer.add_array("a.texts", ["x", "", "yz"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    metadata = read_header(tmp_path / "m.gguf").metadata
    assert {kind: metadata[f"a.{kind}"] for kind in values} == values
    assert metadata["a.numbers"] == (1, 2, 3)
    assert metadata["a.texts"] == Skipped(3)


def test_names_are_fit_to_print(tmp_path, layouts):
    extra = {"general.name": "\x1b[31mred\n"}
    model = read_gguf(write_gguf(tmp_path / "f.gguf", "llama", LLAMA_KEYS, llama_tensors(), extra=extra), layouts)
    assert model.spec.name == "[31mred"


def test_a_large_vocabulary_is_stepped_over_in_little_memory(tmp_path, layouts):
    arrays = {
        "tokenizer.ggml.tokens": [f"token-{index}" for index in range(128_256)],
        "tokenizer.ggml.merges": [f"a{index} b{index}" for index in range(200_000)],
        "tokenizer.ggml.token_type": [1] * 128_256,
    }
    path = write_gguf(tmp_path / "f.gguf", "llama", LLAMA_KEYS, llama_tensors(), arrays=arrays)
    read_gguf(path, layouts)
    tracemalloc.start()
    model = read_gguf(path, layouts)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert model.notes == ()
    assert peak < 2**20


def test_the_header_of_a_large_model_has_its_published_parameters(tmp_path, layouts):
    """Llama-3.1-8B has 8,030,261,248 parameters (https://huggingface.co/meta-llama/Llama-3.1-8B)."""
    keys = {"block_count": 32, "context_length": 131_072, "embedding_length": 4096, "feed_forward_length": 14_336,
            "attention.head_count": 32, "attention.head_count_kv": 8, "rope.dimension_count": 128}  # fmt: skip
    shapes = {"attn_q": (4096, 4096), "attn_k": (1024, 4096), "attn_v": (1024, 4096), "attn_output": (4096, 4096),
              "ffn_gate": (14_336, 4096), "ffn_up": (14_336, 4096), "ffn_down": (4096, 14_336),
              "attn_norm": (4096,), "ffn_norm": (4096,)}  # fmt: skip
    tensors = {"token_embd.weight": (128_256, 4096), "output.weight": (128_256, 4096), "output_norm.weight": (4096,)}
    tensors |= {f"blk.{layer}.{name}.weight": shape for layer in range(32) for name, shape in shapes.items()}
    path = write_gguf_header(tmp_path / "f.gguf", "llama", keys, tensors, Q4_0)
    model = read_gguf(path, layouts)
    assert parameter_count(model.inventory) == 8_030_261_248
    norms = 65 * 4096
    assert model.storage is not None
    assert dict(model.storage.bytes_by_format) == {"fp32": 4 * norms, "q4-0": (8_030_261_248 - norms) // 32 * 18}
    assert model.notes == ("only the header of f.gguf is present: sizes are taken from it",)


# --- every architecture -----------------------------------------------------------------------------------------------


def dense(keys: dict, shapes: dict[str, tuple[int, ...]], top: dict[str, tuple[int, ...]]) -> tuple[dict, dict]:
    """Return keys and tensors of a model of two layers, 64 wide with 4 heads and a vocabulary of 96."""
    base = {"block_count": 2, "embedding_length": 64, "context_length": 128, "attention.head_count": 4}
    tensors = {"token_embd.weight": (96, 64), "output_norm.weight": (64,), **top}
    for layer in range(2):
        tensors |= {f"blk.{layer}.{name}": shape for name, shape in shapes.items()}
    return base | keys, {name: (shape, F32) for name, shape in tensors.items()}


def weights(**shapes: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": shape for name, shape in shapes.items()}


def biases(**sizes: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.bias": (size,) for name, size in sizes.items()}


GROUPED = {"attention.head_count_kv": 2, "feed_forward_length": 80}
ATTENTION = weights(attn_q=(64, 64), attn_k=(32, 64), attn_v=(32, 64), attn_output=(64, 64))
WIDE = weights(attn_q=(128, 64), attn_k=(64, 64), attn_v=(64, 64), attn_output=(64, 128))
WIDE_KEYS = {"attention.key_length": 32, "attention.value_length": 32}
HEAD_NORMS = weights(attn_q_norm=(32,), attn_k_norm=(32,))
GATED = weights(ffn_gate=(80, 64), ffn_up=(80, 64), ffn_down=(64, 80))
PLAIN = weights(ffn_up=(80, 64), ffn_down=(64, 80))
NORMS = weights(attn_norm=(64,), ffn_norm=(64,))
AFTER = weights(post_attention_norm=(64,), post_ffw_norm=(64,))
ROUTED = weights(ffn_gate_inp=(4, 64), ffn_gate_exps=(4, 48, 64), ffn_up_exps=(4, 48, 64), ffn_down_exps=(4, 64, 48))
EXPERTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 48}
HEAD = weights(output=(96, 64))
FUSED = weights(attn_qkv=(192, 64), attn_output=(64, 64))
FUSED_BIASES = biases(attn_qkv=192, attn_output=64, ffn_up=80, ffn_down=64, attn_norm=64)
FINAL_BIAS = biases(output_norm=64)
GPT_OSS_BIASES = biases(attn_q=64, attn_k=32, attn_v=32, attn_output=64, ffn_gate_inp=4)
GPT_OSS_EXPERT_BIASES = {f"ffn_{name}_exps.bias": (4, size) for name, size in (("gate", 48), ("up", 48), ("down", 64))}
LATENT = weights(
    attn_q_a=(24, 64), attn_q_a_norm=(24,), attn_q_b=(4 * 12, 24), attn_kv_a_mqa=(16 + 4, 64), attn_kv_a_norm=(16,),
    attn_kv_b=(4 * (8 + 12), 16), attn_output=(64, 4 * 12), ffn_gate_shexp=(48, 64), ffn_up_shexp=(48, 64),
    ffn_down_shexp=(64, 48),
)  # fmt: skip
LATENT_KEYS = {
    "attention.q_lora_rank": 24, "attention.kv_lora_rank": 16, "attention.key_length": 12, "attention.value_length": 12,
    "rope.dimension_count": 4, "expert_shared_count": 1, "leading_dense_block_count": 0, "feed_forward_length": 80,
}  # fmt: skip
ABSORBED_KEYS = {
    "attention.key_length": 20, "attention.value_length": 16, "attention.key_length_mla": 12,
    "attention.value_length_mla": 12, "attention.head_count_kv": 1,
}  # fmt: skip

FAMILIES = {
    "llama": ("llama", "llama", *dense(GROUPED, ATTENTION | GATED | NORMS, HEAD)),
    "llama-head-dim": ("llama", "llama", *dense(GROUPED | WIDE_KEYS, WIDE | GATED | NORMS, {})),
    "mixtral": ("llama", "mixtral", *dense(
        GROUPED | {"expert_count": 4, "expert_used_count": 2, "feed_forward_length": 48},
        ATTENTION | ROUTED | NORMS, HEAD)),
    "qwen2": ("qwen2", "qwen2", *dense(
        GROUPED, ATTENTION | GATED | NORMS | biases(attn_q=64, attn_k=32, attn_v=32), HEAD)),
    "qwen3": ("qwen3", "qwen3", *dense(GROUPED | WIDE_KEYS, WIDE | HEAD_NORMS | GATED | NORMS, {})),
    "qwen2moe": ("qwen2moe", "qwen2_moe", *dense(
        GROUPED | EXPERTS | {"expert_shared_feed_forward_length": 56},
        ATTENTION | biases(attn_q=64, attn_k=32, attn_v=32) | ROUTED | NORMS
        | weights(ffn_gate_inp_shexp=(64,), ffn_gate_shexp=(56, 64), ffn_up_shexp=(56, 64), ffn_down_shexp=(64, 56)),
        HEAD)),
    "qwen3moe": ("qwen3moe", "qwen3_moe", *dense(
        GROUPED | EXPERTS | WIDE_KEYS, WIDE | HEAD_NORMS | ROUTED | NORMS, HEAD)),
    "gemma": ("gemma", "gemma", *dense(GROUPED | WIDE_KEYS, WIDE | GATED | NORMS, {})),
    "gemma2": ("gemma2", "gemma2", *dense(
        GROUPED | WIDE_KEYS | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        WIDE | GATED | NORMS | AFTER, {})),
    "gemma3": ("gemma3", "gemma3_text", *dense(
        GROUPED | WIDE_KEYS | {"attention.sliding_window": 64}, WIDE | HEAD_NORMS | GATED | NORMS | AFTER, {})),
    "phi2": ("phi2", "phi", *dense(
        {"feed_forward_length": 80, "rope.dimension_count": 8},
        FUSED | FUSED_BIASES | PLAIN | weights(attn_norm=(64,)), HEAD | FINAL_BIAS | biases(output=96))),
    "phi3": ("phi3", "phi3", *dense(
        GROUPED | {"rope.dimension_count": 12},
        weights(attn_qkv=(128, 64), attn_output=(64, 64), ffn_up=(160, 64), ffn_down=(64, 80)) | NORMS, HEAD)),
    "gpt2": ("gpt2", "gpt2", *dense(
        {"feed_forward_length": 80}, FUSED | FUSED_BIASES | PLAIN | NORMS | biases(ffn_norm=64),
        FINAL_BIAS | weights(position_embd=(128, 64)))),
    "gptneox": ("gptneox", "gpt_neox", *dense(
        {"feed_forward_length": 80, "rope.dimension_count": 4, "use_parallel_residual": True},
        FUSED | FUSED_BIASES | PLAIN | NORMS | biases(ffn_norm=64), HEAD | FINAL_BIAS)),
    "falcon-7b": ("falcon", "falcon", *dense(
        {"feed_forward_length": 256, "attention.head_count_kv": 1},
        weights(attn_qkv=(96, 64), attn_output=(64, 64), ffn_up=(256, 64), ffn_down=(64, 256), attn_norm=(64,))
        | biases(attn_norm=64), HEAD | FINAL_BIAS)),
    "falcon-40b": ("falcon", "falcon", *dense(
        {"feed_forward_length": 256, "attention.head_count_kv": 2},
        weights(attn_qkv=(128, 64), attn_output=(64, 64), ffn_up=(256, 64), ffn_down=(64, 256), attn_norm=(64,))
        | weights(attn_norm_2=(64,)) | biases(attn_norm=64, attn_norm_2=64), HEAD | FINAL_BIAS)),
    "olmo2": ("olmo2", "olmo2", *dense(
        GROUPED, ATTENTION | GATED | AFTER | weights(attn_q_norm=(64,), attn_k_norm=(32,)), HEAD)),
    "smollm3": ("smollm3", "smollm3", *dense(GROUPED, ATTENTION | GATED | NORMS, {})),
    "stablelm": ("stablelm", "stablelm", *dense(
        GROUPED | {"rope.dimension_count": 4, "use_parallel_residual": False},
        ATTENTION | GATED | NORMS | biases(attn_norm=64, ffn_norm=64), HEAD | FINAL_BIAS)),
    "deepseek2": ("deepseek2", "deepseek_v2", *dense(LATENT_KEYS | EXPERTS, LATENT | ROUTED | NORMS, HEAD)),
    "deepseek2-v3": ("deepseek2", "deepseek_v3", *dense(
        LATENT_KEYS | EXPERTS | {"expert_gating_func": 2}, LATENT | ROUTED | NORMS | biases(exp_probs_b=4), HEAD)),
    "deepseek2-absorbed": ("deepseek2", "deepseek_v3", *dense(
        LATENT_KEYS | EXPERTS | ABSORBED_KEYS | {"expert_gating_func": 2},
        {name: shape for name, shape in LATENT.items() if name != "attn_kv_b.weight"}
        | weights(attn_k_b=(4, 16, 8), attn_v_b=(4, 12, 16)) | ROUTED | NORMS | biases(exp_probs_b=4), HEAD)),
    "gpt-oss": ("gpt-oss", "gpt_oss", *dense(
        GROUPED | EXPERTS | {"attention.key_length": 16, "attention.value_length": 16, "attention.sliding_window": 64},
        ATTENTION | ROUTED | weights(attn_norm=(64,), post_attention_norm=(64,), attn_sinks=(4,))
        | GPT_OSS_BIASES | GPT_OSS_EXPERT_BIASES, HEAD)),
}  # fmt: skip


@pytest.mark.parametrize("case", FAMILIES)
def test_every_architecture_has_exactly_the_parameters_of_its_file(case, tmp_path, layouts):
    architecture, family, keys, tensors = FAMILIES[case]
    model = read_gguf(write_gguf(tmp_path / "f.gguf", architecture, keys, tensors), layouts)
    assert model.spec.architecture == family
    tensors = read_header(tmp_path / "f.gguf").tensors
    parameters = sum(tensor.elements for tensor in tensors if "exp_probs_b" not in tensor.name)
    assert parameter_count(model.inventory) == parameters
    assert not [note for note in model.notes if "follow from its shapes" in note or "ignored keys" in note]


def test_olmo_has_norms_without_weights(tmp_path, layouts):
    keys, tensors = dense(GROUPED, ATTENTION | GATED, HEAD)
    del tensors["output_norm.weight"]
    model = read_gguf(write_gguf(tmp_path / "f.gguf", "olmo", keys, tensors), layouts)
    assert parameter_count(model.inventory) == sum(t.elements for t in read_header(tmp_path / "f.gguf").tensors)


def test_a_tied_head_that_is_stored_twice_counts_once(tmp_path, layouts):
    architecture, _, keys, tensors = FAMILIES["gpt2"]
    path = write_gguf(tmp_path / "f.gguf", architecture, keys, tensors | {"output.weight": ((96, 64), F32)})
    model = read_gguf(path, layouts)
    assert model.spec.tie_word_embeddings
    assert "the file stores the tied head a second time (6,144 elements)" in model.notes
    assert not [note for note in model.notes if "follow from its shapes" in note]


@pytest.mark.parametrize("rotated", [2, 8, 24, 32, 62, 64])
def test_rotated_dimensions_survive_the_way_through_a_share(rotated, tmp_path, layouts):
    keys, tensors = FAMILIES["phi3"][2:]
    keys = keys | {"rope.dimension_count": rotated, "attention.key_length": 64, "attention.value_length": 64}
    model = read_gguf(write_gguf(tmp_path / "f.gguf", "phi3", keys, tensors), layouts)
    assert model.spec.runs[0].layer.attention.rotary_dim == rotated


def test_equal_values_for_every_layer_are_one_value(tmp_path, layouts):
    keys = LLAMA_KEYS | {"attention.head_count": [4, 4], "attention.head_count_kv": [2, 2]}
    assert read_gguf(write_gguf(tmp_path / "f.gguf", "llama", keys, llama_tensors()), layouts).notes == ()


@pytest.mark.parametrize(
    ("architecture", "keys", "extra", "message"),
    [
        ("mamba", LLAMA_KEYS, {}, "'mamba' is not supported"),
        ("qwen4", LLAMA_KEYS, {}, "the nearest that is: qwen"),
        ("llama", LLAMA_KEYS | {"attention.head_count_kv": [2, 4]}, {}, "differs from layer to layer"),
        ("llama", LLAMA_KEYS | {"attention.key_length": 64, "attention.value_length": 32}, {}, "64 for keys and 32"),
        ("llama", LLAMA_KEYS, {"general.type": "adapter"}, "general.type is 'adapter'"),
    ],
)
def test_what_is_not_modelled_is_refused_with_exit_code_3(architecture, keys, extra, message, tmp_path, layouts):
    path = write_gguf(tmp_path / "f.gguf", architecture, keys, llama_tensors(), extra=extra)
    with pytest.raises(CannotAnswerError, match=message) as error:
        read_gguf(path, layouts)
    assert error.value.exit_code == 3


def test_a_vocabulary_without_tensors_is_refused(tmp_path, layouts):
    with pytest.raises(CannotAnswerError, match="no tensors"):
        read_gguf(write_gguf(tmp_path / "f.gguf", "llama", LLAMA_KEYS, {}), layouts)


# --- split files ------------------------------------------------------------------------------------------------------


@pytest.fixture
def split(tmp_path) -> list[Path]:
    """A model in three parts, as the package splits it."""
    write_gguf(tmp_path / "m.gguf", "llama", LLAMA_KEYS, llama_tensors(), split_max_tensors=8)
    return sorted(tmp_path.glob("m-*-of-*.gguf"))


@pytest.mark.parametrize("part", [0, 1, 2])
def test_any_part_of_a_split_file_gives_the_whole_model(part, split, layouts, tmp_path):
    whole = read_gguf(write_gguf(tmp_path / "one.gguf", "llama", LLAMA_KEYS, llama_tensors()), layouts)
    assert [path.name for path in split] == [f"m-{number:05}-of-00003.gguf" for number in (1, 2, 3)]
    model = read_gguf(split[part], layouts)
    assert model.storage == whole.storage
    assert model.inventory == whole.inventory
    assert model.spec.name == "m"


def test_a_missing_part_is_named(split, layouts):
    split[1].unlink()
    with pytest.raises(InvalidFileError, match=r"parts of the model are missing: m-00002-of-00003\.gguf"):
        read_gguf(split[0], layouts)


def test_a_part_under_the_name_of_another_is_refused(split, layouts):
    split[2].write_bytes(split[1].read_bytes())
    with pytest.raises(InvalidFileError, match="says it is part 2 of 3, not 3 of 3"):
        read_gguf(split[0], layouts)


def test_a_part_with_another_name_is_refused(split, layouts, tmp_path):
    renamed = split[0].rename(tmp_path / "renamed.gguf")
    with pytest.raises(InvalidFileError, match="one of 3 parts"):
        read_gguf(renamed, layouts)


# --- damaged and hostile files ----------------------------------------------------------------------------------------


def test_every_truncation_is_refused_but_the_header_alone(llama_gguf, layouts, tmp_path):
    data = llama_gguf.read_bytes()
    start = read_header(llama_gguf).data_start
    whole = read_gguf(llama_gguf, layouts)
    path = tmp_path / "cut.gguf"
    accepted = []
    for length in [*range(start + 70), *range(start + 70, len(data), 997)]:
        path.write_bytes(data[:length])
        try:
            model = read_gguf(path, layouts)
        except InvalidFileError:
            continue
        accepted.append(length)
        assert model.storage == whole.storage
        assert "only the header" in model.notes[0]
    assert accepted[-1] == start
    assert accepted == list(range(accepted[0], start + 1))
    assert len(accepted) <= 32


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=6))
def test_no_damage_escapes_as_anything_but_an_error_of_ours(changes, llama_gguf, layouts, tmp_path):
    data = bytearray(llama_gguf.read_bytes())
    header = read_header(llama_gguf).data_start
    for share, value in changes:
        data[int(share * header)] = value
    path = tmp_path / "mutated.gguf"
    path.write_bytes(data)
    with contextlib.suppress(MemplanError):
        read_gguf(path, layouts)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def header(keys: list[bytes], tensors: list[bytes], *, more_keys: int = 0, more_tensors: int = 0) -> bytes:
    """Return a header that announces more than it holds, if asked."""
    counts = len(tensors) + more_tensors, len(keys) + more_keys
    return b"GGUF" + struct.pack("<IQQ", 3, *counts) + b"".join(keys + tensors)


def tensor(name: str, dimensions: list[int], kind: int = 0, offset: int = 0) -> bytes:
    sizes = struct.pack(f"<{len(dimensions)}Q", *dimensions)
    return text(name) + struct.pack("<I", len(dimensions)) + sizes + struct.pack("<IQ", kind, offset)


def array(kind: int, length: int) -> bytes:
    return struct.pack("<IQ", kind, length)


LLAMA = text("general.architecture") + struct.pack("<I", 8) + text("llama")
NESTED = text("a") + struct.pack("<I", 9) + array(9, 1) * 5_000 + array(0, 0)
HOSTILE = {
    "empty": (b"", "not a GGUF file"),
    "other-format": (b"PK\x03\x04" + bytes(60), "not a GGUF file"),
    "magic-only": (b"GGUF", "cut off"),
    "version-1": (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
    "version-4": (b"GGUF" + struct.pack("<IQQ", 4, 0, 0), "version 4"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "tensor-count": (header([], [], more_tensors=2**60), "1,152,921,504,606,846,976 tensors announced"),
    "key-count": (header([], [], more_keys=2**60), "metadata keys announced"),
    "key-length": (header([struct.pack("<Q", 2**60) + bytes(40)], []), "a length of 1,152,921,504,606,846,976"),
    "string-length": (header([text("a") + struct.pack("<IQ", 8, 2**60) + bytes(9)], []), "a length of"),
    "string-length-overflow": (header([text("a") + struct.pack("<IQ", 8, 2**64 - 1) + bytes(9)], []), "a length of"),
    "string-array": (header([text("a") + struct.pack("<I", 9) + array(8, 2**60) + bytes(9)], []), "a length of"),
    "inner-string": (header([text("a") + struct.pack("<I", 9) + array(8, 2) + b"\xff" * 8 + bytes(9)], []), "wanted"),
    "number-array": (header([text("a") + struct.pack("<I", 9) + array(4, 2**60) + bytes(9)], []), "a length of"),
    "array-array": (header([text("a") + struct.pack("<I", 9) + array(9, 2**60) + bytes(9)], []), "a length of"),
    "nested-arrays": (header([NESTED], []), "nested more than 8 deep"),
    "array-type": (header([text("a") + struct.pack("<I", 9) + array(77, 0) + bytes(9)], []), "unknown array type 77"),
    "value-type": (header([text("a") + struct.pack("<I", 99) + bytes(9)], []), "unknown value type 99"),
    "same-key-twice": (header([LLAMA, LLAMA], []), "appears twice"),
    "key-not-text": (header([struct.pack("<Q", 2) + b"\xff\xfe" + bytes(20)], []), "not UTF-8"),
    "alignment": (header([text("general.alignment") + struct.pack("<II", 4, 24)], []), "power of two"),
    "no-architecture": (header([text("a") + struct.pack("<II", 4, 1)], []), "no general.architecture"),
    "dimensions": (header([LLAMA], [tensor("t", [1] * 5)]), "5 dimensions"),
    "zero-dimension": (header([LLAMA], [tensor("t", [4, 0])]), "cannot have the dimensions"),
    "dimension-overflow": (header([LLAMA], [tensor("t", [2**33, 2**33])]), "cannot have the dimensions"),
    "unknown-type": (header([LLAMA], [tensor("t", [32], kind=255)]), "has unknown type 255"),
    "removed-type": (header([LLAMA], [tensor("t", [32], kind=31)]), "Q4_0_4_4, which GGUF no longer allows"),
    "broken-rows": (header([LLAMA], [tensor("t", [48, 2], kind=2)]), "rows of 48 elements"),
    "same-tensor-twice": (header([LLAMA], [tensor("t", [8]), tensor("t", [8], offset=32)]), "'t' appears twice"),
    "overlap": (header([LLAMA], [tensor("t", [16]), tensor("u", [8], offset=32)]), "'u' overlaps"),
    "misaligned": (header([LLAMA], [tensor("t", [8], offset=8)]), "no multiple of 32"),
    "offset-beyond": (header([LLAMA], [tensor("t", [8], offset=2**62)]) + bytes(64), "the file has"),
    "size-beyond": (header([LLAMA], [tensor("t", [2**40])]) + bytes(64), "the file has"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_a_header_that_cannot_be_true_is_refused_in_little_memory(case, tmp_path, layouts):
    data, message = HOSTILE[case]
    path = tmp_path / "hostile.gguf"
    path.write_bytes(data)
    tracemalloc.start()
    with pytest.raises(InvalidFileError, match=message) as error:
        read_gguf(path, layouts)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert str(error.value).startswith(str(path))
    assert peak < 2**20


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_count": 100_000}, "block_count is 100,000, and the file holds"),
        ({"embedding_length": 128}, "embedding_length is 128, and rows of token_embd.weight 256"),
        ({"attention.head_count": 0}, "expected an integer from 1"),
        ({"attention.head_count": "four"}, "got 'four'"),
        ({"attention.head_count_kv": 3}, "3 does not divide"),
    ],
)
def test_metadata_that_contradicts_the_tensors_is_refused(changes, message, tmp_path, layouts):
    path = write_gguf(tmp_path / "f.gguf", "llama", LLAMA_KEYS | changes, llama_tensors())
    with pytest.raises(InvalidFileError, match=message):
        read_gguf(path, layouts)


def test_all_problems_are_listed(tmp_path, layouts):
    path = tmp_path / "f.gguf"
    path.write_bytes(header([LLAMA], [tensor(f"t{index}", [31], kind=2) for index in range(30)]))
    with pytest.raises(InvalidFileError) as error:
        read_gguf(path, layouts)
    assert len(error.value.problems) == 30
    assert str(error.value).splitlines()[-1] == "... and 10 more"


@pytest.mark.parametrize("name", ["", "missing.gguf", "a\0b"])
def test_what_is_no_file_is_refused(name, tmp_path, layouts):
    with pytest.raises(InvalidFileError):
        read_gguf(tmp_path / name, layouts)


def test_tensors_in_blocks_are_as_large_as_the_writer_makes_them(tmp_path, layouts):
    tensors = {"token_embd.weight": ((320, 256), Q8_0), "blk.0.attn_q.weight": ((256, 256), Q4_K)}
    path = write_gguf(tmp_path / "f.gguf", "llama", LLAMA_KEYS | {"block_count": 1}, tensors)
    storage = read_gguf(path, layouts).storage
    expected = sum(tensor_data(shape, kind).nbytes for shape, kind in tensors.values())
    assert storage is not None
    assert storage.total_bytes == expected
