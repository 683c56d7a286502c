"""What a measurement returns: bytes by component, by instant, and in total."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from memplan.documents.loading import Document, dotted_keys
from memplan.documents.schemas import validate
from memplan.errors import InvalidFileError, shown_value
from memplan.units import MAXIMUM_BYTES

SIZE_COUNTERS = ("context_bytes", "total_bytes", "cublas_workspace_bytes")
HISTORY_COUNTERS = ("simulated_reserved_peak_bytes", "measured_reserved_peak_bytes")
"""Counters that comparisons are made from; all others are only recorded."""

_CAPABILITY = re.compile(r"[1-9][0-9]?\.[0-9]")

Progress = Callable[[str], None]
"""Called with a line for each stage of a measurement."""

Status = Literal["measured", "out of memory", "killed", "hung", "failed"]


@dataclass(frozen=True, slots=True)
class Measurement:
    """One run of a task."""

    status: Status  # How the run ended
    reason: str = ""  # Why, where it did not end well
    device: str = ""  # What it ran on
    torch_version: str = ""  # Version of torch
    components: Mapping[str, int] = field(default_factory=dict)  # Bytes of distinct storages by component
    instants: Mapping[str, int] = field(default_factory=dict)  # Greatest need of each instant of the last step
    # ``requested``, and on CUDA ``allocated``, ``reserved`` and ``device``: peaks after the first step.
    totals: Mapping[str, int] = field(default_factory=dict)
    # Everything else that was read: context, driver, attention kernel, out-of-memory figures.
    counters: Mapping[str, Any] = field(default_factory=dict)

    @property
    def driver_version(self) -> str:
        """The GPU driver's version, or ``unknown``: records until November 2026 have a 0 in another counter's place."""
        return str(self.counters.get("driver_version") or "unknown")


class Measurable(Protocol):
    """What a process of its own measures; it is pickled on its way there."""

    @property
    def alloc_conf(self) -> str:
        """As PYTORCH_CUDA_ALLOC_CONF."""

    def measured(self, progress: Progress) -> Measurement:
        """Return what steps take of a device's memory."""


def measurement_of(data: Mapping[str, Any], where: str) -> Measurement:
    """Return a measurement from its JSON.

    Raises:
        InvalidFileError: Something is missing or of the wrong kind.
    """
    measurement = validate(Measurement, Document(where, data, {}))
    problems = [f"{where}: {key}: {text}" for key, text in _problems(measurement)]
    if problems:
        raise InvalidFileError(problems)
    return measurement


def _problems(measurement: Measurement) -> Iterator[tuple[str, str]]:
    """Yield the figures that no run can have, each with its key."""
    for section in ("components", "instants", "totals"):
        for name, size in getattr(measurement, section).items():
            if not 0 <= size <= MAXIMUM_BYTES:
                yield dotted_keys((section, name)), f"expected whole bytes, got {size}"
    counters = measurement.counters
    history = counters.get("history") or {}
    if not isinstance(history, Mapping) or (history and not all(name in history for name in HISTORY_COUNTERS)):
        yield "counters.history", f"expected {', '.join(HISTORY_COUNTERS)}"
        history = {}
    counted = {name: counters[name] for name in SIZE_COUNTERS if name in counters}
    for name, size in (*counted.items(), *((name, history[name]) for name in HISTORY_COUNTERS if history)):
        if type(size) is not int or not 0 <= size <= MAXIMUM_BYTES:
            yield f"counters.{name}", f"expected whole bytes, got {shown_value(size, 40)}"
    capability = counters.get("compute_capability", "9.0")
    if not isinstance(capability, str) or not _CAPABILITY.fullmatch(capability):
        yield "counters.compute_capability", f"expected a version such as 9.0, got {shown_value(capability, 40)}"
