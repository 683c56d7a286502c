"""Builders of GGUF and safetensors files, by the packages that define the formats."""

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from memplan.model.readers.gguf import BlockLayout
from tests.jobs import yaml_data

FORMATS_FILE = Path(__file__).parents[2] / "configs" / "weight_formats.yaml"


REQUIRED_KEYS = {"block_bytes", "block_elements", "kind", "sources"}


@pytest.fixture(scope="session")
def formats() -> dict[str, dict[str, Any]]:
    entries = yaml_data(FORMATS_FILE)
    missing = {name: sorted(REQUIRED_KEYS - entry.keys()) for name, entry in entries.items()}
    assert not any(missing.values()), (
        f"{FORMATS_FILE.name}: keys are missing: { {k: v for k, v in missing.items() if v} }"
    )
    return entries


@pytest.fixture(scope="session")
def layouts(formats) -> dict[int, BlockLayout]:
    return {
        entry["ggml_type"]: BlockLayout(name, entry["block_elements"], entry["block_bytes"])
        for name, entry in formats.items()
        if "ggml_type" in entry
    }


def tensor_data(shape: tuple[int, ...], kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Return bytes of the right size; what they mean does not matter."""
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    return np.zeros((*shape[:-1], shape[-1] // elements * size), dtype=np.uint8)


def write_gguf(
    path: Path,
    architecture: str,
    keys: Mapping[str, Any],
    tensors: Mapping[str, tuple[tuple[int, ...], gguf.GGMLQuantizationType]],
    *,
    extra: Mapping[str, Any] | None = None,
    arrays: Mapping[str, list] | None = None,
    **options: Any,
) -> Path:
    """Write a GGUF file; integer keys get the architecture's prefix, ``extra`` ones are whole."""
    writer = _writer(path, architecture, keys, {**(extra or {}), **(arrays or {})}, **options)
    for name, (shape, kind) in tensors.items():
        writer.add_tensor(name, tensor_data(shape, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_gguf_header(
    path: Path,
    architecture: str,
    keys: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    kind: gguf.GGMLQuantizationType,
) -> Path:
    """Write the header of a file whose matrices are of one type, without the data; vectors are F32."""
    writer = _writer(path, architecture, keys, {})
    for name, shape in shapes.items():
        stored = F32 if len(shape) == 1 else kind
        elements, size = gguf.GGML_QUANT_SIZES[stored]
        stored_bytes = prod(shape) // elements * size
        writer.add_tensor_info(name, shape, np.dtype(np.float32), stored_bytes, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return path


def _writer(
    path: Path, architecture: str, keys: Mapping[str, Any], extra: Mapping[str, Any], **options: Any
) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(path, architecture, **options)
    for key, value in [*((f"{architecture}.{key}", value) for key, value in keys.items()), *extra.items()]:
        kind = {bool: "bool", float: "float32", str: "string", int: "uint32", list: "array"}[type(value)]
        getattr(writer, f"add_{kind}")(key, value)
    return writer


F32 = gguf.GGMLQuantizationType.F32
Q4_K = gguf.GGMLQuantizationType.Q4_K
Q6_K = gguf.GGMLQuantizationType.Q6_K

LLAMA_KEYS: dict[str, Any] = {
    "block_count": 2,
    "context_length": 2048,
    "embedding_length": 256,
    "feed_forward_length": 512,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "rope.dimension_count": 64,
    "vocab_size": 320,
}

LLAMA_CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 512,
    "vocab_size": 320,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}


def llama_tensors(layers: int = 2, head: bool = True) -> dict[str, tuple[tuple[int, ...], gguf.GGMLQuantizationType]]:
    """Return the tensors of a Q4_K_M file: most in Q4_K, some in Q6_K, norms in F32."""
    tensors = {"token_embd.weight": ((320, 256), Q4_K), "output_norm.weight": ((256,), F32)}
    if head:
        tensors["output.weight"] = ((320, 256), Q6_K)
    for layer in range(layers):
        shapes = {
            "attn_q": (256, 256), "attn_k": (128, 256), "attn_v": (128, 256), "attn_output": (256, 256),
            "ffn_gate": (512, 256), "ffn_up": (512, 256), "ffn_down": (256, 512),
        }  # fmt: skip
        for name, shape in shapes.items():
            kind = Q6_K if name in ("attn_v", "ffn_down") else Q4_K
            tensors[f"blk.{layer}.{name}.weight"] = (shape, kind)
        for name in ("attn_norm", "ffn_norm"):
            tensors[f"blk.{layer}.{name}.weight"] = ((256,), F32)
    return tensors


@pytest.fixture
def llama_gguf(tmp_path) -> Path:
    """A realistic small file of mixed types."""
    return write_gguf(tmp_path / "tiny.gguf", "llama", LLAMA_KEYS, llama_tensors(), extra={"general.name": "Tiny"})
