"""The catalog's entries as frozen values; their annotations are the schema of the data files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from fractions import Fraction
from typing import Any, Literal

from memplan.units import ceil_div

Kind = Literal["exact", "derived", "stated", "measured"]

Implementation = Literal[
    "adam_mini.Adam_mini",
    "bitsandbytes.optim.AdamW8bit",
    "lion_pytorch.Lion",
    "memplan.muon.Muon",
    "none",
    "torch.optim.Adafactor",
    "torch.optim.AdamW",
    "torch.optim.SGD",
    "untraced",
]
"""Classes whose updates are modelled; ``untraced``: no update is, and answers say so; ``none``: there is none."""

Codec = Literal["iq2-s", "iq2-xs", "iq2-xxs", "iq3-xxs", "q4-0", "q8-0"]
"""What codes weights again after an update (memplan/muon/weights/weight_codecs.py)."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a figure was read, and when.

    Attributes:
        url: Primary source: datasheet, paper, header file, log of a run.
        checked: Date of the check, ``YYYY-MM-DD``.
        covers: Keys of the entry that this source supports; empty for all of them.
    """

    url: str
    checked: str
    covers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Interconnect:
    """Link to other devices; bytes per second in one direction."""

    kind: str
    bytes_per_second: int


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as one device.

    Attributes:
        memory_bytes: Total memory as the driver reports it (NVML).
        cuda_total_bytes: Total memory as CUDA reports it to a program; the usable bytes.
        dense_flops: Floating-point operations per second without sparsity, by dtype.
        unified_memory: Memory is shared with the CPU.
    """

    name: str
    vendor: Literal["nvidia", "amd", "apple"]
    architecture: str
    memory_bytes: int
    memory_kind: Literal["measured", "stated"]
    cuda_total_bytes: int
    cuda_total_kind: Literal["measured", "stated", "derived"]
    bandwidth_bytes_per_second: int
    dense_flops: Mapping[str, int]
    interconnect: Interconnect
    unified_memory: bool
    sources: tuple[Source, ...]
    compute_capability: str | None = None
    aliases: tuple[str, ...] = ()
    notes: str = ""


@dataclass(frozen=True, slots=True)
class StorageFormat:
    """How numbers are stored: ``block_elements`` of them in ``block_bytes``.

    Attributes:
        blocking: ``row``: blocks lie within rows of a matrix, whose width must divide into
            them (GGML); ``tensor``: blocks run over the flattened tensor.
        tensor_bytes: Bytes once per tensor, such as a scale.
        ggml_type: Id of the type in GGUF files.
        storable: False for formats that exist only during computation.
        codec: What codes weights again after an update; block formats without one can only be frozen.
    """

    title: str
    block_elements: int
    block_bytes: int
    description: str
    sources: tuple[Source, ...]
    kind: Kind = "exact"
    blocking: Literal["row", "tensor"] = "row"
    tensor_bytes: int = 0
    ggml_type: int | None = None
    storable: bool = True
    codec: Codec | None = None
    aliases: tuple[str, ...] = ()

    @property
    def bytes_per_element(self) -> Fraction:
        """Bytes of one element in a full block."""
        return Fraction(self.block_bytes, self.block_elements)

    def tensor_storage_bytes(self, elements: int) -> int:
        """Return the bytes of a tensor: whole blocks, and what it has once.

        Formula:
            ``ceil(elements / block_elements) * block_bytes + tensor_bytes``
        """
        return ceil_div(elements, self.block_elements) * self.block_bytes + self.tensor_bytes


@dataclass(frozen=True, slots=True)
class GradientDtype:
    """How a gradient is stored between backward and step."""

    title: str
    element_bytes: int
    description: str
    sources: tuple[Source, ...]
    tensor_bytes: int = 0
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StateSlot:
    """One tensor that an optimizer keeps for each parameter tensor.

    Attributes:
        name: Its key in ``optimizer.state``.
        layout: ``elementwise``: one number per parameter; ``rows``: one per row and leading
            dimension; ``columns``: one per column and leading dimension; ``scalar``: one per tensor.
        block_elements: Numbers per block, for elementwise slots.
        block_bytes: Bytes per block; of one number where blocks have one element.
        tensor_bytes: Bytes once per tensor, such as a lookup table.
        device: Where it lies; scalars of for-loop and foreach optimizers lie on the host.
        as_parameter: Numbers are stored as the parameter's own are; ``block_bytes`` is ignored.
        dimensions: Whether only tensors of one dimension hold it, or only those of more.
    """

    name: str
    block_elements: int = 1
    block_bytes: int = 4
    layout: Literal["elementwise", "rows", "columns", "scalar"] = "elementwise"
    tensor_bytes: int = 0
    device: Literal["device", "host", "device-if-fused"] = "device"
    as_parameter: bool = False
    dimensions: Literal["any", "one", "more"] = "any"


