"""A trace as data: bytes by component over the events of one step."""

from __future__ import annotations

from typing import Any

from memplan.trace.recording.trace_result import COMPONENTS, Component, Trace


def timeline_json(trace: Trace) -> dict[str, Any]:
    """Return every event of the reported step with the bytes by component after it.

    ``largest_at_peak`` has the storages alive at the peak, largest first, with the line of
    model code that made each.
    """
    shown = _shown(trace)
    events = [
        {
            "instant": trace.events[index].instant,
            "operation": trace.events[index].operation,
            "allocates": trace.events[index].allocates,
            "bytes": trace.events[index].bytes,
            "components": {name: totals[name] for name in shown},
        }
        for index, totals in trace.curve()
    ]
    return {
        "schema": "memplan/timeline/1",
        "peak": {
            "event": max(trace.peak.event - trace.steady_from, 0),
            "instant": trace.peak_instant,
            "operation": trace.peak.operation,
            "requested_bytes": trace.peak_bytes,
            "components": dict(trace.peak.components),
        },
        "instants": [{"name": name, "requested_bytes": size} for name, size in trace.instant_bytes.items()],
        "largest_at_peak": [
            {
                "bytes": storage.bytes,
                "component": storage.component,
                "operation": storage.operation,
                "name": storage.name,
                "shape": list(storage.shape),
                "line": storage.line,
            }
            for storage in trace.largest_at_peak(20)
        ],
        "events": events,
    }


def _shown(trace: Trace) -> tuple[Component, ...]:
    present = {storage.component for storage in trace.storages}
    return tuple(name for name in COMPONENTS if name in present)
