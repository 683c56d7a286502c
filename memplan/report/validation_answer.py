"""Predicted beside measured, as tables and JSON: one measurement, or many records."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from fractions import Fraction
from statistics import median
from typing import Any, Protocol

import memplan
from memplan.documents.frozen_values import dataclass
from memplan.report.document import Block, Document, Table
from memplan.units import format_bytes

EXIT_DISAGREES, EXIT_CANNOT_ANSWER = 1, 3

BOUNDARY = "boundary"
"""What rows of runs on limited memory are called (``memplan.measure.records.comparison_rows``)."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What was run, on what, and how it ended."""

    model: str
    config: str
    device: str
    torch_version: str
    driver_version: str  # Of the GPU's driver, or ``unknown``; nothing on a CPU
    micro_batch_size: int
    sequence_length: int
    attention: str
    steps: int
    status: str
    reason: str
    processes: int = 1  # Which divide the model among them, each on that device


class Comparison(Protocol):
    """One row: ``memplan.measure.records.comparison_rows.Row``."""

    @property
    def component(self) -> str:
        """What is compared."""

    @property
    def predicted_bytes(self) -> int | None:
        """By the formula."""

    @property
    def traced_bytes(self) -> int | None:
        """By the trace."""

    @property
    def measured_bytes(self) -> int:
        """On the device."""

    @property
    def compared(self) -> str:
        """Which of the two the measurement is compared with."""

    @property
    def difference_bytes(self) -> int:
        """Measured less that."""

    @property
    def tolerance_bytes(self) -> int:
        """How much that may be."""

    @property
    def agrees(self) -> bool:
        """Whether it is no more."""

    @property
    def reason(self) -> str:
        """Where the tolerance comes from."""


def measured_document(
    facts: Facts, rows: Sequence[Comparison], predicted_bytes: int, notes: Sequence[str], unit: str
) -> Document:
    """Return the comparison of one measurement, or why there is none."""
    agrees = bool(rows) and all(row.agrees for row in rows)
    data: dict[str, Any] = {
        "schema": "memplan/validation/1",
        "memplan_version": memplan.__version__,
        **asdict(facts),
        "predicted_requested_bytes": predicted_bytes,
        "rows": [_row_data(row) for row in rows],
        "notes": list(notes),
        "agrees": agrees,
    }
    if not rows:
        return Document(data, (_heading(facts), _no_figures(facts, predicted_bytes)), _exit_code(facts))
    blocks: list[Block] = [_heading(facts), _rows_table(rows, unit), _reasons_table(rows)]
    blocks += [f"Note: {note}" for note in notes]
    return Document(data, (*blocks, _sentence(rows)), 0 if agrees else EXIT_DISAGREES)


def _row_data(row: Comparison) -> dict[str, Any]:
    keys = ("component", "predicted_bytes", "traced_bytes", "measured_bytes", "compared", "difference_bytes")
    return {key: getattr(row, key) for key in (*keys, "tolerance_bytes", "agrees", "reason")}


def _exit_code(facts: Facts) -> int:
    return EXIT_DISAGREES if facts.status == "out of memory" else EXIT_CANNOT_ANSWER


def _heading(facts: Facts) -> tuple[str, str]:
    place = f"{facts.processes} processes of {_place(facts)}" if facts.processes > 1 else _place(facts)
    return (
        f"{facts.model}, {facts.config}: {facts.steps} training steps on {place}",
        f"micro-batch {facts.micro_batch_size}, sequence {facts.sequence_length}, attention {facts.attention}",
    )


def _no_figures(facts: Facts, predicted_bytes: int) -> str:
    return f"No figures: {facts.status} ({facts.reason}). Predicted were {format_bytes(predicted_bytes)} requested."


