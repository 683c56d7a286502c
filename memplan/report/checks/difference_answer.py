"""The answers of ``memplan diff``: what moved between two baselines, and why."""

from collections.abc import Sequence
from typing import Any

from memplan.budget.baseline import CAUSES, Baseline, Change, Entry, differences
from memplan.report.checks.forge_texts import MARKER, cell, row, trimmed
from memplan.report.document import Document, Table
from memplan.units import format_bytes

HEADERS = ("job", "gpu", ">before", ">after", ">moved", "why")


def diff_document(base: Baseline, head: Baseline, unit: str) -> Document:
    """Return what moved from one baseline to another, the largest growth first."""
    changes = differences(base, head)
    moved = [change for change in changes if change.moved]
    table = Table(HEADERS, tuple(_cells(change, unit) for change in moved))
    parts = tuple(f"{_label(c)}: {_components(c, unit)}" for c in moved if c.components and c.before and c.after)
    sentence = answer(changes)
    blocks = (*((table, parts) if moved else ()), provenance(base, head), sentence)
    return Document(diff_data(base, head, changes, sentence), blocks)


def diff_data(base: Baseline, head: Baseline, changes: Sequence[Change], sentence: str) -> dict[str, Any]:
    """Return the JSON of schema ``memplan/diff/1``."""
    return {
        "schema": "memplan/diff/1",
        "base": {"memplan_version": base.memplan_version, "catalog_hash": base.catalog_hash},
        "head": {"memplan_version": head.memplan_version, "catalog_hash": head.catalog_hash},
        "answer": sentence,
        "rows": [_row(change) for change in changes],
    }


def _row(change: Change) -> dict[str, Any]:
    return {
        "name": change.name,
        "gpu": change.gpu,
        "cause": change.cause,
        "moved_bytes": change.moved_bytes,
        **{key: _side(side) for key, side in (("before", change.before), ("after", change.after)) if side is not None},
        "components": dict(change.components),
    }


def _side(entry: Entry) -> dict[str, Any]:
    return {
        "model": entry.model,
        "config": entry.config,
        "device_bytes": entry.device_bytes,
        "upper_bytes": entry.upper_bytes,
    }


def diff_markdown(base: Baseline, head: Baseline) -> str:
    """Return what moved as Markdown short enough for a comment."""
    changes = differences(base, head)
    moved = [change for change in changes if change.moved]
    top = [
        MARKER.format("diff"),
        "### memplan diff",
        "",
        cell(answer(changes), 2_000),
        "",
        cell(provenance(base, head), 2_000),
        "",
    ]
    if not moved:
        return "\n".join(top[:-1]) + "\n"
    table = [row([header.lstrip(">") for header in HEADERS]), row(("---", "---", "---:", "---:", "---:", "---"))]
    details = [
        f"<details><summary>{cell(_label(change))}</summary>{cell(_components(change, ''), 2_000)}</details>"
        for change in moved
        if change.components
    ]
    return trimmed([*top, *table], [row(_cells(change, "")) for change in moved], details)


def answer(changes: Sequence[Change]) -> str:
    """Return the answer in one sentence."""
    moved = [change for change in changes if change.moved]
    if not moved:
        return f"SAME: nothing moved in {len(changes)} job{'' if len(changes) == 1 else 's'}."
    counts = [
        f"{text}: {number}"
        for cause, text in CAUSES.items()
        if (number := sum(change.cause == cause for change in moved))
    ]
    return f"MOVED: {len(moved)} of {len(changes)} jobs ({'; '.join(counts)}); most: {_label(moved[0])} by {_signed(moved[0].moved_bytes)}."


def provenance(base: Baseline, head: Baseline) -> str:
    """Return which memplan and which catalog computed either side."""
    versions = (
        f"memplan {base.memplan_version}"
        if base.memplan_version == head.memplan_version
        else f"memplan {base.memplan_version} -> {head.memplan_version}"
    )
    short = base.catalog_hash[:12], head.catalog_hash[:12]
    return f"{versions}, catalog {short[0] if short[0] == short[1] else ' -> '.join(short)}"


def _label(change: Change) -> str:
    return f"{change.name} on {change.gpu}"


def _cells(change: Change, unit: str) -> tuple[str, ...]:
    sizes = [format_bytes(side.device_bytes, unit) if side else "" for side in (change.before, change.after)]
    return (change.name, change.gpu, *sizes, _signed(change.moved_bytes, unit), CAUSES[change.cause])


def _components(change: Change, unit: str) -> str:
    sizes = sorted(change.components.items(), key=lambda item: (-abs(item[1]), item[0]))
    return ", ".join(f"{name} {_signed(size, unit)}" for name, size in sizes)


def _signed(size: int, unit: str = "") -> str:
    return f"{'+' if size > 0 else ''}{format_bytes(size, unit)}"
