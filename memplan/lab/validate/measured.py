"""What a measurement returns: bytes by component, by instant, and in total."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from memplan.errors import InvalidFileError

Status = Literal["measured", "out of memory", "killed", "hung", "failed"]


@dataclass(frozen=True, slots=True)
class Measurement:
    """One run of a task.

    Attributes:
        status: How the run ended.
        reason: Why, where it did not end well.
        device: What it ran on.
        torch_version: Version of torch.
        components: Bytes of distinct storages by component.
        instants: Greatest need of each instant of the last step.
        totals: ``requested``, and on CUDA ``allocated``, ``reserved`` and ``device``: peaks after the first step.
        counters: Everything else that was read: context, driver, attention kernel, out-of-memory figures.
    """

    status: Status
    reason: str = ""
    device: str = ""
    torch_version: str = ""
    components: Mapping[str, int] = field(default_factory=dict)
    instants: Mapping[str, int] = field(default_factory=dict)
    totals: Mapping[str, int] = field(default_factory=dict)
    counters: Mapping[str, Any] = field(default_factory=dict)

    @property
    def driver_version(self) -> str:
        """The GPU driver's version, or ``unknown``: records until November 2026 have a 0 in another counter's place."""
        return str(self.counters.get("driver_version") or "unknown")


def measurement_of(data: Mapping[str, Any], where: str) -> Measurement:
    """Return a measurement from its JSON.

    Raises:
        InvalidFileError: Something is missing or of the wrong kind.
    """
    try:
        found = Measurement(**data)
        sizes = [*found.components.values(), *found.instants.values(), *found.totals.values()]
    except (AttributeError, TypeError) as error:
        raise InvalidFileError([f"{where}: not a measurement: {error}"]) from None
    if not all(isinstance(size, int) and size >= 0 for size in sizes):
        raise InvalidFileError([f"{where}: expected whole bytes"])
    return found
