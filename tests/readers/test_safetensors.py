"""Safetensors files: exact bytes, shapes from the config beside them, and no surprise from a damaged file."""

import contextlib
import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save, save_file

from memplan.errors import CannotAnswerError, InvalidFileError, MemplanError
from memplan.model.families import model_spec
from memplan.model.inventory import parameter_count
from memplan.model.parameter_tensors import inventory_of
from memplan.model.readers.safetensors import read_safetensors, stored_tensors
from memplan.model.readers.safetensors_header import DTYPES

from .conftest import LLAMA_CONFIG

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96, "bos_token_id": 1}
SMALL |= {"eos_token_id": 2, "pad_token_id": None}
GROUPED = SMALL | {"num_key_value_heads": 2, "intermediate_size": 80}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-tied": ("llama", GROUPED | {"tie_word_embeddings": True}),
    "mixtral": ("mixtral", GROUPED | {"num_local_experts": 4}),
    "qwen2-moe": ("qwen2_moe", GROUPED | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
    "gemma2": ("gemma2", GROUPED | {"head_dim": 32}),
    "gpt2": ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 96, "n_positions": 32}),
    "falcon-grouped": ("falcon", SMALL | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "gpt-oss": ("gpt_oss", GROUPED | {"num_local_experts": 4, "head_dim": 16}),
}

SPEC = model_spec(LLAMA_CONFIG, "tiny", "test")
PARAMETERS = parameter_count(inventory_of(SPEC))


def weights(config: dict[str, Any] = LLAMA_CONFIG) -> dict[str, np.ndarray]:
    """Return the tensors of a released model: matrices in 16 bits, norms in 32."""
    arrays = {}
    for tensor in inventory_of(model_spec(config, "tiny", "test")):
        kind = np.float32 if tensor.role == "norm" else np.float16
        for name in tensor.expanded_names():
            arrays[name] = np.zeros(tensor.shape, dtype=kind)
    return arrays


def write_config(folder: Path, **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps(LLAMA_CONFIG | changes), encoding="utf-8")


def write_index(folder: Path, shards: dict[str, dict[str, np.ndarray]], **metadata: Any) -> Path:
    for shard, arrays in shards.items():
        save_file(arrays, folder / shard)
    index = {"metadata": metadata, "weight_map": {name: shard for shard, arrays in shards.items() for name in arrays}}
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps(index), encoding="utf-8")
    return path


