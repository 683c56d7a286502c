"""The header of one safetensors file, checked against the file's size.

Layout: https://github.com/huggingface/safetensors (README, "Format"): eight bytes of header length, little-endian,
a JSON header, then the data without gaps.
"""

import os
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from memplan.documents.frozen_values import dataclass
from memplan.documents.opening import opened, shown_path
from memplan.documents.strict_json import parse_object
from memplan.errors import InvalidFileError

MAXIMUM_HEADER_BYTES = 100_000_000
"""The format's own limit (``MAX_HEADER_SIZE`` in safetensors/src/tensor.rs)."""

DTYPES: Mapping[str, tuple[str, int]] = {
    "BF16": ("bf16", 16),
    "BOOL": ("bool", 8),
    "C64": ("complex64", 64),
    "F16": ("fp16", 16),
    "F32": ("fp32", 32),
    "F4": ("fp4-e2m1", 4),
    "F64": ("fp64", 64),
    "F6_E2M3": ("fp6-e2m3", 6),
    "F6_E3M2": ("fp6-e3m2", 6),
    "F8_E4M3": ("fp8-e4m3", 8),
    "F8_E4M3FNUZ": ("fp8-e4m3fnuz", 8),
    "F8_E5M2": ("fp8-e5m2", 8),
    "F8_E5M2FNUZ": ("fp8-e5m2fnuz", 8),
    "F8_E8M0": ("fp8-e8m0", 8),
    "I16": ("int16", 16),
    "I32": ("int32", 32),
    "I64": ("int64", 64),
    "I8": ("int8", 8),
    "U16": ("uint16", 16),
    "U32": ("uint32", 32),
    "U64": ("uint64", 64),
    "U8": ("uint8", 8),
}
"""Our names and the bits per element of the dtypes that a header may name."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a safetensors file."""

    name: str  # Its name in the file
    format: str  # Our name of its dtype (``bf16``, ``uint8``, ...)
    shape: tuple[int, ...]  # Dimensions as stored
    stored_bytes: int  # Bytes of its data

    @property
    def elements(self) -> int:
        """Elements as stored; of packed quantised tensors fewer than they stand for."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class FileHeader:
    """Tensors of one file, in the order of their data; ``has_data`` is false for a header alone."""

    tensors: tuple[StoredTensor, ...]
    has_data: bool


def read_header(path: Path) -> FileHeader:
    """Return what the safetensors file at ``path`` stores, without reading its data.

    A file that ends with its header, as a download of the first bytes leaves it, is read as well.

    Raises:
        InvalidFileError: Unreadable, damaged, cut off or contradictory; all problems are listed.
    """
    text, data_bytes = _header_text(path)
    header = parse_object(text, f"{shown_path(path)}: header")
    header.pop("__metadata__", None)
    ranges: list[tuple[int, int, StoredTensor]] = []
    problems: list[str] = []
    for name, entry in header.items():
        parsed = _entry(name, entry)
        if isinstance(parsed, str):
            problems.append(f"{path}: tensor {name!r:.80}: {parsed}")
        else:
            ranges.append(parsed)
    ranges.sort(key=lambda item: item[:2])
    problems = problems or _gaps(path, ranges, data_bytes)
    if problems:
        raise InvalidFileError(problems)
    return FileHeader(tuple(tensor for _, _, tensor in ranges), data_bytes > 0)


def _header_text(path: Path) -> tuple[str, int]:
    """Return the JSON text of the header and how many bytes follow it."""
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > size - 8:
            detail = f"a header of {length:,} bytes, and the file has {size:,}"
            raise InvalidFileError([f"{shown_path(path)}: cut off, or no safetensors file: {detail}"])
        if length > MAXIMUM_HEADER_BYTES:
            detail = f"a header of {length:,} bytes; the format allows {MAXIMUM_HEADER_BYTES:,}"
            raise InvalidFileError([f"{shown_path(path)}: {detail}"])
        raw = file.read(length)
    try:
        return raw.decode("utf-8"), size - 8 - length
    except UnicodeDecodeError as error:
        problem = f"header is not UTF-8 (byte {error.start}); no safetensors file?"
        raise InvalidFileError([f"{shown_path(path)}: {problem}"]) from None


def _entry(name: str, entry: Any) -> tuple[int, int, StoredTensor] | str:
    """Return a tensor with its range, or what is wrong with its entry."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        return f"expected dtype, shape and data_offsets, got {entry!r:.80}"
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        return f"unknown dtype {dtype!r:.40}"
    if not _sizes(shape) or prod(shape) >= 2**63:
        return f"expected a shape of whole numbers, got {shape!r:.80}"
    if not _sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        return f"expected two data_offsets in order, got {offsets!r:.80}"
    form, bits = DTYPES[dtype]
    stored_bits, stored_bytes = prod(shape) * bits, offsets[1] - offsets[0]
    if stored_bits != 8 * stored_bytes:
        return f"{dtype} of shape {shape!r:.80} takes {stored_bits:,} bits, and its range has {8 * stored_bytes:,}"
    return offsets[0], offsets[1], StoredTensor(name, form, tuple(shape), stored_bytes)


def _sizes(value: Any) -> bool:
    """Tell lists of sizes, of no more dimensions than any tensor has, from other values."""
    return (
        isinstance(value, list)
        and len(value) <= 64
        and all((type(item) is int and 0 <= item < 2**63) for item in value)
    )


def _gaps(path: Path, ranges: Sequence[tuple[int, int, StoredTensor]], data_bytes: int) -> list[str]:
    """Return where the ranges leave gaps, overlap, or miss the end of the file."""
    problems = []
    end = 0
    for start, stop, tensor in ranges:
        if start != end:
            where = f"{path}: tensor {tensor.name!r:.80}"
            problems.append(f"{where} begins at {start:,}, but the one before it ends at {end:,}")
        end = max(end, stop)
    if not problems and data_bytes and end != data_bytes:
        problems.append(f"{path}: tensors take {end:,} bytes, and {data_bytes:,} follow the header: cut off or wrong")
    return problems


def listed(names: Sequence[str]) -> str:
    """Return the first names as one text that is fit to print."""
    shown = ", ".join(f"{name:.80}" if name.isprintable() else f"{name!r:.80}" for name in names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown
