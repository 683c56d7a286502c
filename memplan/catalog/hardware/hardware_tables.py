"""What cards can do and what is taken on them: tables, each read when it is first asked for."""

from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Literal, TypeVar

from memplan.catalog.entries import Gpu, Source
from memplan.catalog.shipped_tables import table_of
from memplan.documents.frozen_values import dataclass

T = TypeVar("T")

UNKNOWN = "unknown"
"""Entry for cards of which no architecture is known."""


@dataclass(frozen=True, slots=True)
class ContextMeasurement:
    """What one process held outside torch's allocator."""

    in_use: str  # What the process held; bytes with their unit, as its source prints them
    # ``whole`` run of a network, ``bare`` process, or all that a ``device`` held.
    run: Literal["whole", "bare", "device"]
    # A ``record`` of this project, what nvidia-smi (``smi``) showed, or an out-of-memory ``message``.
    how: Literal["record", "smi", "message"]
    card: str  # As its owner names it
    url: str
    checked: str
    allocated: str = "0 MiB"  # What torch had handed out
    unallocated: str = "0 MiB"  # What torch held besides
    driver: str = ""
    toolkit: str = ""
    torch: str = ""


@dataclass(frozen=True, slots=True)
class ContextEntry:
    """Measurements on cards of one compute capability or architecture."""

    measured: tuple[ContextMeasurement, ...]
    like: str = ""  # Entry whose measurements stand for this one, or nothing
    note: str = ""  # Why they do


@dataclass(frozen=True, slots=True)
class BlasWorkspace:
    """Workspace of matrix products, for one handle and stream."""

    handle_bytes: int
    source: str
    engine_bytes: int = (
        32 * 1024 * 1024 + 1024
    )  # The same of Transformer Engine's products (cpp_extensions/gemm.py, 2.20.2)


@dataclass(frozen=True, slots=True)
class Communicator:
    """Buffers of one communicator on each GPU: as measured, and the most reported."""

    expected_bytes: int
    most_bytes: int
    note: str
    sources: tuple[Source, ...]


@dataclass(frozen=True, slots=True)
class CapabilityRow:
    """How some cards do something."""

    vendor: Literal["nvidia", "amd", "apple"]
    # ``native``; ``emulated``, in another way, which ``text`` says; ``absent``, not at all.
    answer: Literal["native", "emulated", "absent"]
    least: str = ""  # Least compute capability, or nothing for any
    most: str = ""  # The same at the other end
    architectures: tuple[str, ...] = ()  # Beginnings of architectures, or none for any
    text: str = ""  # What happens instead, or why not
    instead: str = ""  # What to set instead


@dataclass(frozen=True, slots=True)
class Capability:
    """Something that cards can do or not, the first row that a card falls under counting."""

    description: str
    rows: tuple[CapabilityRow, ...]
    sources: tuple[Source, ...]


@dataclass(frozen=True, slots=True)
class HardwareTables:
    """Tables in ``configs/hardware``."""

    root: str  # Folder of the shipped data

    @property
    def contexts(self) -> Mapping[str, ContextEntry]:
        """Device contexts by compute capability or architecture."""
        return _table(self.root, "contexts", ContextEntry)

    @property
    def capabilities(self) -> Mapping[str, Capability]:
        """What cards can do."""
        return _table(self.root, "capabilities", Capability)

    @property
    def workspaces(self) -> Mapping[str, BlasWorkspace]:
        """Workspaces of cuBLAS and hipBLAS."""
        return _table(self.root, "workspaces", BlasWorkspace)

    @property
    def communicators(self) -> Mapping[str, Communicator]:
        """Buffers of NCCL and RCCL."""
        return _table(self.root, "communicators", Communicator)


@lru_cache(maxsize=32)
def _table(root: str, name: str, cls: type[T]) -> Mapping[str, T]:
    return table_of(Path(root), name, cls)


def hardware_tables(root: Path) -> HardwareTables:
    """Return the tables below a folder."""
    return HardwareTables(str(root))


def entry_name(gpu: Gpu, names: Collection[str]) -> str:
    """Return the entry that a card falls under: the most particular of ``names``, or ``unknown``.

    Example:
        >>> gpu = Gpu.of_memory("some card", 2**34, "stated", "8.7")
        >>> entry_name(gpu, ["nvidia", "sm-8.0", "sm-8.6", "sm-9.0"]), entry_name(gpu, ["nvidia", "sm-9"])
        ('sm-8.6', 'nvidia')
    """
    return next((name for name in _candidates(gpu) if name in names), UNKNOWN)


def _candidates(gpu: Gpu) -> Iterator[str]:
    """Yield the names that an entry for a card may have, the most particular first."""
    if gpu.compute_capability:
        major, minor = capability(gpu.compute_capability)
        yield from (f"sm-{major}.{lower}" for lower in range(minor, -1, -1))
        yield f"sm-{major}"
        yield gpu.vendor
    elif gpu.vendor != "nvidia":
        yield gpu.architecture
        yield gpu.architecture.rstrip("0123456789.")
        yield gpu.vendor


def capability(version: str) -> tuple[int, int]:
    """Return a compute capability as numbers that can be compared.

    Example:
        >>> capability("12.0") > capability("9.0")
        True
    """
    major, _, minor = version.partition(".")
    return int(major), int(minor or 0)


NOT_JUDGED = CapabilityRow("nvidia", "native")
"""Of a card that nothing is known of, nothing is refused."""


def capability_of(gpu: Gpu, feature: str, tables: HardwareTables) -> CapabilityRow:
    """Return how a card does something.

    Args:
        feature: An entry of ``configs/hardware/capabilities.yaml``.

    Example:
        >>> from memplan.library.lookup import open_catalog
        >>> from memplan.catalog.hardware.hardware_tables import hardware_tables
        >>> catalog = open_catalog(None)
        >>> [capability_of(catalog.gpus[name], "bf16", hardware_tables(catalog.root)).answer for name in ("t4", "a100")]
        ['emulated', 'native']
    """
    return next((row for row in tables.capabilities[feature].rows if _is_about(row, gpu)), NOT_JUDGED)


def is_native(gpu: Gpu, feature: str, tables: HardwareTables) -> bool:
    """Tell whether a card does something itself; one that is not judged is taken to."""
    return capability_of(gpu, feature, tables).answer == "native"


def _is_about(row: CapabilityRow, gpu: Gpu) -> bool:
    if row.vendor != gpu.vendor:
        return False
    if row.architectures:
        return gpu.architecture.startswith(row.architectures)
    if not (row.least or row.most):
        return gpu.vendor != "nvidia" or gpu.compute_capability is not None
    if gpu.compute_capability is None:
        return False
    version = capability(gpu.compute_capability)
    return (not row.least or capability(row.least) <= version) and (not row.most or version <= capability(row.most))
