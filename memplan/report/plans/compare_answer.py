"""The answer of ``memplan compare``: plans side by side, what differs marked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from memplan.plan.components import COMPONENTS
from memplan.report.document import Document, Table
from memplan.report.plans.plan_answer import exit_code, plan_data, sized, stack_words
from memplan.units import format_bytes

if TYPE_CHECKING:
    from memplan.plan.memory_plan import MemoryPlan

MARK = "*"
Line = tuple[str, tuple[str, ...], tuple[int, ...]]
"""What a row is of, its cells, and its bytes where it has some."""


def compare_document(
    plans: Sequence[MemoryPlan], catalog_hash: str, unit: str, *, several: bool, strict: bool
) -> Document:
    """Return plans of one model side by side.

    Args:
        plans: In the order of the columns.
        several: Whether more than one device was named, so that every column says its own.
    """
    rows = [plan_data(plan, catalog_hash) for plan in plans]
    settings = list(_settings(rows))
    model = plans[0].model
    data = {
        "schema": "memplan/compare/1",
        "rows": rows,
        "differences": [{"key": key, "values": list(values)} for key, values in settings],
    }
    titles = tuple(f">{plan.setup.name}{f' on {plan.device.name}' if several else ''}" for plan in plans)
    where = "" if several else f" on {plans[0].device.name}"
    blocks = (
        f"{sized(model)}{where}; {stack_words(plan.setup for plan in plans)}; {MARK} marks what differs",
        Table(("", "bytes", *titles), tuple(_marked(_lines(plans, unit), unit))),
        Table(("", "setting", *titles), tuple((MARK, key, *map(_shown, values)) for key, values in settings)),
        _sentence(plans),
    )
    code = 0 if any(exit_code(plan, strict) == 0 for plan in plans) else 1
    return Document(data, blocks if settings else (*blocks[:2], blocks[3]), code)


def _lines(plans: Sequence[MemoryPlan], unit: str) -> Iterator[Line]:
    """Yield the verdicts, every component that any plan has, the totals, and the peak's instant."""
    yield "verdict", tuple(plan.verdict.upper() for plan in plans), ()
    columns = [{line.name: line.bytes for line in plan.components} for plan in plans]
    for name in COMPONENTS:
        if any(name in column for column in columns):
            sizes = tuple(column.get(name, 0) for column in columns)
            yield name, tuple(format_bytes(size, unit) for size in sizes), sizes
    full = any(
        plan.needed_bytes != plan.device_bytes for plan in plans
    )  # nearly: the allocator gives back what it caches
    needs = [("needs", "needed_bytes")] if full else []
    totals = (("device", "device_bytes"), ("upper end", "upper_bytes"), *needs, ("usable", "usable_bytes"))
    for name, attribute in totals:
        sizes = tuple(getattr(plan, attribute) for plan in plans)
        yield name, tuple(format_bytes(size, unit) for size in sizes), sizes
    yield "peak at", tuple(plan.peak.name for plan in plans), ()


def _marked(lines: Iterator[Line], unit: str) -> Iterator[tuple[str, ...]]:
    """Yield rows with a mark where columns differ; sizes that differ from the first carry by how much."""
    for name, cells, sizes in lines:
        differs = len(set(sizes or cells)) > 1
        shown = cells
        if differs and sizes:
            changes = ("", *(_change(size - sizes[0], unit) for size in sizes[1:]))
            shown = tuple(f"{cell}{change}" for cell, change in zip(cells, changes, strict=True))
        yield (MARK if differs else "", name, *shown)


def _change(difference: int, unit: str) -> str:
    if not difference:
        return ""
    sign = "+" if difference > 0 else ""
    return f" ({sign}{format_bytes(difference, unit)})"


def _settings(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield the keys of training configs in which plans differ, dotted, with every plan's value."""
    flat = [dict(_flat(row["training"])) for row in rows]
    keys = dict.fromkeys(key for column in flat for key in column)
    for key in keys:
        values = tuple(column.get(key) for column in flat)
        if key not in ("description", "evidence") and any(value != values[0] for value in values):
            yield key, values


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        if isinstance(item, Mapping):
            yield from _flat(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", list(item) if isinstance(item, tuple) else item


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return (
        ", ".join(map(str, value))
        if isinstance(value, list)
        else str(value).lower()
        if isinstance(value, bool)
        else str(value)
    )


def _sentence(plans: Sequence[MemoryPlan]) -> str:
    several = len({plan.device.name for plan in plans}) > 1
    names = [f"{plan.setup.name} on {plan.device.name}" if several else plan.setup.name for plan in plans]
    least, name = min(zip(plans, names, strict=True), key=lambda pair: pair[0].needed_bytes)
    needs = f"{name} needs the least, about {format_bytes(least.needed_bytes)}"
    fitting = [own for plan, own in zip(plans, names, strict=True) if plan.verdict == "fits"]
    return f"FITS: {', '.join(fitting)}; {needs}." if fitting else f"None of {len(plans)} fits for sure; {needs}."
