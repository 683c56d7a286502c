"""Families whose own code in a library saves more for backward than the library's kernel preset says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from memplan.catalog.entries import Source


@dataclass(frozen=True, slots=True)
class FamilyGap:
    """How much more than planned one family keeps, as traced at full size.

    Attributes:
        least_percent: Least that was traced beyond the plan; 0 where some jobs were as planned.
        most_percent: The most.
        reason: What that family's code does, where it is known.
    """

    least_percent: int
    most_percent: int
    reason: str = ""

    @property
    def text(self) -> str:
        """The gap in words."""
        least, most = self.least_percent, self.most_percent
        span = f"up to {most}" if not least else f"{most}" if least == most else f"{least} to {most}"
        traced = f"traced: {span} % more than planned"
        return f"{self.reason} ({traced})" if self.reason else traced


@dataclass(frozen=True, slots=True)
class PresetGaps:
    """The gaps of one kernel preset, by family."""

    library: str
    families: Mapping[str, FamilyGap]
    sources: tuple[Source, ...]
