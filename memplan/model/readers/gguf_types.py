"""The binary layout of a GGUF header: metadata and tensor descriptions, read in bounded memory and checked.

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3).
"""

import mmap
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from memplan.documents.frozen_values import dataclass
from memplan.documents.opening import mapped, shown_path
from memplan.errors import CannotAnswerError, InvalidFileError, printable
from memplan.units import round_up

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32

MAXIMUM_KEYS = 2**16
MAXIMUM_TENSORS = 2**18
MAXIMUM_NAME_BYTES = 1024
LONGEST_PROBLEM = 400
MAXIMUM_DIMENSIONS = 4
MAXIMUM_NESTING = 8
MAXIMUM_ITEMS = 2**23
"""Strings and inner arrays that one header may hold; the largest vocabularies have 2**18 tokens."""
MAXIMUM_TEXT_BYTES = 256
MAXIMUM_ELEMENTS = 1024
MAXIMUM_TOTAL_ELEMENTS = 2**16

_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_SCALARS = {number: struct.Struct("<" + code) for number, code in _CODES.items()}
_STRING, _ARRAY = 8, 9
_U32, _U64 = _SCALARS[4], _SCALARS[10]


@dataclass(frozen=True, slots=True)
class Skipped:
    """A metadata value that is too long to read: the length of an array, the bytes of a text."""

    length: int


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor as the header describes it."""

    name: str  # Its name in the file
    dimensions: tuple[int, ...]  # Sizes, the row's length first, as GGML orders them
    type_id: int  # GGML's number of its format
    offset: int  # Where its bytes begin, counted from the start of the data

    @property
    def elements(self) -> int:
        """Elements of the tensor."""
        return prod(self.dimensions)


@dataclass(frozen=True, slots=True)
class Header:
    """What a GGUF file says of itself, before its data."""

    path: Path
    metadata: Mapping[str, Any]  # Values by key; long ones are :class:`Skipped`
    tensors: tuple[TensorInfo, ...]  # Tensors, in the order of the file
    alignment: int  # What every tensor's offset is a multiple of
    data_start: int  # Where the data begins, in bytes from the start of the file
    file_bytes: int  # Size of the file

    @property
    def has_data(self) -> bool:
        """Whether anything follows the header; headers are downloaded alone."""
        return self.file_bytes > self.data_start


def read_header(path: Path) -> Header:
    """Return the header of the GGUF file at ``path``, without touching its data.

    Raises:
        InvalidFileError: Missing, unreadable, not GGUF, cut off, or a header that cannot be true.
    """
    with mapped(path, MAGIC, "GGUF") as data:
        return _HeaderReader(path, data).header()


class _HeaderReader:
    """Walks over the header; every length is checked against the bytes that are left."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.position = len(MAGIC)
        self.items = 0
        self.elements_read = 0

    def header(self) -> Header:
        self.check_version(self.scalar(_U32))
        tensor_count, key_count = self.scalar(_U64), self.scalar(_U64)
        # The shortest tensor takes 24 bytes (length, dimensions, type, offset), the shortest key 13.
        self.check_count("tensors", tensor_count, 24, MAXIMUM_TENSORS)
        self.check_count("metadata keys", key_count, 13, MAXIMUM_KEYS)
        metadata = self.metadata(key_count)
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 0 < alignment <= 2**20 or alignment & (alignment - 1):
            raise self.error(f"general.alignment: expected a power of two, got {alignment!r}")
        tensors = tuple(self.tensor() for _ in range(tensor_count))
        return Header(self.path, metadata, tensors, alignment, round_up(self.position, alignment), self.size)

    def check_version(self, version: int) -> None:
        if version and version & 0xFFFF == 0:
            raise self.error("a big-endian GGUF file, which memplan does not read; convert it to little-endian first")
        if version not in VERSIONS:
            raise self.error(f"GGUF version {version}, of which memplan reads {' and '.join(map(str, VERSIONS))}")

    def metadata(self, count: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for _ in range(count):
            key = self.name("metadata key")
            if key in values:
                raise self.error(f"metadata key {key!r} appears twice")
            values[key] = self.value(self.scalar(_U32), key, 0)
        return values

    def tensor(self) -> TensorInfo:
        name = self.name("tensor name")
        count = self.scalar(_U32)
        if count > MAXIMUM_DIMENSIONS:
            raise self.error(f"tensor {name!r} has {count} dimensions; GGML allows {MAXIMUM_DIMENSIONS}")
        dimensions = tuple(self.scalar(_U64) for _ in range(count))
        if not all(dimensions) or prod(dimensions) >= 2**63:
            raise self.error(f"tensor {name!r} cannot have the dimensions {list(dimensions)}")
        return TensorInfo(name, dimensions, self.scalar(_U32), self.scalar(_U64))

    def value(self, kind: int, key: str, depth: int) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            length = self.length(1)
            start = self.skip(length)
            if length > MAXIMUM_TEXT_BYTES:
                return Skipped(length)
            return self.data[start : start + length].decode("utf-8", "replace")
        if kind == _ARRAY:
            return self.array(key, depth)
        raise self.error(f"{key}: unknown value type {kind}")

    def array(self, key: str, depth: int) -> tuple[Any, ...] | Skipped:
        if depth >= MAXIMUM_NESTING:
            raise self.error(f"{key}: arrays nested more than {MAXIMUM_NESTING} deep")
        kind = self.scalar(_U32)
        if kind in _SCALARS:
            return self.numbers(_SCALARS[kind])
        # A string takes at least its length of 8 bytes, an inner array its type and length.
        length = self.length(8 if kind == _STRING else 12)
        self.items += length if kind == _STRING else length * 64  # inner arrays are slow to walk, and no model has any
        if self.items > MAXIMUM_ITEMS:
            raise self.error(f"{key}: more than {MAXIMUM_ITEMS:,} array entries in one header")
        if kind == _STRING:
            self.skip_strings(length)
        elif kind == _ARRAY:
            for _ in range(length):
                self.array(key, depth + 1)
        else:
            raise self.error(f"{key}: unknown array type {kind}")
        return Skipped(length)

    def numbers(self, form: struct.Struct) -> tuple[Any, ...] | Skipped:
        count = self.length(form.size)
        start = self.skip(count * form.size)
        if count > MAXIMUM_ELEMENTS or self.elements_read + count > MAXIMUM_TOTAL_ELEMENTS:
            return Skipped(count)
        self.elements_read += count
        return tuple(item for (item,) in form.iter_unpack(self.data[start : self.position]))

    def skip_strings(self, count: int) -> None:
        """Step over ``count`` strings; a vocabulary has 10**5 of them, so this loop does as little as it can."""
        data, position, read = self.data, self.position, _U64.unpack_from
        try:
            for _ in range(count):
                position += 8 + read(data, position)[0]
        except (struct.error, OverflowError):
            position = self.size + 1
        self.skip(position - self.position)

    def name(self, what: str) -> str:
        length = self.length(1)
        if length > MAXIMUM_NAME_BYTES:
            raise self.error(f"a {what} of {length:,} bytes; at most {MAXIMUM_NAME_BYTES} are plausible")
        start = self.skip(length)
        try:
            return self.data[start : self.position].decode("utf-8")
        except UnicodeDecodeError:
            raise self.error(f"a {what} that is not UTF-8, at byte {start}") from None

    def length(self, item_bytes: int) -> int:
        """Read a length and check that so many items of at least ``item_bytes`` can follow."""
        count: int = self.scalar(_U64)
        if count * item_bytes > self.size - self.position:
            raise self.cut_off(f"a length of {count:,} at byte {self.position - 8}")
        return count

    def scalar(self, form: struct.Struct) -> Any:
        start = self.skip(form.size)
        return form.unpack_from(self.data, start)[0]

    def skip(self, count: int) -> int:
        """Step over ``count`` bytes and return where they began."""
        start = self.position
        if count > self.size - start:
            raise self.cut_off(f"{count:,} bytes wanted at byte {start}")
        self.position = start + count
        return start

    def check_count(self, what: str, count: int, item_bytes: int, maximum: int) -> None:
        if count * item_bytes > self.size - self.position:
            raise self.cut_off(f"{count:,} {what} announced")
        if count > maximum:
            raise self.error(f"{count:,} {what} announced; memplan reads at most {maximum:,}")

    def cut_off(self, detail: str) -> InvalidFileError:
        return self.error(f"cut off or damaged inside the header: {detail}, but the file has {self.size:,} bytes")

    def error(self, text: str) -> InvalidFileError:
        return InvalidFileError([f"{shown_path(self.path)}: {printable(text, LONGEST_PROBLEM)}"])


@dataclass(frozen=True, slots=True)
class GgufValues:
    """Metadata and tensors of a whole file, all its parts joined."""

    where: str  # How messages call the file
    architecture: str  # ``general.architecture``, which begins the names of the model's keys
    metadata: Mapping[str, Any]  # Values by key
    tensors: Mapping[str, TensorInfo]  # Tensors by name

    def optional(self, key: str, minimum: int = 1) -> int | None:
        """Return the integer under ``key``, or None where it is absent; a list of equal ones counts as one.

        Raises:
            CannotAnswerError: The value differs from layer to layer.
            InvalidFileError: It is no integer, or out of range.
        """
        full = f"{self.architecture}.{key}"
        value = self.metadata.get(full)
        if value is None:
            return None
        if isinstance(value, tuple) and value:
            if any(item != value[0] for item in value):
                raise CannotAnswerError(f"{self.where}: {full} differs from layer to layer, which is not modelled")
            value = value[0]
        if type(value) is not int or not minimum <= value < 2**31:
            wanted = f"expected an integer from {minimum} to 2**31"
            raise InvalidFileError([f"{self.where}: {full}: {wanted}, got {value!r:.60}"])
        return value

    def required(self, key: str) -> int:
        """Return the integer under ``key``."""
        value = self.optional(key)
        if value is None:
            raise InvalidFileError([f"{self.where}: metadata key {self.architecture}.{key} is missing"])
        return value

    def number(self, key: str) -> float | None:
        """Return the number under ``key``, or None where it is absent or none."""
        value = self.metadata.get(f"{self.architecture}.{key}")
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None

    def has(self, tensor: str) -> bool:
        """Tell whether the file holds a tensor of this name in any layer (``{}`` stands for the index)."""
        if "{}" not in tensor:
            return tensor in self.tensors
        return any(tensor.replace("{}", str(index)) in self.tensors for index in range(self.required("block_count")))

    def width(self, tensor: str) -> int | None:
        """Return the second dimension of the first layer's tensor of this name, or None."""
        for index in range(self.required("block_count")):
            info = self.tensors.get(tensor.replace("{}", str(index)))
            if info is not None and len(info.dimensions) > 1:
                return info.dimensions[1]
        return None

    @property
    def layers(self) -> int:
        """Layers without the modules for multi-token prediction, which some files count among them."""
        return self.required("block_count") - (self.optional("nextn_predict_layers", minimum=0) or 0)

    @property
    def key_length(self) -> int:
        """Width of one head."""
        return self.optional("attention.key_length") or max(
            self.required("embedding_length") // self.required("attention.head_count"), 1
        )


def text(value: Any) -> str:
    """Return a metadata text fit to print: one line without control characters; empty for anything else."""
    if not isinstance(value, str):
        return ""
    return "".join(character if character.isprintable() else " " for character in value).strip()
