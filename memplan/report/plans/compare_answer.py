"""The answer of ``memplan compare``: plans side by side, what differs marked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from memplan.catalog.catalog import Catalog
from memplan.model.inventory import parameter_count
from memplan.model.model import Model
from memplan.plan.planner import COMPONENTS, CompiledPlan, Device, MemoryPlan
from memplan.report.document import Document, Table
from memplan.report.plans.plan_answer import VERDICT_WORDS, components, exit_code, plan_data
from memplan.training.resolved import TrainingSetup
from memplan.units import format_bytes, format_count

MARK = "*"
Line = tuple[str, tuple[str, ...], tuple[int, ...]]
"""What a row is of, its cells, and its bytes where it has some."""


def compare_document(
    model: Model,
    setups: Sequence[TrainingSetup],
    devices: Sequence[Device],
    catalog: Catalog,
    unit: str,
    *,
    strict: bool,
) -> Document:
    """Return every config on every device, in the order given: configs first, then devices."""
    compiled = [CompiledPlan(model, setup) for setup in setups]
    plans = [plan.evaluate(device) for device in devices for plan in compiled]
    rows = [plan_data(plan, catalog.hash) for plan in plans]
    settings = list(_settings(rows))
    data = {
        "schema": "memplan/compare/1",
        "rows": rows,
        "differences": [{"key": key, "values": list(values)} for key, values in settings],
    }
    several = len(devices) > 1
    titles = tuple(f">{plan.setup.name}{f' on {plan.device.name}' if several else ''}" for plan in plans)
    where = "" if several else f" on {devices[0].name}"
    blocks = (
        f"{model.spec.name} ({format_count(parameter_count(model.inventory))} parameters){where}; {MARK} marks what differs",
        Table(("", "bytes", *titles), tuple(_marked(_lines(plans, unit), unit))),
        Table(("", "setting", *titles), tuple((MARK, key, *map(_shown, values)) for key, values in settings)),
        _sentence(plans),
    )
    code = 0 if any(exit_code(plan, strict) == 0 for plan in plans) else 1
    return Document(data, blocks if settings else (*blocks[:2], blocks[3]), code)


def _lines(plans: Sequence[MemoryPlan], unit: str) -> Iterator[Line]:
    """Yield the verdicts, every component that any plan has, the totals, and the peak's instant."""
    yield "verdict", tuple(VERDICT_WORDS[plan.verdict] for plan in plans), ()
    found = [{c.name: c.bytes for c in components(plan)} for plan in plans]
    for name in COMPONENTS:
        if any(name in column for column in found):
            sizes = tuple(column.get(name, 0) for column in found)
            yield name, tuple(format_bytes(size, unit) for size in sizes), sizes
    for name, attribute in (("device", "device_bytes"), ("upper end", "upper_bytes"), ("usable", "usable_bytes")):
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
    fitting = [plan for plan in plans if plan.verdict == "fits"]
    least = min(plans, key=lambda plan: plan.device_bytes)
    name = f"{least.setup.name} on {least.device.name}"
    if not fitting:
        return f"None of {len(plans)} fits for sure; {name} needs the least, about {format_bytes(least.device_bytes)}."
    listed = ", ".join(f"{plan.setup.name} on {plan.device.name}" for plan in fitting)
    return f"FITS: {listed}. {name} needs the least, about {format_bytes(least.device_bytes)}."
