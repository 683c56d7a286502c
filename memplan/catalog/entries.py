"""The catalog's entries as frozen values; their annotations are the schema of the data files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from fractions import Fraction
from typing import Any, Literal

from memplan.catalog.kernel_profiles import Feature
from memplan.documents.frozen_values import dataclass
from memplan.units import ceil_div

Kind = Literal["exact", "derived", "stated", "measured"]
Status = Literal["proven", "works", "experimental", "untried", "diverges"]
"""How training learns, as the evidence says; ``untried`` where none speaks for it."""

Form = Literal[
    "adafactor", "adafactor-fp32", "adam-mini", "adamw", "chunks", "copies", "in-place", "lion", "stacked", "torch-muon", "untraced"
]  # fmt: skip
"""Scratch memory of an update by the way in which it arises (memplan/step/states/update_algorithms.py)."""


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
    """Link to other devices; bytes per second in one direction.

    Attributes:
        kind: One of configs/links.yaml, or another with a ``host``.
        host: Link to the host, one of configs/links.yaml; by default that of the kind.
        network: What joins nodes of its vendor's reference system, one port for each GPU; one of configs/networks.yaml.
    """

    kind: str
    bytes_per_second: int
    host: str | None = None
    network: str | None = None


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

    @classmethod
    def of_memory(cls, name: str, size: int, kind: Literal["measured", "stated"], capability: str | None = None) -> Gpu:
        """Return a GPU that is in no catalog, of which little but the memory in bytes is known."""
        return cls(
            name=name,
            vendor="nvidia",
            architecture="unknown",
            memory_bytes=size,
            memory_kind=kind,
            cuda_total_bytes=size,
            cuda_total_kind=kind,
            bandwidth_bytes_per_second=0,
            dense_flops={},
            interconnect=Interconnect("unknown", 0),
            unified_memory=False,
            sources=(),
            compute_capability=capability,
        )


@dataclass(frozen=True, slots=True)
class CodecScratch:
    """Scratch memory of a codec.

    Attributes:
        coding_bytes: For each block while codes are sought, with stochastic rounding.
        blocks_at_once: Blocks whose codes are sought together.
        decoding_bytes: For each block while it is decoded.
        once_bytes: Once while anything is decoded.
        table_bytes: Tables in fp32 that codes point into.
    """

    coding_bytes: int
    blocks_at_once: int
    decoding_bytes: int
    once_bytes: int = 0
    table_bytes: int = 0


@dataclass(frozen=True, slots=True)
class StorageFormat:
    """How numbers are stored: ``block_elements`` of them in ``block_bytes``.

    Attributes:
        blocking: ``row``: blocks lie within rows, whose width must divide into them (GGML); ``tensor``: over the flattened tensor.
        tensor_bytes: Bytes once per tensor, such as a scale; ``tensor_parts``: of the tensors that these are in, one by default.
        levels: Elements that share an entry and its bytes, by tensor; by default codes with one fp32 scale a block.
        coded_scale_elements: Elements that share a scale which is a code itself; 0 where scales are floats.
        decoding_temporaries: For each block, every temporary as operators of torch form the copy that a product reads, and
            1 where it stays until that is there, 0 where it goes once the next is; nothing where a kernel decodes.
        row_bytes: Bytes once for each row of a matrix, such as a scale.
        product: Whether a product reads a ``decoded`` copy, or multiplies codes as ``integers``, its input coded for it;
            ``served``: the same of an engine for inference.
        ggml_type: Id of the type in GGUF files.
        storable: False for formats that exist only during computation.
        training: ``float``: a dtype of torch's own parameters; ``coded``: its codec forms it again after
            an update; ``frozen``: nothing does, and a kernel decodes it straight into the copy that is read.
        codec: Name of the codec, or ``package.module.NAME``; ``codec_scratch``: what it takes.
        needs: What a card has to be able to do for it.
    """

    title: str
    block_elements: int
    block_bytes: int
    description: str
    sources: tuple[Source, ...]
    training: Literal["float", "coded", "frozen"]
    kind: Kind = "exact"
    blocking: Literal["row", "tensor"] = "row"
    tensor_bytes: int = 0
    tensor_parts: tuple[int, ...] = ()
    levels: tuple[tuple[int, int], ...] = ()
    coded_scale_elements: int = 0
    decoding_temporaries: tuple[tuple[int, int], ...] = ()
    row_bytes: int = 0
    product: Literal["decoded", "integers"] = "decoded"
    served: Literal["decoded", "codes"] = "decoded"
    ggml_type: int | None = None
    storable: bool = True
    codec: str | None = None
    codec_scratch: CodecScratch | None = None
    needs: tuple[Feature, ...] = ()
    aliases: tuple[str, ...] = ()

    @property
    def bytes_per_element(self) -> Fraction:
        """Bytes of one element in a full block."""
        return Fraction(self.block_bytes, self.block_elements)

    def level_sizes(self, elements: int) -> tuple[int, ...]:
        """Return the bytes of codes, scales and scales of scales, tensors of their own, each rounded up.

        Formula:
            ``ceil(n c / block_elements)``, ``4 ceil(n / block_elements)``, ``ceil(n / s)`` and ``tensor_bytes``: ``c`` bytes of
            codes in a block with one fp32 scale, and one byte more for every ``s`` elements where those have scales as codes;
            or ``b ceil(n / e)`` for each level that is said, of ``b`` bytes for ``e`` elements.
        """
        if self.blocking != "tensor":
            return (self.tensor_storage_bytes(elements),)
        once = self.tensor_parts or (self.tensor_bytes,)
        if self.levels:
            return *[size * ceil_div(elements, each) for each, size in self.levels], *once
        each = self.coded_scale_elements
        codes = self.block_bytes - 4 - (self.block_elements // each if each else 0)
        scales = 4 * ceil_div(elements, self.block_elements), ceil_div(elements, each) if each else 0
        return ceil_div(elements * codes, self.block_elements), *scales, *once

    def level_bytes(self, elements: int) -> int:
        """Return the bytes of a tensor that is stored by levels."""
        return sum(self.level_sizes(elements))

    def tensor_storage_bytes(self, elements: int) -> int:
        """Return the bytes of a tensor: whole blocks, and what it has once.

        Formula:
            ``ceil(elements / block_elements) * block_bytes + tensor_bytes``
        """
        return ceil_div(elements, self.block_elements) * self.block_bytes + self.tensor_bytes


@dataclass(frozen=True, slots=True)
class GradientDtype:
    """How a gradient is stored between backward and step, and what a card ``needs`` to be able to do for it."""

    title: str
    element_bytes: int
    description: str
    sources: tuple[Source, ...]
    tensor_bytes: int = 0
    needs: tuple[Feature, ...] = ()
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StateSlot:
    """One tensor that an optimizer keeps for each parameter tensor.

    Attributes:
        name: Its key in ``optimizer.state``.
        layout: ``elementwise``: one number per parameter; ``rows``, ``columns``: one per row, or column, and leading
            dimension; ``longer``: the one of these of which there are more; ``scalar``: one per tensor.
        block_elements, block_bytes: Numbers and bytes of a block, for elementwise slots; of one number where that is a block.
        tensor_bytes: Bytes once per tensor, such as a lookup table.
        device: Where it lies: scalars of for-loop and foreach optimizers on the host, as do ``paged`` states of large tensors.
        as_parameter: Numbers are stored as the parameter's own are; ``block_bytes`` is ignored.
        dimensions: Whether only tensors of one dimension hold it, or only those of more.
        scale_bytes: Of a block, bytes that are its scale: a tensor of its own.
        codebook_bytes: Of the table that 32-bit codes point into and of the bounds of its levels; 0 where these are even.
    """

    name: str
    block_elements: int = 1
    block_bytes: int = 4
    layout: Literal["elementwise", "rows", "columns", "longer", "scalar"] = "elementwise"
    tensor_bytes: int = 0
    device: Literal["device", "host", "device-if-fused", "paged"] = "device"
    as_parameter: bool = False
    dimensions: Literal["any", "one", "more"] = "any"
    scale_bytes: int = 4
    codebook_bytes: int = 0


@dataclass(frozen=True, slots=True)
class UpdateScratch:
    """Scratch memory of an update.

    Attributes:
        form: How it arises.
        all_tensors: Copies of all trained tensors that are there at once, of form ``copies``.
        largest_tensor: Copies of one tensor at a time, of form ``copies``.
    """

    form: Form
    all_tensors: int = 0
    largest_tensor: int = 0


@dataclass(frozen=True, slots=True)
class Optimizer:
    """What an optimizer keeps, and for which tensors it keeps something else.

    Attributes:
        algorithm: What people call the update rule; nothing is computed from it.
        slots: State tensors of each parameter tensor.
        takes: ``all`` tensors, or only ``matrices`` (Muon), the rest going elsewhere.
        rest: Optimizer of the tensors that it does not take.
        exempt_below, exempt_unless_multiple: Tensors with fewer elements, or whose size is no multiple, keep ``exempt_slots``.
        exempt_slots: State tensors of exempt tensors.
        shared_bytes: Bytes once per optimizer, such as lookup tables.
        scratch: What an update allocates beyond what it keeps.
        implementation: The class that is traced; ``untraced``: none is, and answers say so; ``none``:
            there is no update.
        step: Kernel family: ``torch`` follows the kernel profile, ``tensor`` goes tensor by tensor,
            ``in-place`` needs no temporaries.
        options: Options of the class that shape its memory; decimals as text.
        bundled: The update rule of the bundled optimizer that steps the same, which alone takes coded
            weights, narrow gradients and states in host memory.
        steps_shards: Whether its class keeps coded states of the rows that ``fully_shard`` leaves a rank, and steps them.
        searched: Whether ``suggest`` considers it.
        status, evidence: How training with it learns, and the record in ``configs/evidence/`` that says so.
        needs: What a card has to be able to do for it.
    """

    title: str
    algorithm: str
    description: str
    slots: tuple[StateSlot, ...]
    sources: tuple[Source, ...]
    scratch: UpdateScratch
    implementation: str
    step: Literal["torch", "tensor", "in-place"]
    options: Mapping[str, bool | int | str] = field(default_factory=dict)
    bundled: Literal["adamw", "muon"] | None = None
    steps_shards: bool = False
    searched: bool = False
    takes: Literal["all", "matrices"] = "all"
    rest: str | None = None
    exempt_below: int = 0
    exempt_unless_multiple: int = 1
    exempt_slots: tuple[StateSlot, ...] = ()
    shared_bytes: int = 0
    status: Status = "untried"
    evidence: str | None = None
    validated: bool = False
    needs: tuple[Feature, ...] = ()
    aliases: tuple[str, ...] = ()

    @property
    def orthogonalises(self) -> bool:
        """Whether the bundled optimizer runs Newton-Schulz on its matrices, as Muon does."""
        return self.bundled == "muon"


@dataclass(frozen=True, slots=True)
class Published:
    """A total that someone else published for a model."""

    parameters: int
    exact: bool
    note: str = ""


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A released model: the keys of its config that shape it, and its expected totals.

    Attributes:
        hf_id: Its published id, of the base model where there are several.
        ids: Ids of the same publisher's with the same shapes: instruction-tuned ones, say.
        mirrors: Other publishers' ids with the same shapes: copies, quantised uploads, fine-tunes.
        tuned: Ids of fine-tunes by what their pages say: a guess, since they may have other rows of tokens.
        released, released_weights: Day or month of the release, and how weights are stored there (``--weights``), bf16 if unsaid.
    """

    title: str
    architecture: str
    hf_id: str
    expected_parameters: int
    config: Mapping[str, Any]
    sources: tuple[Source, ...]
    aliases: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()
    mirrors: tuple[str, ...] = ()
    tuned: tuple[str, ...] = ()
    released: str | None = None
    released_weights: str | None = None
    expected_active_parameters: int | None = None
    published: Published | None = None
