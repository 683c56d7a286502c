"""Memory histories of real runs: an exported JSON file becomes a checked list of events.

Where the run is, record from the start and without stacks, and export as JSON (never a pickle:
loading one runs whatever code is in it)::

    torch.cuda.memory._record_memory_history(context=None)      # before the first tensor
    ...                                                         # some training steps
    import json, torch
    with open("history.json", "w") as file:
        json.dump(torch.cuda.memory._snapshot(), file, default=str)

Source:
    The documentation of ``torch.cuda.memory._snapshot``; TraceEntry in
    c10/core/CachingDeviceAllocator.h.
"""

from pathlib import Path
from typing import Any, NamedTuple

from memplan.documents.frozen_values import dataclass
from memplan.documents.opening import read_text, shown_path
from memplan.documents.strict_json import parse_json
from memplan.errors import CannotAnswerError, InvalidFileError
from memplan.units import MIB

MAXIMUM_HISTORY_BYTES = 256 * MIB
ALLOC, FREE_REQUESTED, FREE_COMPLETED = "alloc", "free_requested", "free_completed"
SEGMENT_ALLOC, SEGMENT_FREE = "segment_alloc", "segment_free"
SEGMENT_MAP, SEGMENT_UNMAP = "segment_map", "segment_unmap"

HOW_TO_EXPORT = "json.dump(torch.cuda.memory._snapshot(), open('history.json', 'w'), default=str)"

_MEMORY_ACTIONS = frozenset(
    (ALLOC, FREE_REQUESTED, FREE_COMPLETED, SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP)
)
_MAXIMUM_ADDRESS, _MAXIMUM_SIZE, _MAXIMUM_STREAM = 2**62, 2**50, 2**64
_MAXIMUM_PROBLEMS = 10


class HistoryEvent(NamedTuple):
    """One entry of a device trace: what the allocator did, where, and on which stream."""

    place: int  # Index in the device's trace
    action: str
    address: int
    size_bytes: int  # As requested by the program (``alloc`` and frees), or of the segment or pages
    stream: int


class HistoryBlock(NamedTuple):
    """A block of a segment when the snapshot was taken."""

    address: int
    size_bytes: int
    requested_bytes: int
    stream: int
    active: bool


@dataclass(frozen=True, slots=True)
class MemoryHistory:
    """What one device's allocator did, and how it stood at the end."""

    events: tuple[HistoryEvent, ...]  # The entries that move memory, oldest first
    segments: tuple[tuple[int, int], ...]  # Address and bytes of each segment held at the end
    blocks: tuple[HistoryBlock, ...]  # The blocks of all these segments, in order of address
    out_of_memory: int  # Requests that failed
    ignored_events: int  # Entries of other kinds, such as snapshots and annotations
    alloc_conf: str  # The allocator settings of the run; empty when the file does not say


def load_history(path: Path) -> MemoryHistory:
    """Return the history of the device that has events from a JSON file, exported as the head of this module shows.

    Raises:
        InvalidFileError: Unreadable, a pickle, too large, or not such a history.
        CannotAnswerError: Private memory pools, as CUDA graphs use them.
    """
    suggestion = "record without stacks (context=None), or fewer steps"
    text = read_text(path, MAXIMUM_HISTORY_BYTES, f"export it as JSON: {HOW_TO_EXPORT}", suggestion)
    return parse_history(text, shown_path(path))


def parse_history(text: str, name: str, device: int | None = None) -> MemoryHistory:
    """Return the history of one device from JSON text.

    Raises:
        InvalidFileError: Not JSON, or not a memory history; at most ten problems are listed.
        CannotAnswerError: Private memory pools, as CUDA graphs use them.
    """
    data = parse_json(text, name)
    reader = _Reader(name)
    history = reader.history(data, device)
    if reader.problems or history is None:
        raise InvalidFileError(reader.problems)
    return history