@dataclass(frozen=True, slots=True)
class Optimizer:
    """What an optimizer keeps, and for which tensors it keeps something else.

    Attributes:
        algorithm: Family of update rules.
        slots: State tensors of each parameter tensor.
        takes: ``all`` tensors, or only ``matrices`` (Muon), the rest going elsewhere.
        rest: Optimizer of the tensors that it does not take.
        exempt_below: Tensors with fewer elements keep ``exempt_slots`` instead.
        exempt_unless_multiple: Tensors whose size is no multiple keep ``exempt_slots`` instead.
        exempt_slots: State tensors of exempt tensors.
        shared_bytes: Bytes once per optimizer, such as lookup tables.
        implementation: The class whose update is planned and traced; without one a setup is refused.
        step: How an update runs: ``torch`` follows the kernel profile, ``tensor`` goes tensor
            by tensor in bounded chunks, ``in-place`` needs no temporaries.
        status: How it fares in training.
        evidence: The record in ``configs/evidence/`` that says so.
    """

    title: str
    algorithm: Literal["sgd", "adamw", "adafactor", "lion", "adam-mini", "muon"]
    description: str
    slots: tuple[StateSlot, ...]
    sources: tuple[Source, ...]
    implementation: Implementation | None = None
    step: Literal["torch", "tensor", "in-place"] = "torch"
    takes: Literal["all", "matrices"] = "all"
    rest: str | None = None
    exempt_below: int = 0
    exempt_unless_multiple: int = 1
    exempt_slots: tuple[StateSlot, ...] = ()
    shared_bytes: int = 0
    status: Literal["proven", "works", "experimental", "diverges"] = "works"
    evidence: str | None = None
    validated: bool = False
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Published:
    """A total that someone else published for a model."""

    parameters: int
    exact: bool
    note: str = ""


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A released model: the keys of its config that shape it, and its expected totals."""

    title: str
    architecture: str
    hf_id: str
    expected_parameters: int
    config: Mapping[str, Any]
    sources: tuple[Source, ...]
    aliases: tuple[str, ...] = ()
    expected_active_parameters: int | None = None
    published: Published | None = None


POSITIVE = frozenset(
    ("memory_bytes", "cuda_total_bytes", "block_elements", "block_bytes", "element_bytes", "exempt_unless_multiple")
)
MAXIMUM_FIGURE = 2**60
"""Larger figures in a catalog are slips: no machine has an exbibyte, or an exaFLOP/s."""

EntryPath = tuple[str | int, ...]


def entry_problems(entry: Any, path: EntryPath = ()) -> Iterator[tuple[EntryPath, str]]:
    """Yield the figures of an entry that no arithmetic can use: (path of keys, what is expected)."""
    for field in fields(entry):
        yield from _value_problems(field.name, getattr(entry, field.name), (*path, field.name))


def _value_problems(name: str, value: Any, path: EntryPath) -> Iterator[tuple[EntryPath, str]]:
    if type(value) is int:
        least = 1 if name in POSITIVE else 0
        if not least <= value <= MAXIMUM_FIGURE:
            yield path, f"expected a whole number from {least} to 2^60, got {value}"
    elif name == "compute_capability" and value is not None and not re.fullmatch(r"[0-9]{1,3}\.[0-9]{1,3}", value):
        yield path, f"expected a version such as '9.0', got {value[:60]!r}"
    elif name == "dense_flops":
        for key, rate in value.items():
            yield from _value_problems(key, rate, (*path, key))
    elif is_dataclass(value):
        yield from entry_problems(value, path)
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from _value_problems(name, item, (*path, index))
