"""Tables of figures that ship with memplan, are read once, and are no entries that a user may add to."""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from memplan.catalog.entries import Source
from memplan.catalog.shipped_entries import BuiltEntries, shipped_texts
from memplan.documents.frozen_values import dataclass
from memplan.errors import CannotAnswerError

T = TypeVar("T")

SAME = "same"
"""A link that leads to the host itself."""


@dataclass(frozen=True, slots=True)
class Link:
    """A link of a GPU."""

    host: str  # Link to the host that cards with it have, or ``same``
    source: str
    bytes_per_second: int = 0  # One way, of a link to the host where a card's own entry does not say it


@dataclass(frozen=True, slots=True)
class Network:
    """One port of a network between nodes."""

    bytes_per_second: int  # One way
    source: str


@dataclass(frozen=True, slots=True)
class ReserveShare:
    """Share of the allocated bytes that an allocator needs besides, in thousandths."""

    allocator: str  # Which allocator
    coded: bool  # Whether weights are trained as codes
    expected_per_mille: int  # Median of simulated steps
    upper_per_mille: int  # Their 95th percentile
    source: str


@dataclass(frozen=True, slots=True)
class FamilyGap:
    """How much more than planned one family keeps, as traced at full size."""

    least_percent: int  # Least that was traced beyond the plan; 0 where some jobs were as planned
    most_percent: int  # The most
    reason: str = ""  # What that family's code does, where it is known

    @property
    def text(self) -> str:
        """The gap in words."""
        least, most = self.least_percent, self.most_percent
        span = f"up to {most}" if not least else f"{most}" if least == most else f"{least} to {most}"
        traced = f"traced: {span} % more than planned"
        return f"{self.reason} ({traced})" if self.reason else traced


@dataclass(frozen=True, slots=True)
class StackGaps:
    """The gaps of one stack, by family."""

    library: str
    families: Mapping[str, FamilyGap]
    sources: tuple[Source, ...]


@dataclass(frozen=True, slots=True)
class UnmodelledFamily:
    """Models that are refused by name."""

    title: str
    reason: str  # What memplan does not model
    sources: tuple[Source, ...]
    begins: tuple[str, ...] = ()  # Words, sizes and numbers with which their names begin, without the organisation
    words: tuple[str, ...] = ()  # Words, one of which their names have


@dataclass(frozen=True, slots=True)
class Instances:
    """Clouds' instances with one kind of GPU."""

    counts: Mapping[str, int]  # Instance -> its GPUs
    sources: tuple[Source, ...]


TABLES: Mapping[str, str] = {
    "capabilities": "configs/hardware/capabilities.yaml",
    "communicators": "configs/hardware/communicators.yaml",
    "contexts": "configs/hardware/contexts.yaml",
    "gaps": "configs/family_gaps.yaml",
    "instances": "configs/hardware/instances.yaml",
    "links": "configs/links.yaml",
    "networks": "configs/networks.yaml",
    "reserve": "configs/allocator_reserve.yaml",
    "unmodelled": "configs/unmodelled_models.yaml",
    "wordings": "configs/out_of_memory_wordings.yaml",
    "workspaces": "configs/hardware/blas_workspaces.yaml",
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
    def family_gaps(self) -> Mapping[str, StackGaps]:
        """Stacks whose library runs some families with code of its own that saves more."""
        return table_of(self.root, "gaps", StackGaps)

    def instance(self, name: str) -> tuple[str, int] | None:
        """Return the GPU of a cloud's instance, and how many it has, or None where there is no such instance."""
        wanted = name.strip().lower().removeprefix("standard_")
        for gpu, instances in table_of(self.root, "instances", Instances).items():
            for one, count in instances.counts.items():
                if one.lower().removeprefix("standard_") == wanted:
                    return gpu, count
        return None

    @cached_property
    def links(self) -> Mapping[str, Link]:
        """Links of GPUs."""
        return table_of(self.root, "links", Link)

    @cached_property
    def networks(self) -> Mapping[str, Network]:
        """Networks between nodes."""
        return table_of(self.root, "networks", Network)

    @cached_property
    def unmodelled(self) -> Mapping[str, UnmodelledFamily]:
        """Families of models that are refused by name."""
        return table_of(self.root, "unmodelled", UnmodelledFamily)

    @cached_property
    def _reserve_shares(self) -> Mapping[str, ReserveShare]:
        return table_of(self.root, "reserve", ReserveShare)

    def reserve_share(self, allocator: str | None, coded: bool) -> ReserveShare:
        """Return what an allocator needs besides, where weights are trained as codes and where not; torch's own without a name.

        Raises:
            CannotAnswerError: No simulation of it was made.
        """
        name = f"{allocator or 'native'}-{'coded' if coded else 'floats'}"
        if name not in self._reserve_shares:
            raise CannotAnswerError(f"allocator: what {allocator} needs beyond what it hands out is not known")
        return self._reserve_shares[name]