class _Reader:
    """Checks plain JSON values, noting what is wrong with them and where."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.problems: list[str] = []

    def history(self, data: Any, device: int | None) -> MemoryHistory | None:
        traces = self._list(data.get("device_traces") if isinstance(data, dict) else None, "device_traces")
        index = self._device(traces, device)
        if index is None:
            return None
        where = f"device_traces[{index}]"
        trace = self._list(traces[index], where)
        events = [event for place, entry in enumerate(trace) if (event := self._event(entry, place, where))]
        segments, blocks = self._segments(data.get("segments", []), index)
        ooms = sum(isinstance(entry, dict) and entry.get("action") == "oom" for entry in trace)
        return MemoryHistory(
            events=tuple(events),
            segments=tuple(segments),
            blocks=tuple(sorted(blocks)),
            out_of_memory=ooms,
            ignored_events=len(trace) - len(events) - ooms,
            alloc_conf=_alloc_conf(data),
        )

    def _device(self, traces: list[Any], wanted: int | None) -> int | None:
        """Return the index of the trace to read, or None after noting why there is none."""
        filled = [index for index, trace in enumerate(traces) if trace]
        if wanted is not None and wanted in filled:
            return wanted
        if wanted is None and len(filled) == 1:
            return filled[0]
        if filled:
            self._note("device_traces", f"events of devices {', '.join(map(str, filled[:16]))}: choose one of them")
        elif not self.problems:
            self._note("device_traces", "no events; call torch.cuda.memory._record_memory_history() before the run")
        return None

    def _event(self, entry: Any, place: int, where: str) -> HistoryEvent | None:
        if not isinstance(entry, dict) or not isinstance(entry.get("action"), str):
            self._note(f"{where}[{place}]", "expected an event with an action")
            return None
        action = entry["action"]
        if action not in _MEMORY_ACTIONS:
            return None
        self._default_pool(entry.get("pool_id"), f"{where}[{place}]")
        return HistoryEvent(
            place,
            action,
            self._integer(entry, "addr", f"{where}[{place}]", _MAXIMUM_ADDRESS),
            self._integer(entry, "size", f"{where}[{place}]", _MAXIMUM_SIZE, least=1),
            self._integer(entry, "stream", f"{where}[{place}]", _MAXIMUM_STREAM, default=0),
        )

    def _segments(self, data: Any, device: int) -> tuple[list[tuple[int, int]], list[HistoryBlock]]:
        segments, blocks = [], []
        for index, segment in enumerate(self._list(data, "segments")):
            where = f"segments[{index}]"
            if not isinstance(segment, dict):
                self._note(where, "expected a segment")
            elif segment.get("device", device) == device:
                self._default_pool(segment.get("segment_pool_id"), where)
                address = self._integer(segment, "address", where, _MAXIMUM_ADDRESS)
                size_bytes = self._integer(segment, "total_size", where, _MAXIMUM_SIZE, least=1)
                stream = self._integer(segment, "stream", where, _MAXIMUM_STREAM, default=0)
                segments.append((address, size_bytes))
                blocks += self._blocks(segment.get("blocks", []), f"{where}.blocks", address, stream)
        return segments, blocks

    def _blocks(self, data: Any, where: str, address: int, stream: int) -> list[HistoryBlock]:
        blocks = []
        for index, block in enumerate(self._list(data, where)):
            if not isinstance(block, dict):
                self._note(f"{where}[{index}]", "expected a block")
                continue
            size_bytes = self._integer(block, "size", f"{where}[{index}]", _MAXIMUM_SIZE, least=1)
            active = block.get("state") in ("active_allocated", "active_awaiting_free", "active_pending_free")
            requested_bytes = self._integer(
                block, "requested_size", f"{where}[{index}]", _MAXIMUM_SIZE, default=size_bytes
            )
            blocks.append(HistoryBlock(address, size_bytes, requested_bytes, stream, active))
            address += size_bytes
        return blocks

    def _default_pool(self, pool: Any, where: str) -> None:
        if pool not in (None, [0, 0]):
            raise CannotAnswerError(
                f"{self.name}: {where}: a private memory pool, as CUDA graphs use; only the default pool is modelled"
            )

    def _integer(
        self, data: dict[str, Any], key: str, where: str, below: int, least: int = 0, default: int | None = None
    ) -> int:
        value = data.get(key, default)
        if type(value) is not int or not least <= value < below:
            shown = repr(value) if not isinstance(value, dict | list) else type(value).__name__
            self._note(f"{where}.{key}", f"expected an integer from {least} to {below - 1}, got {shown[:40]}")
            return least
        return value

    def _list(self, value: Any, where: str) -> list[Any]:
        if isinstance(value, list):
            return value
        self._note(where, f"expected a list, as torch.cuda.memory._snapshot() has it; export with: {HOW_TO_EXPORT}")
        return []

    def _note(self, where: str, problem: str) -> None:
        if len(self.problems) < _MAXIMUM_PROBLEMS:
            self.problems.append(f"{self.name}: {where}: {problem}")


def _alloc_conf(data: dict[str, Any]) -> str:
    """Return the settings string that newer snapshots carry."""
    settings = data.get("allocator_settings")
    for key in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if isinstance(settings, dict) and isinstance(settings.get(key), str):
            return str(settings[key])
    return ""
