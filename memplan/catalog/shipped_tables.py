"""Tables of figures that ship with memplan, are read once, and are no entries that a user may add to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from memplan.catalog.kernel_profiles import KernelProfile
from memplan.documents.loading import load_document
from memplan.documents.schemas import build

T = TypeVar("T")

SAME = "same"
"""A link that leads to the host itself."""


@dataclass(frozen=True, slots=True)
class Link:
    """A link of a GPU.

    Attributes:
        host: Link to the host that cards with it have, or ``same``.
        bytes_per_second: One way, of a link to the host where a card's own entry does not say it.
    """

    host: str
    source: str
    bytes_per_second: int = 0


@dataclass(frozen=True, slots=True)
class Preset:
    """A kernel preset, and where it was read."""

    profile: KernelProfile
    source: str


TABLES: Mapping[str, str] = {
    "gaps": "configs/family_gaps.yaml",
    "kernels": "configs/kernel_profiles.yaml",
    "links": "configs/links.yaml",
}
"""Table -> its file."""


def table_of(root: Path, name: str, cls: type[T]) -> dict[str, T]:
    """Return a table's rows by name."""
    data: dict[str, Any] = load_document(root / TABLES[name]).data
    return {key: build(cls, row) for key, row in data.items()}


def kernel_presets(root: Path) -> dict[str, KernelProfile]:
    """Return the kernel presets by name."""
    return {name: preset.profile for name, preset in table_of(root, "kernels", Preset).items()}
