"""The answers of ``memplan max`` and ``memplan where``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from memplan.catalog.catalog import Catalog
from memplan.inverse import LargestModel, fewest_devices, largest_models
from memplan.model.inventory import parameter_count
from memplan.model.model import Model
from memplan.planner import CompiledPlan, Device, devices_for
from memplan.published.rounding import numbers
from memplan.published.schema import Library
from memplan.report.document import Document, Table
from memplan.setup import TrainingSetup
from memplan.training.config import MAXIMUM_GPUS
from memplan.units import format_bytes, format_count, format_fraction

PUBLISHED = "s000.t02"
"""The notes' table of the largest parameter count for each GPU."""

WHY = (
    "max_parameters is the uniform bound: usable bytes over bytes per parameter, with every parameter charged as a hidden "
    "matrix and nothing left for activations, logits, optimizer scratch, allocator or CUDA context. largest_fitting_model "
    "was planned whole, at the batch and sequence shown, with its embeddings in their own format; it FITS at the upper end. "
    "notes is what the notes printed, by their own rule (0.80 of decimal GB, formats without their scales)."
)


NotesFigures = Mapping[tuple[str, str, int], int]
"""(config, GPU, how many of them) -> the parameters that the notes print."""


def notes_figures(catalog: Catalog) -> NotesFigures:
    """Return what the notes print as the largest parameter counts."""
    library = Library(catalog.root)
    table = library.tables[PUBLISHED]
    found = {}
    for cell in table.cells:
        origin = library.origin(table, cell)
        key = (origin.config or "", origin.gpu or "", origin.count or 1)
        found[key] = int(numbers(cell.printed)[0].value)
    return found


def max_document(
    models: Sequence[tuple[str, Model]],
    setups: Sequence[TrainingSetup],
    devices: Sequence[Device],
    catalog: Catalog,
    unit: str,
) -> Document:
    """Return the largest model for every device and setup."""
    figures = notes_figures(catalog)
    found = [row for setup in setups for row in largest_models(models, setup, devices)]
    found.sort(key=lambda row: (-row.device.usable_bytes(0), row.device.name, setups.index(row.setup)))
    data = [_max_data(row, figures) for row in found]
    rows = tuple(_max_row(row, item, unit) for row, item in zip(found, data, strict=True))
    headers = (
        "gpu",
        ">usable",
        "config",
        "status",
        ">B/param",
        ">max_parameters",
        ">notes",
        "largest_fitting_model",
    )
    batch = setups[0].config
    head = f"Largest model by GPU at micro-batch {batch.micro_batch_size}, sequence {batch.sequence_length}, checkpointing {batch.activation_checkpointing}"
    blocks: list[Table | str] = [head, Table(headers, rows), WHY]
    if any(device.count > 1 for device in devices):
        blocks.append(
            "Memory of several GPUs is pooled: everything sharded evenly, nothing replicated, no communication buffers."
        )
    blocks.append(_max_sentence(found))
    return Document({"schema": "memplan/max/1", "rows": data}, tuple(blocks))


def _max_data(row: LargestModel, figures: NotesFigures) -> dict[str, Any]:
    data: dict[str, Any] = {
        "gpu": row.device.name,
        "count": row.device.count,
        "config": row.setup.name,
        "status": row.setup.config.status,
        "usable_bytes": row.device.usable_bytes(row.setup.reserve_bytes),
        "bytes_per_parameter": float(row.bytes_per_parameter),
        "max_parameters": row.max_parameters,
        "largest_fitting_model": row.largest_fitting,
        "largest_fitting_parameters": row.largest_fitting_parameters,
    }
    shown = "" if row.setup.changed else row.setup.name
    printed = figures.get((shown, row.device.name, row.device.count))
    if printed is not None:
        data["notes_max_parameters"] = printed
    return data


def _max_row(row: LargestModel, data: Mapping[str, Any], unit: str) -> tuple[str, ...]:
    notes = data.get("notes_max_parameters")
    return (
        row.device.name if row.device.count == 1 else f"{row.device.count} x {row.device.name}",
        format_bytes(data["usable_bytes"], unit),
        row.setup.label,
        row.setup.config.status,
        format_fraction(row.bytes_per_parameter),
        format_count(row.max_parameters),
        format_count(notes) if notes else "",
        f"{row.largest_fitting} ({format_count(row.largest_fitting_parameters)})" if row.largest_fitting else "none",
    )


