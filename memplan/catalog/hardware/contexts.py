"""Device contexts as ranges over what was measured on cards of an architecture."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from memplan.catalog.entries import Gpu
from memplan.catalog.hardware.hardware_tables import (
    ContextEntry,
    ContextMeasurement,
    HardwareTables,
    capability,
    entry_name,
)
from memplan.documents.frozen_values import dataclass
from memplan.units import GIB, format_bytes, parse_bytes

FILE = "configs/hardware/contexts.yaml"
ENOUGH = 3
"""Fewer runs than this say too little about the ends of a range: those on the nearest architectures join them."""
PRINTED_STEP = GIB // 100
"""Out-of-memory messages print two decimals of a GiB, twice half of which may be missing in a difference."""


@dataclass(frozen=True, slots=True)
class ContextRange:
    """What a process is expected to hold outside torch's allocator on one device, and between which ends."""

    least_bytes: int
    expected_bytes: int
    most_bytes: int
    source: str  # What was measured, on which cards


def context_range(gpu: Gpu, tables: HardwareTables) -> ContextRange:
    """Return the range of a card's device context.

    Formula:
        Expected is the median of whole runs on its architecture, the lower of two, and no less than a bare process
        held there; without any, the median of those on the nearest architectures that have some. The ends are the
        least and the most of them, joined by those on the nearest architectures where they are fewer than three.
    """
    return _named_range(entry_name(gpu, tables.contexts), tables)


@lru_cache(maxsize=256)
def _named_range(name: str, tables: HardwareTables) -> ContextRange:
    entry = tables.contexts[name]
    if not entry.like:
        return _range(name, tables.contexts)
    like = _range(entry.like, tables.contexts)
    return replace(like, source=f"{like.source}; {entry.note}")


def _range(name: str, entries: Mapping[str, ContextEntry]) -> ContextRange:
    own = _whole(entries[name])
    bare = [measured_bytes(item) for item in entries[name].measured if item.run == "bare"]
    joined = {} if len(own) >= ENOUGH else _nearest(name, entries)
    pool = [*own, *(item for other in joined.values() for item in other)]
    expected = _lower_median([measured_bytes(item) for item in own or pool])
    sizes = [measured_bytes(item) for item in pool]
    most = max(measured_bytes(item) + (PRINTED_STEP if item.how == "message" else 0) for item in pool)
    least = min(sizes) if own else max(min(sizes), min(bare, default=0))
    return ContextRange(
        min(least, expected), max(expected, *bare, 0), max(most, expected, *bare), _text(name, own, joined, len(bare))
    )


def _lower_median(sizes: Sequence[int]) -> int:
    return sorted(sizes)[(len(sizes) - 1) // 2]


def measured_bytes(item: ContextMeasurement) -> int:
    """Return what a process held outside torch's allocator.

    Formula:
        ``in_use - allocated - unallocated``
    """
    return parse_bytes(item.in_use) - parse_bytes(item.allocated) - parse_bytes(item.unallocated)


def _whole(entry: ContextEntry) -> list[ContextMeasurement]:
    return [item for item in entry.measured if item.run != "bare"]


def _nearest(name: str, entries: Mapping[str, ContextEntry]) -> dict[str, list[ContextMeasurement]]:
    """Return the whole runs of the nearest architectures that have some: one older and one newer of NVIDIA's, else all."""
    if not name.startswith("sm-"):
        return {
            other: _whole(entries[other])
            for other in entries
            if (not other.startswith("sm-") and other != "unknown") and other != name
        }
    versions = sorted((other for other in entries if other.startswith("sm-")), key=lambda key: capability(key[3:]))
    place = versions.index(name)
    result: dict[str, list[ContextMeasurement]] = {}
    for side in (reversed(versions[:place]), versions[place + 1 :]):
        nearest = next((other for other in side if _whole(entries[other])), None)
        if nearest is not None:
            result[nearest] = _whole(entries[nearest])
    return result


def _text(
    name: str, own: Sequence[ContextMeasurement], joined: Mapping[str, Sequence[ContextMeasurement]], bare: int
) -> str:
    """Return what a range rests on."""
    parts = [f"{_runs(own)} on {name}" if own else f"no run was measured on {name}"]
    if bare:
        parts.append(f"{bare} bare {'process' if bare == 1 else 'processes'}")
    if joined:
        parts.append("joined by the nearest measured: " + ", ".join(f"{_runs(o)} on {n}" for n, o in joined.items()))
    return f"device context: {'; '.join(parts)} ({FILE})"


def _runs(runs: Sequence[ContextMeasurement]) -> str:
    sizes = sorted(measured_bytes(item) for item in runs)
    least, most = format_bytes(sizes[0], "MiB"), format_bytes(sizes[-1], "MiB")
    span = least if least == most else f"{least} to {most}"
    return f"{len(runs)} {'run' if len(runs) == 1 else 'runs'} ({span})"
