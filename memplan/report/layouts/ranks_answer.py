"""The answer of ``memplan fit --rank``: what the ranks of a job hold, those that hold the same in a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from memplan.report.document import Document, Table
from memplan.report.plans.plan_answer import VERDICT_WORDS
from memplan.units import format_bytes

if TYPE_CHECKING:
    from memplan.plan.grids.distinct_ranks import RankRow
    from memplan.plan.memory_plan import MemoryPlan

PADDED = (
    "fully_shard pads weights and gradients to the first rank's rows; the optimizer's states are of the rows that a rank has.",
    "peak and upper end are at most, where the optimizer's scratch is in them; every rank takes part in all gathers alike.",
)


def ranks_document(rows: Sequence[RankRow], plan: MemoryPlan, unit: str, *, strict: bool) -> Document:
    """Return a table of ranks, with the verdict of the fullest.

    Args:
        plan: Of the first rank.
        unit: Unit of bytes in tables.
        strict: TIGHT counts as NO.
    """
    parallel = plan.setup.config.parallel
    headers = (">shards", ">ranks", "", ">states", ">kept", ">peak", ">upper end")
    cells = tuple(_cells(row, unit) for row in rows)
    fullest = max(rows, key=lambda row: row.upper_bytes)
    head = (
        f"{plan.model.spec.name} with {plan.setup.name} on {parallel.gpus:,} x {plan.device.name}, {plan.setup.stack.name}",
        f"at the peak, {plan.peak.name}; a group has {parallel.shards if parallel.zero_stage else 1:,} shards",
        f"each keeps {format_bytes(fullest.weight_bytes, unit)} of weights and {format_bytes(fullest.gradient_bytes, unit)} of gradients",
    )
    sentence = (
        f"{VERDICT_WORDS[fullest.verdict]}: the fullest rank takes up to {format_bytes(fullest.upper_bytes, unit)} of "
        f"{format_bytes(plan.usable_bytes, unit)}."
    )
    data: dict[str, Any] = {
        "schema": "memplan/ranks/1",
        "gpus": parallel.gpus,
        "usable_bytes": plan.usable_bytes,
        "peak_instant": plan.peak.name,
        "rows": [asdict(row) | {"persistent_bytes": row.persistent_bytes} for row in rows],
    }
    fits = fullest.verdict == "fits" or (fullest.verdict == "tight" and not strict)
    return Document(data, (head, Table(headers, cells), PADDED, sentence), 0 if fits else 1)


def _cells(row: RankRow, unit: str) -> tuple[str, ...]:
    shards = str(row.first) if row.first == row.last else f"{row.first}-{row.last}"
    sizes = (
        row.state_bytes,
        row.persistent_bytes,
        row.device_bytes,
        row.upper_bytes,
    )
    return (shards, f"{row.ranks:,}", VERDICT_WORDS[row.verdict], *(format_bytes(size, unit) for size in sizes))
