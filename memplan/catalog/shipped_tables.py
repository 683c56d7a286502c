"""Tables of figures that ship with memplan, are read once, and are no entries that a user may add to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from memplan.catalog.kernel_profiles import KernelProfile, Kernels
from memplan.catalog.shipped_entries import BuiltEntries, shipped_texts
from memplan.errors import CannotAnswerError, UnknownNameError, match_hint

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
class ReserveShare:
    """Share of the allocated bytes that an allocator needs besides, in thousandths.

    Attributes:
        allocator: Which allocator.
        coded: Whether weights are trained as codes.
        expected_per_mille: Median of simulated steps.
        upper_per_mille: Their 95th percentile.
    """

    allocator: str
    coded: bool
    expected_per_mille: int
    upper_per_mille: int
    source: str


@dataclass(frozen=True, slots=True)
class Preset:
    """A kernel preset, and where it was read."""

    profile: KernelProfile
    source: str


TABLES: Mapping[str, str] = {
    "gaps": "configs/family_gaps.yaml",
    "kernels": "configs/kernel_profiles.yaml",
    "links": "configs/links.yaml",
    "reserve": "configs/allocator_reserve.yaml",
}
"""Table -> its file."""


def table_of(root: Path, name: str, cls: type[T]) -> Mapping[str, T]:
    """Return a table's rows by name, each built when it is asked for."""
    return BuiltEntries(cls, shipped_texts(root / TABLES[name])[0], {})


class ShippedTables:
    """Tables below the folder of the shipped data, each read when it is first asked for."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @cached_property
    def kernel_presets(self) -> Mapping[str, Preset]:
        """Kernel presets."""
        return table_of(self.root, "kernels", Preset)

    @cached_property
    def links(self) -> Mapping[str, Link]:
        """Links of GPUs."""
        return table_of(self.root, "links", Link)

    @cached_property
    def _reserve_shares(self) -> Mapping[str, ReserveShare]:
        return table_of(self.root, "reserve", ReserveShare)

    def reserve_share(self, allocator: str, coded: bool) -> ReserveShare:
        """Return what an allocator needs besides, where weights are trained as codes and where not.

        Raises:
            CannotAnswerError: No simulation of it was made.
        """
        name = f"{allocator}-{'coded' if coded else 'floats'}"
        if name not in self._reserve_shares:
            raise CannotAnswerError(f"allocator: what {allocator} needs beyond what it hands out is not known")
        return self._reserve_shares[name]

    def profile(self, kernels: Kernels) -> KernelProfile:
        """Return the kernels that a config's ``kernels`` key means.

        Raises:
            UnknownNameError: There is no such preset.
        """
        if kernels.preset not in self.kernel_presets:
            raise UnknownNameError(f"unknown kernel preset {kernels.preset!r}{self.preset_hint(kernels.preset)}")
        return kernels.over(self.kernel_presets[kernels.preset].profile)

    def preset_hint(self, given: str) -> str:
        """Return what may have been meant by a kernel preset that there is none of."""
        return match_hint(given, self.kernel_presets, f"; known: {', '.join(self.kernel_presets)}")
