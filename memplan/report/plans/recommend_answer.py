"""The answer of ``memplan recommend``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from memplan.report.document import Document, Table
from memplan.report.stack_words import stack_data, stack_words
from memplan.units import format_bytes, format_count

if TYPE_CHECKING:
    from memplan.plan.largest_model import LargestModel
    from memplan.plan.suggested.suggested_configs import SuggestedConfigs
    from memplan.training.resolved import TrainingSetup

TIMED_BY = "memplan lab precision --device cuda --width 4096"

HOW = (
    "established: of the configs that work or are proven, the one that holds the largest catalog model with all of its "
    "weights trained. experimental: one that holds a larger model still and trained within 5 % of fp32's loss, in a tiny "
    "model only (memplan show CONFIG). Every model was planned whole and FITS at the upper end."
)

FIVE = 5
PLAIN = ("fp32", "bf16", "fp16")
"""Precisions that every product of a run has in any case; of narrower ones the record says which were rounded."""

RUN_NATIVELY = ("fp32", "bf16", "int8-native")

POOLED = "Memory of several GPUs is pooled: everything sharded evenly, nothing replicated, no communication buffers."


def recommend_document(
    suggestions: Sequence[SuggestedConfigs],
    setup: TrainingSetup,
    precision: Mapping[str, Any] | None,
    on_gpu: Mapping[str, Any] | None,
    unit: str,
) -> Document:
    """Return the suggestions.

    Args:
        suggestions: One for each GPU.
        setup: Any of the setups: its batch, sequence and checkpointing are said.
        precision: The record of the experiment on precisions, or None where it is not at hand.
        on_gpu: That of the same experiment on a GPU.
        unit: Of bytes; empty for the one that suits each.
    """
    rows = sorted(suggestions, key=lambda row: (-row.device.usable_bytes(0), row.device.name))
    config = setup.config
    head = (
        f"What to train with, by GPU, at micro-batch {config.micro_batch_size}, sequence {config.sequence_length}, "
        f"checkpointing {config.activation_checkpointing}; {stack_words([setup])}"
    )
    headers = (
        "gpu",
        ">usable",
        "established",
        "its model",
        "experimental",
        "its model",
        "Newton-Schulz",
        "faster on paper",
    )
    cells = tuple(_row(row, unit) for row in rows)
    names = (header.lstrip(">") for header in headers)
    table = (
        Table(headers, cells) if len(cells) > 1 else Table(("what", "answer"), tuple(zip(names, cells[0], strict=True)))
    )
    pooled = POOLED if any(row.device.count > 1 for row in rows) else ""
    data = {"schema": "memplan/recommend/1", "rows": [_data(row) for row in rows]}
    return Document(data, (head, table, HOW, pooled, precision_text(precision, on_gpu), _sentence(rows)))


def precision_text(record: Mapping[str, Any] | None, on_gpu: Mapping[str, Any] | None = None) -> str:
    """Return what is known of Newton-Schulz in narrow precisions, and what would settle the rest."""
    times = {} if on_gpu is None else _times(on_gpu)
    open_question = (
        "Whether FP8, or INT8 in every product, makes Newton-Schulz faster on a GPU that has them (Hopper, Blackwell, Ada) "
        f"has not been measured: {TIMED_BY} times INT8 in X X^T alone, and emulates FP8"
    )
    if times and on_gpu is not None:
        side, taken = max(times.items())
        times_shown = {name: f"{seconds * 1e3:.1f} ms" for name, seconds in taken.items()}
        open_question = (
            f"On one {on_gpu['machine'].split(',')[0]} five iterations at {side} x {side} take {times_shown['bf16']} in bf16, "
            f"{times_shown['fp32']} in fp32, and {times_shown['int8-native']} with X X^T in INT8 and the rest in fp32, as the notes have "
            f"it. {open_question}"
        )
    errors = {} if record is None else _errors(record)
    if "bf16" not in errors:
        return f"Newton-Schulz: bf16 where the GPU has it. {open_question}"
    shown = ", ".join(f"{name} {value:.3g}" for name, value in errors.items())
    return (
        "Newton-Schulz: bf16 where the GPU has it. Frobenius error after five iterations with every product in one "
        f"precision (memplan lab show precision): {shown}. {open_question}"
    )


def _times(record: Mapping[str, Any]) -> dict[int, dict[str, float]]:
    """Return by width the least seconds of each precision that a GPU runs itself, where all were run."""
    by_width: dict[int, dict[str, float]] = {}
    for row in record["rows"]:
        if row["iterations"] == FIVE and row["precision"] in RUN_NATIVELY and row["seconds"]:
            by_width.setdefault(row["rows"], {})[row["precision"]] = row["seconds"]["low"]
    return {width: taken for width, taken in by_width.items() if len(taken) == len(RUN_NATIVELY)}


def _errors(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the mean Frobenius error of each precision in all products, at the width that has the most of them."""
    last = [row for row in record["rows"] if row["iterations"] == FIVE and row["frobenius"]]
    shown = [row for row in last if row["products"] == ("input" if row["precision"] in PLAIN else "all")]
    widths = Counter(row["rows"] for row in shown)
    width = max(widths, key=lambda side: (widths[side], side), default=0)
    return {row["precision"]: row["frobenius"]["mean"] for row in shown if row["rows"] == width}


def _row(row: SuggestedConfigs, unit: str) -> tuple[str, ...]:
    return (
        row.device.counted_name,
        format_bytes(row.device.usable_bytes(0), unit),
        *_pair(row.established),
        *_pair(row.experimental),
        row.precision,
        ", ".join(f"{name} {float(ratio):.1f}x" for name, ratio in row.faster),
    )


def _pair(row: LargestModel | None) -> tuple[str, str]:
    if row is None:
        return "-", ""
    return row.setup.label, f"{row.largest_fitting} ({format_count(row.largest_fitting_parameters)})"


def _data(row: SuggestedConfigs) -> dict[str, Any]:
    return {
        "gpu": row.device.name,
        "count": row.device.count,
        "usable_bytes": row.device.usable_bytes(0),
        "established": _choice(row.established),
        "experimental": _choice(row.experimental),
        "newton_schulz": row.precision,
        "faster_on_paper": {name: round(float(ratio), 3) for name, ratio in row.faster},
        "measured": False,
        "timed_by": TIMED_BY,
    }


def _choice(row: LargestModel | None) -> dict[str, Any] | None:
    if row is None:
        return None
    config = row.setup.config
    return {
        "config": row.setup.name,
        "stack": stack_data(row.setup.stack),
        "status": config.status,
        "evidence": config.evidence,
        "model": row.largest_fitting,
        "parameters": row.largest_fitting_parameters,
    }


def _sentence(rows: Sequence[SuggestedConfigs]) -> str:
    if len(rows) != 1:
        return f"{len(rows)} GPUs. Settings beyond the shipped configs: memplan suggest MODEL --gpu NAME"
    row = rows[0]
    sure = _words(row.established) or "no shipped config that works holds a catalog model whole"
    bold = _words(row.experimental)
    return f"On {row.device.name}: {sure}" + (f"; as an experiment, {bold}." if bold else ".")


def _words(row: LargestModel | None) -> str:
    if row is None:
        return ""
    return f"{row.largest_fitting} with {row.setup.label} (learning: {row.setup.config.status})"
