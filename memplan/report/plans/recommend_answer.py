"""The answer of ``memplan recommend``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from memplan.plan.suggested.recent_models import RECENT_MONTHS
from memplan.report.document import Document, Table
from memplan.report.plans.plan_answer import stack_data, stack_words
from memplan.training.resolved import TrainingSetup
from memplan.units import format_bytes, format_count

if TYPE_CHECKING:
    from memplan.plan.sizes.largest_model import LargestModel
    from memplan.plan.suggested.suggested_configs import SuggestedConfigs

TIMED_BY = "memplan lab precision --device cuda --width 4096"

HOW = (
    "qlora and lora train adapters alone, on 4-bit and on 16-bit weights. established: of the configs that work or are "
    "proven, the one that holds the largest model with all of its weights trained. experimental: one that holds a larger "
    "model still and trained within 5 % of fp32's loss, in a tiny model only (memplan show CONFIG). Every model was planned "
    "whole and FITS at the upper end, with the allocator's reserve as a share, which memplan fit simulates."
)

FIVE = 5
PLAIN = ("fp32", "bf16", "fp16")
"""Precisions that every product of a run has in any case; of narrower ones the record says which were rounded."""

RUN_NATIVELY = ("fp32", "bf16", "int8-native")

Released = Mapping[str, str | None]
"""Name of a model -> day or month of its release."""
POOLED = "Memory of several GPUs is pooled: everything sharded evenly, nothing replicated, no communication buffers."


def recommend_document(
    suggestions: Sequence[SuggestedConfigs],
    setup: TrainingSetup,
    precision: Mapping[str, Any] | None,
    on_gpu: Mapping[str, Any] | None,
    unit: str,
    recent: tuple[str, Released] = ("", MappingProxyType({})),
) -> Document:
    """Return the suggestions.

    Args:
        setup: Any of the setups: its batch, sequence and checkpointing are said.
        precision: The record of the experiment on precisions, or None where it is not at hand.
        on_gpu: That of the same experiment on a GPU.
        unit: Of bytes; empty for the one that suits each.
        recent: The month since when models are recommended, and the release of each.
    """
    since, released = recent
    rows = sorted(suggestions, key=lambda row: (-row.device.usable_bytes(0), row.device.name))
    config = setup.config
    head = (
        f"What to train with, by GPU, at micro-batch {config.micro_batch_size}, sequence {config.sequence_length}, "
        f"checkpointing {config.checkpointing_words}; {stack_words([setup])}"
    )
    headers = (
        "gpu",
        ">usable",
        *(choice.setup.name for choice in rows[0].adapters),
        "established",
        "its model",
        "experimental",
        "its model",
        "Newton-Schulz",
        "faster on paper",
    )
    cells = tuple(_row(row, unit, released) for row in rows)
    names = (header.lstrip(">") for header in headers)
    table = (
        Table(headers, cells) if len(cells) > 1 else Table(("what", "answer"), tuple(zip(names, cells[0], strict=True)))
    )
    pooled = POOLED if any(row.device.count > 1 for row in rows) else ""
    data = {"schema": "memplan/recommend/1", "rows": [_data(row, recent) for row in rows]}
    how = f"{HOW} {which(since)}".rstrip()
    blocks = (head, table, how, pooled, precision_text(precision, on_gpu), _sentence(rows, released))
    return Document(data, blocks)


def which(since: str) -> str:
    """Return which models were weighed, or nothing where none has a date."""
    months = f"{RECENT_MONTHS} months before the newest of the catalog"
    return f"Models released since {since} were considered, {months} (memplan list models)." if since else ""


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
            f"{times_shown['fp32']} in fp32, and {times_shown['int8-native']} with X X^T in INT8 and the rest in fp32, as the "
            f"published tables have it (memplan tables). {open_question}"
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


def _row(row: SuggestedConfigs, unit: str, released: Released) -> tuple[str, ...]:
    return (
        row.device.counted_name,
        format_bytes(row.device.usable_bytes(0), unit),
        *(model_words(choice, released) for choice in row.adapters),
        *_pair(row.established, released),
        *_pair(row.experimental, released),
        row.precision,
        ", ".join(f"{name} {float(ratio):.1f}x" for name, ratio in row.faster),
    )


def _pair(row: LargestModel | None, released: Released) -> tuple[str, str]:
    return ("-", "") if row is None else (row.setup.label, model_words(row, released))


def model_words(row: LargestModel, released: Released) -> str:
    """Return the largest model with its size and its release, or a dash."""
    if row.largest_fitting is None:
        return "-"
    date = released.get(row.largest_fitting)
    return f"{row.largest_fitting} ({format_count(row.largest_fitting_parameters)}{f', {date}' if date else ''})"


def _data(row: SuggestedConfigs, recent: tuple[str, Released]) -> dict[str, Any]:
    since, released = recent
    return {
        "gpu": row.device.name,
        "count": row.device.count,
        "usable_bytes": row.device.usable_bytes(0),
        "adapters": [_choice(choice, released) for choice in row.adapters if choice.largest_fitting is not None],
        "established": _choice(row.established, released),
        "experimental": _choice(row.experimental, released),
        "released_since": since,
        "newton_schulz": row.precision,
        "faster_on_paper": {name: round(float(ratio), 3) for name, ratio in row.faster},
        "measured": False,
        "timed_by": TIMED_BY,
    }


def _choice(row: LargestModel | None, released: Released) -> dict[str, Any] | None:
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
        "released": released.get(row.largest_fitting or ""),
    }


def _sentence(rows: Sequence[SuggestedConfigs], released: Released) -> str:
    if len(rows) != 1:
        return f"{len(rows)} GPUs. Settings beyond the shipped configs: memplan suggest MODEL --gpu NAME"
    row = rows[0]
    tuned = next((choice for choice in row.adapters if choice.largest_fitting is not None), None)
    first = f"fine-tune up to {_words(tuned, released)}; " if tuned is not None else ""
    whole = _words(row.established, released)
    sure = f"train all weights of up to {whole}" if whole else "no shipped config that works holds a recent model whole"
    bold = _words(row.experimental, released)
    return f"On {row.device.name}: {first}{sure}" + (f"; as an experiment, of {bold}." if bold else ".")


def _words(row: LargestModel | None, released: Released) -> str:
    if row is None:
        return ""
    return f"{model_words(row, released)} with {row.setup.label} (learning: {row.setup.config.status})"
