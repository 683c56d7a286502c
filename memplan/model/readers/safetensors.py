"""Safetensors files and their indexes, as a model with the exact bytes that they store."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from memplan.documents.frozen_values import dataclass
from memplan.documents.opening import files_in, is_file, path_kind, read_text, shown_path
from memplan.documents.strict_json import parse_object
from memplan.errors import CannotAnswerError, InvalidFileError
from memplan.model.inventory import parameter_count
from memplan.model.model import Model, Storage
from memplan.model.readers.safetensors_header import MAXIMUM_HEADER_BYTES, StoredTensor, listed, read_header

_INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors", re.DOTALL)

_PACKED_FORMATS = frozenset({"uint8", "int8", "int16", "uint16", "int32", "uint32", "fp4-e2m1"})

_BUFFER = re.compile(
    r".*\.rotary_emb\.inv_freq|.*\.(attn|attention)\.(bias|masked_bias)|.*\.e_score_correction_bias"
    r"|.*\.(weight_scale_inv|weight_scale|input_scale)",
    re.DOTALL,
)
"""What checkpoints hold beside parameters: rotary tables, causal masks, offsets that steer experts, scales of FP8."""

_TORCH_FORMATS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float8_e4m3fn": "fp8-e4m3"}


@dataclass(frozen=True, slots=True)
class StoredTensors:
    """All tensors of a file, or of all shards of a model."""

    tensors: tuple[StoredTensor, ...]  # Tensors, file by file
    notes: tuple[str, ...] = ()  # What was assumed, one sentence each

    @property
    def elements(self) -> int:
        """Elements of all tensors as stored."""
        return sum(tensor.elements for tensor in self.tensors)

    def storage(self) -> Storage:
        """Return the exact bytes by format."""
        totals: dict[str, int] = {}
        for tensor in self.tensors:
            totals[tensor.format] = totals.get(tensor.format, 0) + tensor.stored_bytes
        return Storage(dict(sorted(totals.items())), len(self.tensors))


@dataclass(frozen=True, slots=True)
class _Index:
    """A checked ``model.safetensors.index.json``: shard of each tensor, and total bytes if stated."""

    path: Path
    shard_of: Mapping[str, str]
    total_bytes: int | None

    @property
    def shards(self) -> list[Path]:
        return [self.path.parent / name for name in sorted(set(self.shard_of.values()))]

    @property
    def missing(self) -> list[str]:
        return [shard.name for shard in self.shards if not is_file(shard)]


def stored_tensors(path: Path) -> StoredTensors:
    """Return what the file, index or directory at ``path`` stores; a config is not needed.

    Of a model that is split into shards any shard will do: all are read.

    Raises:
        InvalidFileError: Unreadable, damaged, contradictory, or a shard is missing.
    """
    source = _resolve(path)
    if source.suffix != ".json":
        return _merged(_all_shards(source))
    index = _read_index(source)
    if index.missing:
        raise InvalidFileError([f"{source}: shards are missing: {listed(index.missing)}"])
    stored = _merged(index.shards)
    difference = sorted({tensor.name for tensor in stored.tensors} ^ index.shard_of.keys())
    if difference:
        raise InvalidFileError([f"{source}: index and shards disagree on these tensors: {listed(difference)}"])
    return stored


def read_safetensors(path: Path) -> Model:
    """Return the model stored at ``path``: a file, an index, a shard, or a directory with one of them.

    Shapes come from the ``config.json`` beside it; bytes are those that the files state.

    Raises:
        InvalidFileError: Unreadable, damaged or contradictory.
        CannotAnswerError: No config beside it, or one that memplan does not model.
    """
    from memplan.model.readers.huggingface import read_huggingface

    source = _resolve(path)
    index = _read_index(source) if source.suffix == ".json" else None
    stored = None if index is not None and index.missing else stored_tensors(source)
    config = source.parent / "config.json"
    if not is_file(config):
        raise CannotAnswerError(
            f"{path}: attention heads cannot be read off tensor shapes: put the model's config.json beside it"
        )
    model = replace(read_huggingface(config), source=str(path))
    if stored is None:
        assert index is not None
        return _with_stated_bytes(model, index, config)
    notes = (*model.notes, *stored.notes, *_count_notes(model, stored.tensors))
    return replace(model, storage=stored.storage(), notes=notes)


def _resolve(path: Path) -> Path:
    """Return the safetensors file or index that ``path`` means."""
    kind = path_kind(path)
    if kind != "folder":
        if kind == "nothing" or path.name.endswith((".safetensors", ".safetensors.index.json")):
            return path
        raise InvalidFileError([f"{shown_path(path)}: expected a name in .safetensors or .safetensors.index.json"])
    files = [*files_in(path, "*.safetensors.index.json"), *files_in(path, "*.safetensors")]
    for wanted in (path / _INDEX, path / "model.safetensors"):
        if wanted in files:
            return wanted
    if not files:
        raise InvalidFileError([f"{path}: neither a .safetensors file nor {_INDEX} in this directory"])
    models = {match["stem"] if (match := _SHARD.fullmatch(item.name)) else item.name for item in files}
    if len(models) > 1:
        raise InvalidFileError(
            [f"{path}: several models in this folder, name one: {listed([item.name for item in files])}"]
        )
    return files[0]


def _all_shards(path: Path) -> list[Path]:
    """Return ``path``, or all files of the model if its name says that it is one of several."""
    match = _SHARD.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    paths = [path.with_name(f"{match['stem']}-{n:05}-of-{count:05}.safetensors") for n in range(1, count + 1)]
    missing = [part.name for part in paths if not is_file(part)]
    if missing or path not in paths:
        raise InvalidFileError([f"{path}: shards of the model are missing: {listed(missing or [path.name])}"])
    return paths


def _merged(paths: Sequence[Path]) -> StoredTensors:
    """Return the tensors of all files, whose names must differ."""
    tensors: list[StoredTensor] = []
    bare: list[str] = []
    problems: list[str] = []
    seen: set[str] = set()
    for path in paths:
        header = read_header(path)
        twice = [tensor.name for tensor in header.tensors if tensor.name in seen]
        problems += [f"{path}: tensor {name!r:.80} also appears in another shard" for name in twice]
        seen.update(tensor.name for tensor in header.tensors)
        tensors += header.tensors
        if not header.has_data and any(tensor.stored_bytes for tensor in header.tensors):
            bare.append(path.name)
    if problems:
        raise InvalidFileError(problems)
    notes = (f"only the header of {listed(bare)} is present: sizes are taken from it",) if bare else ()
    return StoredTensors(tuple(tensors), notes)


def _read_index(path: Path) -> _Index:
    """Return the index at ``path``, whose shards must lie beside it."""
    data = parse_object(read_text(path, MAXIMUM_HEADER_BYTES), shown_path(path))
    shard_of = data.get("weight_map")
    if not isinstance(shard_of, dict) or not shard_of:
        raise InvalidFileError([f"{path}: expected an object weight_map that names the shard of each tensor"])
    wrong = [name for name in shard_of.values() if not _is_file_name(name)]
    if wrong:
        raise InvalidFileError([f"{path}: weight_map: expected names of .safetensors files, got {wrong[0]!r:.80}"])
    metadata = data.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if total is not None and not _is_size(total):
        raise InvalidFileError([f"{path}: metadata.total_size: expected a number of bytes, got {total!r:.80}"])
    return _Index(path, shard_of, None if total is None else int(total))


def _is_file_name(name: Any) -> bool:
    return isinstance(name, str) and name.endswith(".safetensors") and not set(name) & set("/\\\0")


def _is_size(value: Any) -> bool:
    """Tell whole sizes from others; some writers state them as floats."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 2**63 and value == int(value)