def _max_sentence(rows: Sequence[LargestModel]) -> str:
    best = max(rows, key=lambda row: (row.largest_fitting_parameters, -row.device.memory_bytes))
    if best.largest_fitting is None:
        return "No catalog model fits on any of these GPUs."
    on = best.device.name if best.device.count == 1 else f"{best.device.count} x {best.device.name}"
    return f"The largest catalog model that fits is {best.largest_fitting} with {best.setup.name} on {on}."


@dataclass(frozen=True, slots=True)
class Prices:
    """What an hour of one GPU costs, as a user says.

    Attributes:
        hourly: Price by catalog name; GPUs that are not in it have none.
        currency: What the prices are in, or nothing.
    """

    hourly: Mapping[str, Fraction] = field(default_factory=dict)
    currency: str = ""

    def text(self, amount: Fraction) -> str:
        """Return an amount with two decimals and its currency."""
        cents = (200 * amount.numerator + amount.denominator) // (2 * amount.denominator)
        return f"{cents // 100}.{cents % 100:02d} {self.currency}".rstrip()


def where_document(
    model: Model,
    setup: TrainingSetup,
    devices: Sequence[Device],
    catalog: Catalog,
    unit: str,
    prices: Prices | None = None,
) -> Document:
    """Return the fewest GPUs of each kind for a job: the fewest first, or with prices the cheapest."""
    del catalog
    hourly = prices.hourly if prices else {}
    plan = CompiledPlan(model, setup)
    found = [(device, fewest_devices(plan, device)) for device in devices_for(setup, devices)]
    fitting = sorted(
        ((device, count) for device, count in found if count is not None),
        key=lambda item: (
            item[0].name not in hourly,
            item[1] * hourly.get(item[0].name, 0),
            item[1],
            item[0].gpu.cuda_total_bytes,
            item[0].name,
        ),
    )
    data = [_where_data(plan, device, count) for device, count in fitting]
    costs = [count * hourly[device.name] if device.name in hourly else None for device, count in fitting]
    rows = tuple(
        (
            *(() if prices is None else ("" if cost is None else prices.text(cost),)),
            str(item["count"]),
            str(item["gpu"]),
            format_bytes(item["usable_bytes"], unit),
            format_bytes(item["device_bytes"], unit),
            format_bytes(item["upper_bytes"], unit),
        )
        for item, cost in zip(data, costs, strict=True)
    )
    if prices is not None:
        data = [item | {"price_per_hour": cost and float(cost)} for item, cost in zip(data, costs, strict=True)]
    name = f"{model.spec.name} ({format_count(parameter_count(model.inventory))} parameters) with {setup.name}"
    blocks: list[Table | str] = [
        f"{name}: the fewest GPUs of each kind, at micro-batch {setup.config.micro_batch_size}, sequence {setup.config.sequence_length}",
        Table(
            (*(() if prices is None else (">per hour",)), ">count", "gpu", ">usable in all", ">device", ">upper end"),
            rows,
        ),
        "With more than one GPU the memory is pooled: everything sharded evenly, nothing replicated, no communication buffers. "
        "Such a count is a lower bound.",
        _where_sentence(name, fitting) if prices is None else _priced_sentence(name, fitting, costs, prices),
    ]
    return Document(
        {"schema": "memplan/where/1", "model": model.spec.name, "config": setup.name, "rows": data},
        tuple(blocks),
        0 if fitting else 1,
    )


def _where_data(plan: CompiledPlan, device: Device, count: int) -> dict[str, Any]:
    answer = plan.evaluate(Device(device.gpu, device.name, count))
    return {
        "gpu": device.name,
        "count": count,
        "pooled": count > 1,
        "usable_bytes": answer.usable_bytes,
        "device_bytes": answer.device_bytes,
        "upper_bytes": answer.upper_bytes,
        "verdict": answer.verdict,
    }


def _where_sentence(name: str, fitting: Sequence[tuple[Device, int]]) -> str:
    if not fitting:
        return f"NO: {name} fits on no number of these GPUs up to {MAXIMUM_GPUS:,}."
    device, count = fitting[0]
    if count == 1:
        return f"FITS: {name} fits on one {device.name}, the smallest single GPU that holds it."
    return f"FITS: {name} fits on {count} x {device.name} with their memory pooled, the fewest; on no single GPU."


def _priced_sentence(
    name: str, fitting: Sequence[tuple[Device, int]], costs: Sequence[Fraction | None], prices: Prices
) -> str:
    """Return the cheapest, where any that fits has a price."""
    if not fitting or costs[0] is None:
        return _where_sentence(name, fitting)
    device, count = fitting[0]
    pooled = ", with their memory pooled" if count > 1 else ""
    return f"FITS: {name} costs least on {count} x {device.name}{pooled}: {prices.text(costs[0])} an hour."
