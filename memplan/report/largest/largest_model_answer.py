"""The answers of ``memplan max`` and ``memplan where``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from memplan.documents.frozen_values import dataclass
from memplan.model.model import Model
from memplan.report.document import Document, Table
from memplan.report.plans.plan_answer import sized, stack_data, stack_words
from memplan.training.resolved import TrainingSetup
from memplan.units import format_bytes, format_count, format_fraction

if TYPE_CHECKING:
    from memplan.plan.sizes.largest_model import LargestModel
    from memplan.plan.sizes.placements import Placement, Placements

WHY = (
    "max_parameters is the uniform bound: usable bytes over bytes per parameter, with every parameter charged as a hidden "
    "matrix and nothing left for activations, logits, optimizer scratch, allocator or CUDA context. largest_fitting_model "
    "was planned whole, at the batch and sequence shown, with its embeddings in their own format; it FITS at the upper end, "
    "as memplan fit has it where one GPU is named, else with the allocator's reserve as a share. notes is what the notes, the published tables that memplan tables checks, printed by their own rule (0.80 of decimal "
    "GB, formats without their scales)."
)


NotesFigures = Mapping[tuple[str, str, int], int]
"""(config, GPU, how many of them) -> the parameters that the notes print."""


def max_document(models: Sequence[LargestModel], figures: NotesFigures, unit: str) -> Document:
    """Return the largest model for every device and setup.

    Args:
        models: For one setup after the other, every device.
    """
    ranked = sorted(models, key=lambda row: (-row.device.usable_bytes(0), row.device.name))
    data = [_max_data(row, figures) for row in ranked]
    rows = tuple(_max_row(row, item, unit) for row, item in zip(ranked, data, strict=True))
    headers = ("gpu", ">usable", "config", "learning", ">B/param", ">max_parameters", ">notes", "largest_fitting_model")
    batch = models[0].setup.config
    checkpointing = " or ".join(dict.fromkeys(row.setup.config.checkpointing_words for row in models))
    head = f"Largest model by GPU at micro-batch {batch.micro_batch_size}, sequence {batch.sequence_length}, checkpointing {checkpointing}; {stack_words(row.setup for row in models)}"
    blocks: list[Table | str] = [head, Table(headers, rows), WHY]
    if any(row.device.count > 1 for row in models):
        blocks.append(
            "Memory of several GPUs is pooled, which is an upper bound: everything sharded evenly, nothing replicated, no communication buffers."
        )
    blocks.append(_max_sentence(ranked))
    return Document({"schema": "memplan/max/1", "rows": data}, tuple(blocks))


def _max_data(row: LargestModel, figures: NotesFigures) -> dict[str, Any]:
    data: dict[str, Any] = {
        "gpu": row.device.name,
        "count": row.device.count,
        "config": row.setup.name,
        "stack": stack_data(row.setup.stack),
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
        row.device.counted_name,
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
    with_config = f"{best.largest_fitting} with {best.setup.name}"
    if best.device.count == 1:
        return f"The largest catalog model that fits is {with_config} on {best.device.name}."
    return (
        f"At most {with_config} on {best.device.counted_name}: a bound, of pooled memory; "
        "memplan fit --gpus plans a job that is shared out."
    )


@dataclass(frozen=True, slots=True)
class Prices:
    """What an hour of one GPU costs, as a user says."""

    # Price by catalog name; GPUs that are not in it have none.
    hourly: Mapping[str, Fraction] = field(default_factory=dict)
    currency: str = ""  # What the prices are in, or nothing

    def text(self, amount: Fraction) -> str:
        """Return an amount with two decimals and its currency."""
        cents = (200 * amount.numerator + amount.denominator) // (2 * amount.denominator)
        return f"{cents // 100}.{cents % 100:02d} {self.currency}".rstrip()


def where_document(
    model: Model, setup: TrainingSetup, placements: Placements, unit: str, prices: Prices | None = None
) -> Document:
    """Return the fewest GPUs of each kind for a job: the fewest first, or with prices the cheapest.

    Counts that are only bounds come last, whatever they cost, and are never the answer.
    """
    hourly, config = prices.hourly if prices else {}, setup.config
    ordered = places_in_order(placements, prices)
    costs = [row.count * hourly[row.device.name] if row.device.name in hourly else None for row in ordered]
    data = [_where_data(row) for row in ordered]
    if prices is not None:
        data = [item | {"price_per_hour": cost and float(cost)} for item, cost in zip(data, costs, strict=True)]
    bounds = () if all(row.bound is None for row in ordered) else (">bound",)
    rows = tuple(_where_row(row, cost, unit, prices, bool(bounds)) for row, cost in zip(ordered, costs, strict=True))
    job = f"{sized(model)} with {setup.name}"
    usable = ">usable in all" if placements.refusal else ">usable each"
    blocks: list[Table | str] = [
        f"{job}, {stack_words([setup])}: the fewest GPUs of each kind, at micro-batch {config.micro_batch_size}, sequence {config.sequence_length}",
        Table(
            (*(() if prices is None else (">per hour",)), ">count", *bounds, "gpu", usable, ">device", ">upper end"),
            rows,
        ),
        _how_shared(ordered, placements.refusal),
        _where_sentence(job, ordered, costs, prices) if ordered else _nowhere(job, setup, placements.most),
    ]
    return Document(
        {
            "schema": "memplan/where/1",
            "model": model.spec.name,
            "config": setup.name,
            "stack": stack_data(setup.stack),
            "rows": data,
        },
        tuple(block for block in blocks if block),
        1 if not ordered else 3 if ordered[0].pooled else 0,
    )


def places_in_order(placements: Placements, prices: Prices | None) -> list[Placement]:
    """Return placements, the fewest GPUs first, or with prices the cheapest."""
    hourly = prices.hourly if prices else {}
    return sorted(placements.rows, key=lambda row: _order(row, hourly))


def _order(row: Placement, hourly: Mapping[str, Fraction]) -> tuple[bool, bool, Fraction, int, int, str]:
    name = row.device.name
    cost = row.count * hourly.get(name, Fraction(0))
    return row.pooled, name not in hourly, cost, row.count, row.device.gpu.cuda_total_bytes, name


def _where_data(row: Placement) -> dict[str, Any]:
    return {
        "gpu": row.device.name,
        "count": row.count,
        "pooled": row.pooled,
        "bound": row.bound,
        "tensor": row.plan.setup.config.parallel.tensor,
        "usable_bytes": row.plan.usable_bytes,
        "device_bytes": row.plan.device_bytes,
        "upper_bytes": row.plan.upper_bytes,
        "verdict": "bound" if row.pooled else row.plan.verdict,
    }


def _where_row(
    row: Placement, cost: Fraction | None, unit: str, prices: Prices | None, bounds: bool
) -> tuple[str, ...]:
    least = ">= " if row.pooled else ""
    sizes = (row.plan.usable_bytes, row.plan.device_bytes, row.plan.most_bytes)
    price = () if prices is None else ("" if cost is None else f"{least}{prices.text(cost)}",)
    bound = ["" if row.bound is None else str(row.bound)] if bounds else []
    names = (f"{least}{row.count}", *bound, f"{row.device.name}{row.layout}")
    return (*price, *names, *(format_bytes(size, unit) for size in sizes))


def _how_shared(rows: Sequence[Placement], refusal: str) -> str:
    """Return what several GPUs mean in an answer that has them."""
    if all(row.count == 1 for row in rows):
        return ""
    if refusal:
        return (
            f"Not planned on several GPUs: {refusal}. Counts beyond 1 are lower bounds (>=): their memory is pooled, "
            "everything sharded evenly, nothing replicated, no communication buffers."
        )
    edges = [row.count for row in rows if row.edge]
    edge = f" From {min(edges)} GPUs on not every smaller number was tried: one fewer does not fit." if edges else ""
    return (
        "Several GPUs: weights, gradients and optimizer states sharded, each GPU with a micro-batch of its own, as "
        f"memplan fit --gpus plans them; bytes are one GPU's.{edge} bound: the fewest whose memory together would do, "
        "everything sharded evenly, nothing replicated."
    )


def _nowhere(job: str, setup: TrainingSetup, most: int) -> str:
    """Return that a job fits nowhere, and what no number of GPUs divides."""
    freed = setup.config.activation_checkpointing != "full"
    change = "--checkpointing full keeps a layer's input alone" if freed else "memplan fit --gpus N lists them"
    return (
        f"NO: {job} fits on no number of these GPUs, up to {most:,} of a kind: each has the activations of its own "
        f"micro-batch, and what is gathered or not sharded; {change}."
    )


def _where_sentence(
    job: str, rows: Sequence[Placement], costs: Sequence[Fraction | None], prices: Prices | None
) -> str:
    first, cost = rows[0], costs[0]
    if first.pooled:
        return f"UNKNOWN: {job} fits on none of these GPUs alone, and is not planned on several."
    if prices is not None and cost is not None:
        return f"FITS: {job} costs least on {first.count} x {first.device.name}: {prices.text(cost)} an hour."
    if first.count == 1:
        return f"FITS: {job} fits on one {first.device.name}, the smallest single GPU that holds it."
    least = "and not on one fewer" if first.edge else "the fewest"
    return f"FITS: {job} fits on {first.count} x {first.device.name}, {least}; on no single GPU."