def _rows_table(rows: Iterable[Comparison], unit: str) -> Table:
    cells = tuple(
        (
            row.component,
            _size(row.predicted_bytes, unit),
            _size(row.traced_bytes, unit),
            format_bytes(row.measured_bytes, unit),
            row.compared,
            f"{row.difference_bytes:+,} B" if row.difference_bytes else "0",
            f"{row.tolerance_bytes:,} B" if row.tolerance_bytes else "0",
            "agrees" if row.agrees else "DISAGREES",
        )
        for row in rows
    )
    headers = ("component", ">predicted", ">traced", ">measured", "against", ">difference", ">tolerance", "")
    return Table(headers, cells)


def _size(size: int | None, unit: str) -> str:
    return "" if size is None else format_bytes(size, unit)


def _reasons_table(rows: Iterable[Comparison]) -> Table:
    reasons = dict.fromkeys((row.compared, row.reason) for row in rows)
    return Table(("against", "tolerance"), tuple(reasons), "Why these tolerances")


def _sentence(rows: Sequence[Comparison]) -> str:
    wrong = [row.component for row in rows if not row.agrees]
    if wrong:
        return f"DISAGREES: {', '.join(wrong)}."
    exact = sum(not row.difference_bytes for row in rows)
    return f"Agrees: {len(rows)} figures within their tolerances, {exact} of them equal to the byte."


# ------------------------------------------------------------------ records
Replay = tuple[Facts, str, Sequence[Comparison]]


def replay_document(replays: Sequence[Replay]) -> Document:
    """Return the errors of many records by component, with the worst of each."""
    devices: dict[str, dict[str, list[tuple[Fraction, str, Comparison]]]] = {}
    for facts, name, rows in replays:
        groups = devices.setdefault(_place(facts), {})
        for row in rows:
            if not row.component.startswith(BOUNDARY):
                groups.setdefault(_group(row), []).append((_error(row), name, row))
    wrong = [(name, row) for _, name, rows in replays for row in rows if not row.agrees]
    agrees = not wrong and all(rows for _, _, rows in replays)
    data = {
        "schema": "memplan/replay/1",
        "memplan_version": memplan.__version__,
        "records": [{"name": n, **asdict(f), "rows": [_row_data(row) for row in rows]} for f, n, rows in replays],
        "components": [
            {"device": device, **_group_data(name, members)}
            for device, groups in devices.items()
            for name, members in groups.items()
        ],
        "agrees": agrees,
    }
    boundary = _boundary(replays)
    if boundary["runs"]:
        data["boundary"] = boundary
    blocks: list[Block] = [
        Table(
            ("component", ">figures", ">exact", ">median error", ">worst", "worst case"),
            tuple(_group_cells(name, members) for name, members in groups.items()),
            f"{sum(_place(facts) == device for facts, _, _ in replays)} records of {device} against today's formula, trace "
            "and simulated allocator",
        )
        for device, groups in devices.items()
    ]
    if boundary["runs"]:
        blocks.append(
            f"{boundary['runs']} runs on cards of limited memory: {boundary['ran']} ran, {boundary['out_of_memory']} ran out "
            f"of memory, of which {boundary['false_fits']} had been called FITS."
        )
    if wrong:
        cells = tuple((n, r.component, f"{r.difference_bytes:+,} B", f"{r.tolerance_bytes:,} B") for n, r in wrong)
        blocks.append(Table(("record", "component", ">difference", ">tolerance"), cells, "What misses"))
    text = f"DISAGREES: {len(wrong)} figures of {len({n for n, _ in wrong})} records are beyond their tolerances."
    blocks.append("Agrees: every figure of every record is within its tolerance." if agrees else text)
    return Document(data, tuple(blocks), 0 if agrees else EXIT_DISAGREES)


def _boundary(replays: Sequence[Replay]) -> dict[str, int]:
    """Return how runs on cards of limited memory went; each has a row for the simulator."""
    runs = [(facts, rows) for facts, _, rows in replays if any(row.component.startswith(BOUNDARY) for row in rows)]
    failed = [rows for facts, rows in runs if facts.status == "out of memory"]
    wrong = sum(row.component == BOUNDARY and not row.agrees for rows in failed for row in rows)
    return {"runs": len(runs), "ran": len(runs) - len(failed), "out_of_memory": len(failed), "false_fits": wrong}