def _with_stated_bytes(model: Model, index: _Index, config: Path) -> Model:
    """Return ``model`` with the bytes that the index states, for want of the shards."""
    missing = f"shards are missing ({listed(index.missing)})"
    if index.total_bytes is None:
        raise InvalidFileError([f"{index.path}: {missing}, and metadata.total_size is not stated"])
    form = _config_format(config)
    note = f"{missing}: the {index.total_bytes:,} bytes that {index.path.name} states are taken as {form}"
    storage = Storage({form: index.total_bytes}, len(index.shard_of))
    return replace(model, storage=storage, notes=(*model.notes, note))


def _config_format(config: Path) -> str:
    """Return our name of the dtype that the config says its weights are stored in, else ``unknown``."""
    data = parse_object(read_text(config), shown_path(config))
    for part in (data, data.get("text_config")):
        name = (part.get("dtype") or part.get("torch_dtype")) if isinstance(part, dict) else None
        if isinstance(name, str):
            return _TORCH_FORMATS.get(name.removeprefix("torch."), "unknown")
    return "unknown"


def _count_notes(model: Model, tensors: Sequence[StoredTensor]) -> Iterable[str]:
    """Yield how the stored parameters differ from those of the config."""
    packed = sorted({tensor.format for tensor in tensors} & _PACKED_FORMATS)
    if packed:
        yield f"parameters are not compared: tensors in {', '.join(packed)} may be packed quantised weights"
        return
    buffers = [tensor for tensor in tensors if _is_buffer(tensor)]
    if buffers:
        elements = sum(tensor.elements for tensor in buffers)
        names = listed([tensor.name for tensor in buffers])
        yield f"tensors that are not parameters are counted separately: {names}, {elements:,} elements"
    stored = sum(tensor.elements for tensor in tensors) - sum(tensor.elements for tensor in buffers)
    head = f"{model.spec.names.head}.weight"
    copies = [tensor for tensor in tensors if tensor.name == head] if model.spec.tie_word_embeddings else []
    for tensor in copies:
        stored -= tensor.elements
        yield f"{head} is tied to the embedding and stored a second time ({tensor.elements:,} elements)"
    expected = parameter_count(model.inventory)
    if stored != expected:
        more = "more" if stored > expected else "fewer"
        difference = f"{abs(stored - expected):,} {more} than the {expected:,} of the config"
        yield f"the files hold {stored:,} parameters, {difference}"


def _is_buffer(tensor: StoredTensor) -> bool:
    # GPT-2's causal mask is called attn.bias and has four dimensions; a real bias has one.
    mask = tensor.name.endswith(".bias")
    return bool(_BUFFER.fullmatch(tensor.name)) and (not mask or len(tensor.shape) == 4)