def halves(arrays: dict[str, np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
    names = sorted(arrays)
    parts = names[: len(names) // 2], names[len(names) // 2 :]
    return {
        f"model-{number:05}-of-00002.safetensors": {name: arrays[name] for name in part}
        for number, part in enumerate(parts, 1)
    }


@pytest.fixture
def released(tmp_path) -> Path:
    """A directory as people download it."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    write_config(folder)
    save_file(weights(), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


# --- whole files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "model.safetensors"])
def test_a_file_and_its_directory_give_the_model_with_exact_bytes(name, released):
    model = read_safetensors(released / name)
    arrays = weights()
    norms = sum(array.nbytes for array in arrays.values() if array.dtype == np.float32)
    assert model.storage is not None
    assert dict(model.storage.bytes_by_format) == {
        "fp16": sum(array.nbytes for array in arrays.values()) - norms,
        "fp32": norms,
    }
    assert model.storage.tensors == len(arrays)
    assert model.inventory == inventory_of(SPEC)
    assert model.source == str(released / name)
    assert not [note for note in model.notes if "parameters" in note]


def test_tensors_are_those_that_the_package_reads(released):
    stored = stored_tensors(released)
    with safe_open(released / "model.safetensors", "numpy") as file:
        assert {tensor.name: list(tensor.shape) for tensor in stored.tensors} == {
            name: file.get_slice(name).get_shape()
            for name in file.keys()  # noqa: SIM118
        }
    assert stored.elements == PARAMETERS
    assert stored.storage().total_bytes == sum(array.nbytes for array in weights().values())


def test_stored_tensors_need_no_config(released):
    (released / "config.json").unlink()
    assert stored_tensors(released / "model.safetensors").elements == PARAMETERS
    with pytest.raises(CannotAnswerError, match=r"heads cannot be read off tensor shapes.*config\.json") as error:
        read_safetensors(released / "model.safetensors")
    assert error.value.exit_code == 3


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_takes_the_bits_of_its_name(dtype, tmp_path):
    _, bits = DTYPES[dtype]
    path = tmp_path / "f.safetensors"
    path.write_bytes(file_of({"t": entry(dtype, [8, 3], 0, 3 * bits)}, 3 * bits))
    (tensor,) = stored_tensors(path).tensors
    assert (tensor.stored_bytes, tensor.elements) == (3 * bits, 24)


NUMPY_DTYPES = {"BOOL": "bool", "C64": "complex64", "F16": "float16", "F32": "float32", "F64": "float64"}
NUMPY_DTYPES |= {f"{kind[0].upper()}{bits}": f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)}


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_our_dtypes_have_the_sizes_of_the_package(dtype, tmp_path):
    array = np.zeros((3, 5), dtype=NUMPY_DTYPES[dtype])
    save_file({"t": array}, tmp_path / "f.safetensors")
    (tensor,) = stored_tensors(tmp_path / "f.safetensors").tensors
    assert tensor.stored_bytes == array.nbytes
    assert tensor.format == DTYPES[dtype][0]


def test_scalars_and_empty_tensors_are_read(tmp_path):
    save_file({"scalar": np.array(1.0, np.float32), "empty": np.zeros((0, 4), np.float32)}, tmp_path / "f.safetensors")
    stored = stored_tensors(tmp_path / "f.safetensors")
    assert sorted((tensor.name, tensor.elements) for tensor in stored.tensors) == [("empty", 0), ("scalar", 1)]


def test_a_header_alone_is_read_with_a_note(released):
    path = released / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: 8 + int.from_bytes(data[:8], "little")])
    model = read_safetensors(path)
    assert model.storage is not None
    assert model.storage.total_bytes == sum(array.nbytes for array in weights().values())
    assert "only the header of model.safetensors is present: sizes are taken from it" in model.notes


@pytest.mark.parametrize("case", ["llama-tied", "mixtral", "qwen2-moe", "gemma2", "gpt2", "falcon-grouped", "gpt-oss"])
def test_what_transformers_saves_has_the_parameters_of_its_config(case, tmp_path):
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    family, config = FAMILIES[case]
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(family, **config))
    model.save_pretrained(tmp_path)
    read = read_safetensors(tmp_path)
    assert read.storage is not None
    assert read.storage.total_bytes == sum(tensor.nbytes for tensor in model.parameters())
    assert read.storage.bytes_by_format.keys() == {"fp32"}
    assert not [note for note in read.notes if "parameters" in note]


# --- what differs from the config -------------------------------------------------------------------------------------


def test_a_tied_head_that_is_stored_is_noted_and_counts_once(released):
    write_config(released, tie_word_embeddings=True)
    model = read_safetensors(released)
    assert parameter_count(model.inventory) == PARAMETERS - 320 * 256
    assert "lm_head.weight is tied to the embedding and stored a second time (81,920 elements)" in model.notes
    assert not [note for note in model.notes if "than the" in note]


def test_masks_and_rotary_tables_are_no_parameters(released):
    arrays = weights() | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(32, np.float32)}
    save_file(arrays, released / "model.safetensors")
    notes = read_safetensors(released).notes
    assert [note for note in notes if "inv_freq, 32 elements" in note]
    assert not [note for note in notes if "than the" in note]


def test_a_difference_in_parameters_is_noted(released):
    save_file(weights() | {"model.extra": np.zeros(7, np.float32)}, released / "model.safetensors")
    expected = f"the files hold {PARAMETERS + 7:,} parameters, 7 more than the {PARAMETERS:,} of the config"
    assert expected in read_safetensors(released).notes


def test_packed_quantised_tensors_are_noted_and_not_compared(released):
    arrays = weights() | {"model.layers.0.mlp.up_proj.weight": np.zeros((512 * 256 // 2, 1), np.uint8)}
    save_file(arrays, released / "model.safetensors")
    model = read_safetensors(released)
    assert model.storage is not None
    assert model.storage.bytes_by_format["uint8"] == 512 * 256 // 2
    assert "parameters are not compared: tensors in uint8 may be packed quantised weights" in model.notes


# --- several files ----------------------------------------------------------------------------------------------------


@pytest.fixture
def sharded(tmp_path) -> Path:
    write_config(tmp_path, torch_dtype="bfloat16")
    write_index(tmp_path, halves(weights()), total_size=sum(array.nbytes for array in weights().values()))
    return tmp_path


@pytest.mark.parametrize("name", ["", "model.safetensors.index.json", "model-00002-of-00002.safetensors"])
def test_an_index_its_directory_and_a_shard_all_give_the_whole_model(name, sharded):
    model = read_safetensors(sharded / name)
    assert model.storage is not None
    assert model.storage.total_bytes == sum(array.nbytes for array in weights().values())
    assert not [note for note in model.notes if "than the" in note]


def test_shards_without_an_index_are_found_by_name(sharded):
    (sharded / "model.safetensors.index.json").unlink()
    assert stored_tensors(sharded).elements == PARAMETERS
    (sharded / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(InvalidFileError, match=r"shards of the model are missing: model-00001-of-00002\.safetensors"):
        stored_tensors(sharded)


def test_without_its_shards_an_index_gives_the_total_that_it_states(sharded):
    for shard in sharded.glob("*.safetensors"):
        shard.unlink()
    model = read_safetensors(sharded)
    total = sum(array.nbytes for array in weights().values())
    assert model.storage is not None
    assert dict(model.storage.bytes_by_format) == {"bf16": total}
    assert model.storage.tensors == len(weights())
    assert [note for note in model.notes if "shards are missing" in note and f"{total:,} bytes" in note]
    with pytest.raises(InvalidFileError, match="shards are missing"):
        stored_tensors(sharded)


def test_an_index_that_disagrees_with_its_shards_is_refused(sharded):
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.imagined"] = "model-00001-of-00002.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(InvalidFileError, match=r"disagree on these tensors: model\.imagined"):
        read_safetensors(path)


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    arrays = {"t": np.zeros(4, np.float32)}
    write_index(tmp_path, {"a.safetensors": arrays, "b.safetensors": arrays | {"u": arrays["t"]}})
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"t": "a.safetensors", "u": "b.safetensors"}}))
    with pytest.raises(InvalidFileError, match="'t' also appears in another shard"):
        stored_tensors(path)


def test_two_models_in_one_directory_are_refused(released):
    save_file(weights(), released / "other.safetensors")
    (released / "model.safetensors").rename(released / "first.safetensors")
    with pytest.raises(InvalidFileError, match="several models in this folder, name one"):
        stored_tensors(released)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not valid JSON"),
        ("[]", "expected an object"),
        ("{}", "weight_map"),
        ('{"weight_map": {}}', "weight_map"),
        ('{"weight_map": {"t": 3}}', "expected names of .safetensors files, got 3"),
        ('{"weight_map": {"t": "../../secret.safetensors"}}', "expected names"),
        ('{"weight_map": {"t": "/etc/passwd"}}', "expected names"),
        ('{"weight_map": {"t": "a.safetensors"}, "metadata": {"total_size": -1}}', "total_size"),
        ('{"weight_map": {"t": "a.safetensors"}, "metadata": {"total_size": 1e300}}', "total_size"),
        ('{"weight_map": {"t": "a.safetensors"}, "weight_map": {"t": "b.safetensors"}}', "twice"),
        ("[" * 200_000, "not valid JSON|too deeply"),
    ],
)
def test_a_wrong_index_is_refused(text, message, tmp_path):
    write_config(tmp_path)
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(text)
    with pytest.raises(InvalidFileError, match=message):
        read_safetensors(path)


def test_an_index_without_shards_and_without_a_total_is_refused(tmp_path):
    write_config(tmp_path)
    path = tmp_path / "model.safetensors.index.json"
    path.write_text('{"weight_map": {"t": "a.safetensors"}}')
    with pytest.raises(InvalidFileError, match="total_size is not stated"):
        read_safetensors(path)


# --- damaged and hostile files ----------------------------------------------------------------------------------------


def entry(dtype: str, shape: list[Any], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def file_of(header: dict[str, Any] | str, data_bytes: int = 0) -> bytes:
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    return struct.pack("<Q", len(text)) + text + bytes(data_bytes)


TWO = {"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 8, 16)}
HOSTILE = {
    "empty": (b"", "cut off"),
    "seven-bytes": (bytes(7), "cut off"),
    "length-only": (struct.pack("<Q", 2), "cut off"),
    "length-huge": (struct.pack("<Q", 2**60) + b"{}", "a header of 1,152,921,504,606,846,976 bytes"),
    "length-all-ones": (b"\xff" * 40, "cut off"),
    "other-format": (b"PK\x03\x04" + bytes(60), "cut off"),
    "not-text": (struct.pack("<Q", 2) + b"\xff\xfe", "not UTF-8"),
    "not-json": (file_of("nonsense"), "not valid JSON"),
    "list": (file_of("[]"), "expected an object with keys"),
    "deep": (file_of("[" * 100_000), "too deeply|not valid JSON"),
    "long-number": (file_of('{"a": ' + "9" * 10_000 + "}"), "not valid JSON|expected dtype"),
    "same-name-twice": (file_of('{"a": 1, "a": 1}'), "is given twice"),
    "no-entry": (file_of({"a": 3}), "expected dtype, shape and data_offsets"),
    "missing-key": (file_of({"a": {"dtype": "F32", "shape": [2]}}), "expected dtype, shape and data_offsets"),
    "unknown-dtype": (file_of({"a": entry("F128", [2], 0, 32)}), "unknown dtype 'F128'"),
    "dtype-list": (file_of({"a": {"dtype": [], "shape": [2], "data_offsets": [0, 8]}}), "unknown dtype"),
    "negative-shape": (file_of({"a": entry("F32", [-2], 0, 8)}), "shape of whole numbers"),
    "float-shape": (file_of({"a": entry("F32", [2.0], 0, 8)}, 8), "shape of whole numbers"),
    "true-shape": (file_of({"a": entry("F32", [True], 0, 4)}, 4), "shape of whole numbers"),
    "shape-overflow": (file_of({"a": entry("F32", [2**40, 2**40], 0, 8)}), "shape of whole numbers"),
    "many-dimensions": (file_of({"a": entry("F32", [1] * 10_000, 0, 4)}), "shape of whole numbers"),
    "offsets-reversed": (file_of({"a": entry("F32", [2], 8, 0)}), "data_offsets in order"),
    "three-offsets": (file_of({"a": entry("F32", [2], 0, 8) | {"data_offsets": [0, 8, 9]}}), "data_offsets in order"),
    "size-of-range": (file_of({"a": entry("F32", [3], 0, 8)}, 8), "takes 96 bits, and its range has 64"),
    "gap": (file_of(TWO | {"b": entry("F32", [2], 12, 20)}, 20), "'b' begins at 12, but the one before it ends at 8"),
    "overlap": (file_of(TWO | {"b": entry("F32", [2], 4, 12)}, 12), "'b' begins at 4"),
    "starts-late": (file_of({"a": entry("F32", [2], 4, 12)}, 12), "begins at 4"),
    "cut": (file_of(TWO, 15), "tensors take 16 bytes, and 15 follow"),
    "too-long": (file_of(TWO, 17), "tensors take 16 bytes, and 17 follow"),
    "beyond": (file_of({"a": entry("U8", [2**60], 0, 2**60)}, 16), "tensors take 1,152,921,504,606,846,976 bytes"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_header_that_cannot_be_true_is_refused_in_little_memory(case, tmp_path):
    data, message = HOSTILE[case]
    path = tmp_path / "hostile.safetensors"
    path.write_bytes(data)
    tracemalloc.start()
    with pytest.raises(InvalidFileError, match=message) as error:
        stored_tensors(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert str(error.value).startswith(str(path))
    assert peak < 4 * 2**20


def test_a_header_larger_than_the_format_allows_is_refused_unread(tmp_path):
    path = tmp_path / "f.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 100_000_001))
        file.truncate(200_000_000)
    with pytest.raises(InvalidFileError, match="the format allows 100,000,000"):
        stored_tensors(path)


def test_every_truncation_is_refused_but_the_header_alone(tmp_path):
    data = file_of(TWO, 16)
    path = tmp_path / "cut.safetensors"
    accepted = []
    for length in range(len(data)):
        path.write_bytes(data[:length])
        try:
            stored_tensors(path)
        except InvalidFileError:
            continue
        accepted.append(length)
    assert accepted == [len(data) - 16]


SAVED = save(weights())


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=6))
def test_no_damage_escapes_as_anything_but_an_error_of_ours(changes, released):
    data = bytearray(SAVED)
    header = 8 + int.from_bytes(data[:8], "little")
    for share, value in changes:
        data[int(share * header)] = value
    (released / "model.safetensors").write_bytes(data)
    with contextlib.suppress(MemplanError):
        read_safetensors(released)


KEYS = st.sampled_from(["dtype", "shape", "data_offsets"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.sampled_from(["F32", "U8", "a"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(header=st.dictionaries(st.text(max_size=4), VALUES, max_size=4), data_bytes=st.integers(0, 64))
def test_no_json_escapes_as_anything_but_an_error_of_ours(header, data_bytes, tmp_path):
    path = tmp_path / "f.safetensors"
    path.write_bytes(file_of(header, data_bytes))
    with contextlib.suppress(MemplanError):
        stored_tensors(path)


@pytest.mark.parametrize("name", ["missing", "config.json", "a\0b"])
def test_what_is_no_safetensors_file_is_refused(name, released):
    with pytest.raises(InvalidFileError):
        stored_tensors(released / name)


def test_an_empty_directory_is_refused(tmp_path):
    with pytest.raises(InvalidFileError, match=r"neither a \.safetensors file nor"):
        stored_tensors(tmp_path)