def _place(facts: Facts) -> str:
    """Return what a record was measured on; one that ran out of memory does not say the device."""
    driver = f", driver {facts.driver_version}" if facts.driver_version else ""
    return f"{facts.device}, torch {facts.torch_version}{driver}"


def _group(row: Comparison) -> str:
    return "instants" if row.component.startswith("instant: ") else row.component


def _error(row: Comparison) -> Fraction:
    """Return a row's difference as a share of what was measured."""
    return Fraction(abs(row.difference_bytes), max(1, row.measured_bytes))


def _group_data(name: str, members: Sequence[tuple[Fraction, str, Comparison]]) -> dict[str, Any]:
    worst = max(members, key=lambda member: member[0])
    return {
        "component": name,
        "figures": len(members),
        "exact": sum(not row.difference_bytes for _, _, row in members),
        "median_error": _percent(median(error for error, _, _ in members)),
        "worst_error": _percent(worst[0]),
        "worst_record": worst[1],
        "worst_difference_bytes": worst[2].difference_bytes,
    }


def _group_cells(name: str, members: Sequence[tuple[Fraction, str, Comparison]]) -> tuple[str, ...]:
    data = _group_data(name, members)
    case = f"{data['worst_record']}, {data['worst_difference_bytes']:+,} B" if data["worst_difference_bytes"] else ""
    counts = (str(data["figures"]), str(data["exact"]))
    return (name, *counts, str(data["median_error"]), str(data["worst_error"]), case)


def _percent(share: Fraction) -> str:
    """Return a share in percent with four places, rounded up from below half."""
    units = round(share * 1_000_000)
    return f"{units // 10_000}.{units % 10_000:04d} %"


def plan_document(tasks: int, failed: Sequence[tuple[str, str]], answer: Document | None) -> Document:
    """Return how a measurement plan went, and what its records say."""
    code = EXIT_CANNOT_ANSWER if answer is None else answer.exit_code
    data = dict(answer.data) if answer else {"schema": "memplan/replay/1", "records": [], "agrees": False}
    data |= {"planned": tasks, "failed": [{"name": name, "reason": reason} for name, reason in failed]}
    blocks: list[Block] = list(answer.blocks) if answer else []
    if failed:
        blocks.insert(0, Table(("task", "reason"), tuple(failed), f"{len(failed)} of {tasks} tasks have no record"))
    return Document(
        data, tuple(blocks) or ("No task could be measured.",), max(code, EXIT_CANNOT_ANSWER * bool(failed))
    )


# ------------------------------------------------------------------ a machine's own figures
def calibration_document(records: Sequence[Mapping[str, Any]]) -> Document:
    """Return what records say of a machine's context, workspaces and allocator; the JSON is a profile for plans."""
    runs = [r["measurement"] for r in records if "context_bytes" in r["measurement"].get("counters", {})]
    if not runs:
        data = {"schema": "memplan/profile/1", "records": 0}
        text = "No record is of a CUDA device: a CPU has no context, workspaces or caching allocator to measure."
        return Document(data, (text,), EXIT_CANNOT_ANSWER)
    context = [int(run["counters"]["context_bytes"]) for run in runs]
    library = [2 * int(run["counters"].get("cublas_workspace_bytes", 0)) for run in runs]
    data = {
        "schema": "memplan/profile/1",
        "records": len(runs),
        "device": runs[0]["device"],
        "torch_version": runs[0]["torch_version"],
        "context_bytes": int(median(context)),
        "upper_context_bytes": max(context),
        "library_bytes": max(library),
        "alloc_conf": sorted({str(r["task"].get("alloc_conf", "")) for r in records}),
    }
    rows = [(key, f"{value:,}" if isinstance(value, int) else str(value)) for key, value in data.items()]
    sentence = f"Measured on {data['device']}: with --json -o FILE this is a profile."
    return Document(data, (Table(("figure", ">value"), tuple(rows)), sentence))
