"""A GGUF file, whole or split, as a model with the exact bytes that it stores."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from memplan.documents.frozen_values import dataclass
from memplan.documents.opening import is_file
from memplan.errors import CannotAnswerError, InvalidFileError
from memplan.model.inventory import parameter_count
from memplan.model.model import Model, Storage
from memplan.model.parameter_tensors import inventory_of
from memplan.model.readers.gguf_config import TIED_ALWAYS, config_of
from memplan.model.readers.gguf_types import GgufValues, Header, TensorInfo, read_header, text
from memplan.units import ceil_div

_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)

_NO_PARAMETERS = re.compile(
    r"rope_freqs\.weight|.*rope_factors_(long|short)\.weight|.*\.exp_probs_b\.bias|.*\.(input_)?scale", re.DOTALL
)
"""Tensors that a file holds beside the parameters: tables for rotary embeddings, the offsets that steer
DeepSeek-V3's choice of experts (a buffer, which no gradient reaches), scales of NVFP4 tensors."""

_REMOVED_TYPES = {4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4"}

_UNQUANTISED = frozenset({"fp64", "fp32", "fp16", "bf16"})


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """A storage format as the reader needs it: ``block_elements`` elements take ``block_bytes`` bytes."""

    name: str
    block_elements: int
    block_bytes: int


def read_gguf(path: Path, layouts: Mapping[int, BlockLayout]) -> Model:
    """Return the model in the GGUF file at ``path``; of a split file, any part will do.

    A file that ends with its header, as a download of the first bytes leaves it, is read with a note.

    Args:
        path: The file, or any part of a split one.
        layouts: Storage formats by GGML's type number.

    Raises:
        InvalidFileError: Unreadable, damaged, cut off, contradictory, or a part is missing.
        CannotAnswerError: A sound file of something that memplan does not model.
    """
    from memplan.model.families import read_config

    headers = _parts(path)
    metadata = headers[0].metadata
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or not architecture:
        raise InvalidFileError([f"{path}: no general.architecture in its metadata; is it the first part of a model?"])
    kind = metadata.get("general.type", "model")
    if kind != "model":
        raise CannotAnswerError(f"{path}: not a model: general.type is {kind!r:.60}")
    tensors: dict[str, TensorInfo] = {}
    problems = []
    for header in headers:
        for tensor in header.tensors:
            if tensor.name in tensors:
                problems.append(f"{header.path}: tensor {tensor.name!r:.80} appears twice")
            tensors[tensor.name] = tensor
    if problems:
        raise InvalidFileError(problems)
    sizes = _checked_sizes(headers, layouts)
    if not tensors:
        raise CannotAnswerError(f"{path}: the file holds no tensors, only metadata (a vocabulary?)")
    values = GgufValues(str(path), architecture, metadata, tensors)
    spec, notes = read_config(config_of(values), _name(path, metadata), str(path))
    inventory = inventory_of(spec)
    storage = Storage(_bytes_by_format(sizes, tensors, layouts), len(tensors))
    notes += (*_header_notes(headers), *_count_notes(values, parameter_count(inventory)))
    return Model(spec, inventory, str(path), _quantization(storage), storage, notes)


def tensor_bytes(tensor: TensorInfo, layout: BlockLayout) -> int:
    """Return the bytes that a tensor takes.

    Formula:
        ``ceil(elements / block_elements) * block_bytes``; rows are whole blocks, so nothing is rounded.

    Source:
        https://github.com/ggml-org/ggml/blob/master/src/ggml.c (``ggml_row_size``).

    Example:
        >>> tensor_bytes(TensorInfo("t", (4096, 2), 2, 0), BlockLayout("q4-0", 32, 18))
        4608
    """
    return ceil_div(tensor.elements, layout.block_elements) * layout.block_bytes


def _parts(path: Path) -> tuple[Header, ...]:
    """Return the headers of all parts of the file, in order."""
    header = read_header(path)
    count = _split(header, "split.count", 0)
    if count <= 1:
        return (header,)
    match = _PART.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        raise InvalidFileError(
            [f"{path}: one of {count} parts, whose names must end in -00001-of-{count:05}.gguf and so on"]
        )
    paths = [path.with_name(f"{match['stem']}-{number + 1:05}-of-{count:05}.gguf") for number in range(count)]
    missing = [part.name for part in paths if not is_file(part)]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise InvalidFileError([f"{path}: parts of the model are missing: {', '.join(missing[:3])}{more}"])
    headers = tuple(header if part == path else read_header(part) for part in paths)
    _check_parts(headers, count)
    return headers


def _check_parts(headers: Sequence[Header], count: int) -> None:
    problems = []
    for number, header in enumerate(headers):
        position = (_split(header, "split.no", -1), _split(header, "split.count", 0))
        if position != (number, count):
            problems.append(
                f"{header.path}: says it is part {position[0] + 1} of {position[1]}, not {number + 1} of {count}"
            )
    total = sum(len(header.tensors) for header in headers)
    expected = _split(headers[0], "split.tensors.count", total)
    if total != expected:
        problems.append(f"{headers[0].path}: announces {expected:,} tensors, and its parts hold {total:,}")
    if problems:
        raise InvalidFileError(problems)


def _split(header: Header, key: str, default: int) -> int:
    value = header.metadata.get(key, default)
    if type(value) is not int or not -1 <= value <= 99_999:
        raise InvalidFileError([f"{header.path}: {key}: expected an integer up to 99999, got {value!r:.60}"])
    return value


def _name(path: Path, metadata: Mapping[str, Any]) -> str:
    match = _PART.fullmatch(path.name)
    return text(metadata.get("general.name")) or (match["stem"] if match else path.stem)


def _checked_sizes(headers: Iterable[Header], layouts: Mapping[int, BlockLayout]) -> dict[str, int]:
    """Return the bytes of every tensor, each checked to lie inside its file and beside the others."""
    sizes: dict[str, int] = {}
    problems: list[str] = []
    for header in headers:
        for tensor in header.tensors:
            problem = _layout_problem(tensor, layouts)
            if problem:
                problems.append(f"{header.path}: tensor {tensor.name!r:.80} {problem}")
            else:
                sizes[tensor.name] = tensor_bytes(tensor, layouts[tensor.type_id])
        if not problems:
            problems += _position_problems(header, sizes)
    if problems:
        raise InvalidFileError(problems)
    return sizes


def _layout_problem(tensor: TensorInfo, layouts: Mapping[int, BlockLayout]) -> str:
    layout = layouts.get(tensor.type_id)
    if layout is None:
        removed = _REMOVED_TYPES.get(tensor.type_id)
        return f"has type {removed}, which GGUF no longer allows" if removed else f"has unknown type {tensor.type_id}"
    row = tensor.dimensions[0] if tensor.dimensions else 1
    if row % layout.block_elements:
        return f"has rows of {row:,} elements, which {layout.name} blocks of {layout.block_elements} do not divide"
    return ""


def _position_problems(header: Header, sizes: Mapping[str, int]) -> list[str]:
    problems = []
    end = 0
    for tensor in sorted(header.tensors, key=lambda item: item.offset):
        where = f"{header.path}: tensor {tensor.name!r:.80}"
        if tensor.offset % header.alignment:
            problems.append(f"{where} begins at {tensor.offset:,}, which is no multiple of {header.alignment}")
        if tensor.offset < end:
            problems.append(f"{where} overlaps the one before it")
        end = tensor.offset + sizes[tensor.name]
        if header.has_data and header.data_start + end > header.file_bytes:
            problems.append(
                f"{where} ends at byte {header.data_start + end:,}, and the file has {header.file_bytes:,}: "
                "the file is cut off or its header is wrong"
            )
    return problems


def _bytes_by_format(
    sizes: Mapping[str, int], tensors: Mapping[str, TensorInfo], layouts: Mapping[int, BlockLayout]
) -> dict[str, int]:
    totals: dict[str, int] = {}
    for name, size in sizes.items():
        form = layouts[tensors[name].type_id].name
        totals[form] = totals.get(form, 0) + size
    return dict(sorted(totals.items()))


def _quantization(storage: Storage) -> str | None:
    """Return the format that holds most bytes, if it is a quantised one."""
    largest = max(storage.bytes_by_format, key=lambda name: storage.bytes_by_format[name])
    return None if largest in _UNQUANTISED else largest


def _header_notes(headers: Sequence[Header]) -> Iterable[str]:
    bare = [header.path.name for header in headers if header.tensors and not header.has_data]
    if bare:
        yield f"only the header of {', '.join(bare[:3])} is present: sizes are taken from it"


def _count_notes(values: GgufValues, expected: int) -> Iterable[str]:
    """Yield how the parameters that the file stores differ from those that its shapes give."""
    apart = [tensor for name, tensor in values.tensors.items() if _NO_PARAMETERS.fullmatch(name)]
    if apart:
        elements = sum(tensor.elements for tensor in apart)
        first = text(apart[0].name)
        more = f" and {len(apart) - 1} more" if len(apart) > 1 else ""
        yield f"tensors that are not parameters are counted separately: {first}{more}, {elements:,} elements"
    stored = sum(tensor.elements for tensor in values.tensors.values()) - sum(tensor.elements for tensor in apart)
    head = values.tensors.get("output.weight")
    if head is not None and values.architecture in TIED_ALWAYS:
        stored -= head.elements
        yield f"the file stores the tied head a second time ({head.elements:,} elements)"
    if stored != expected:
        more = "more" if stored > expected else "fewer"
        yield (
            f"the file holds {stored:,} parameters, {abs(stored - expected):,} {more} than the {expected:,} "
            "that its shapes give"
        )
