"""The answer of ``memplan max --for batch|sequence|lora-rank|layers``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from memplan.model.model import Model
from memplan.report.document import Document, Table
from memplan.report.plans.frontier_answer import answer_text
from memplan.report.plans.plan_answer import BY_SHARE, of_each, sized, stack_data, stack_words
from memplan.training.resolved import TrainingSetup
from memplan.units import format_bytes

if TYPE_CHECKING:
    from memplan.solver.largest_per_device import Largest, Quantity

WORDS: dict[Quantity, str] = {
    "batch": "micro-batch",
    "sequence": "sequence length",
    "lora-rank": "adapter rank",
    "layers": "number of layers",
}


def largest_document(
    what: Quantity,
    model: Model,
    setup: TrainingSetup,
    largest: Sequence[Largest],
    unit: str,
    *,
    strict: bool,
    instead: Sequence[str] = (),
) -> Document:
    """Return the largest value on every device, the largest first; ``instead`` are configs that fit where this one does not."""
    rows = sorted(largest, key=lambda row: (-row.fits.value, row.device.gpu.cuda_total_bytes, row.device.name))
    data = {
        "schema": "memplan/largest/1",
        "for": what,
        "model": model.spec.name,
        "config": setup.name,
        "stack": stack_data(setup.stack),
        "rows": [_data(row, setup) for row in rows],
    }
    config = setup.config
    others = {
        "batch": f"micro-batch {config.micro_batch_size}",
        "sequence": f"sequence {config.sequence_length}",
        "checkpointing": f"checkpointing {config.checkpointing_words}",
    }
    at = ", ".join(text for key, text in others.items() if key != what)
    head = f"{sized(model)} with {setup.name}, {stack_words([setup])}: largest {WORDS[what]} at {at}"
    headers = ("gpu", f">{what} that FITS", ">upper end", ">with one more", ">usable", ">TIGHT up to")
    table = Table(headers, tuple(_row(row, setup, unit) for row in rows))
    good = any(row.fits.value or (row.tight.value and not strict) for row in rows)
    return Document(
        data, (head, table, _notes(what, model, rows), _sentence(what, model, setup, rows, instead)), 0 if good else 1
    )


def _data(row: Largest, setup: TrainingSetup) -> dict[str, Any]:
    plan, following = row.plan, row.following
    usable = (plan or following).usable_bytes if plan or following else 0  # type: ignore[union-attr]
    return {
        "gpu": row.device.name,
        "count": setup.config.parallel.gpus,
        "usable_bytes": usable,
        "value": row.fits.value,
        "tight_value": row.tight.value,
        "bounded": row.fits.bounded,
        "device_bytes": plan.device_bytes if plan else None,
        "upper_bytes": plan.upper_bytes if plan else None,
        "next_upper_bytes": following.upper_bytes if following else None,
    }


def _row(row: Largest, setup: TrainingSetup, unit: str) -> tuple[str, ...]:
    plan, following = row.plan, row.following
    known = plan or following
    return (
        of_each(row.device, setup),
        answer_text(row.fits),
        format_bytes(plan.most_bytes, unit) if plan else "",
        format_bytes(following.upper_bytes, unit) if following else "",
        format_bytes(known.usable_bytes, unit) if known else "",
        answer_text(row.tight),
    )


def is_simulated(row: Largest) -> bool:
    """Tell whether a row rests on the simulated reserve, as ``fit`` does."""
    plan = row.plan or row.following
    return plan is not None and plan.by_share is not None


def _notes(what: Quantity, model: Model, rows: Sequence[Largest]) -> tuple[str, ...]:
    notes = [] if all(map(is_simulated, rows)) else [BY_SHARE]
    if any(row.fits.bounded and row.fits.value for row in rows):
        notes.append("(limit): the largest value that memplan takes, whatever the memory.")
    made_for = model.spec.max_position_embeddings
    if what == "sequence" and made_for and any(row.fits.value > made_for for row in rows):
        notes.append(f"The model's max_position_embeddings is {made_for}; memory allows longer sequences.")
    if what == "layers":
        notes.append("Fewer layers are the model's first ones; more repeat its last one.")
    return tuple(notes)


def _sentence(
    what: Quantity, model: Model, setup: TrainingSetup, rows: Sequence[Largest], instead: Sequence[str]
) -> str:
    best = rows[0]
    if not best.fits.value:
        tight = max(rows, key=lambda row: row.tight.value)
        if tight.tight.value:
            return f"TIGHT: {WORDS[what]} {tight.tight.value} may just fit on {of_each(tight.device, setup)}; none FITS for sure."
        if best.fits.bounded:
            return f"NO: {model.spec.name} fits with no {WORDS[what]} in which completions leave room for a prompt."
        host = best.device.host_memory_bytes
        beside = "" if host is None else f" and {format_bytes(host)} of host memory"
        adapters = " or ".join(f"--{name}" for name in instead)
        hint = f" That trains all weights; adapters fit: add {adapters}." if adapters else ""
        return f"NO: {model.spec.name} does not fit even at {WORDS[what]} 1{beside}.{hint}"
    ending = "memplan takes no larger one" if best.fits.bounded else f"{best.fits.value + best.fits.apart} does not"
    return f"FITS: {WORDS[what]} {best.fits.value} fits on {of_each(best.device, setup)}, and {ending}."
