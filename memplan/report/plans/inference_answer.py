"""The answer of ``memplan fit --method inference``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import memplan
from memplan.documents.frozen_values import dataclass
from memplan.model.model import Model
from memplan.report.canvas import Canvas
from memplan.report.document import Block, Document, Table
from memplan.report.plans.plan_answer import model_data, sized
from memplan.units import format_bytes

if TYPE_CHECKING:
    from memplan.plan.inference.served_plan import Served
    from memplan.plan.memory_plan import Device


@dataclass(frozen=True, slots=True)
class ServedAnswer:
    """What is shown of a model that is served."""

    model: Model
    device: Device
    request: Mapping[str, Any]  # ``context``, ``concurrency``, ``kv_dtype``, ``weights`` and ``engine``
    served: Served
    largest_context: int
    largest_concurrency: int
    notes: tuple[str, ...]  # What is taken for granted, one sentence each
    smaller: Mapping[str, Served]  # The same in other weight formats, by name


def inference_document(answer: ServedAnswer, catalog_hash: str, unit: str, *, strict: bool) -> Document:
    """Return the components, how far context and concurrency go, and the verdict."""
    served = answer.served
    total = served.device_bytes
    head = (
        _verdict(answer, unit),
        f"       {answer.device.counted_name}, served, engine {answer.request['engine']}",
        f"{sized(answer.model, '')}, weights {answer.request['weights']}, cache {answer.request['kv_dtype']},",
        f"       context {answer.request['context']:,}, concurrency {answer.request['concurrency']:,}",
    )
    rows = [*served.components.items(), ("device", total)]
    table = Table(
        ("component", ">bytes", ">share"),
        tuple((name, format_bytes(size, unit), f"{100 * size / total:.1f} %") for name, size in rows),
    )
    reach = _reach(answer, unit)
    failed = served.verdict == "no" or (strict and served.verdict == "tight")
    notes = tuple(f"Assumed: {note}" for note in answer.notes)
    blocks = (head, table, reach, notes, inference_sentence(answer))
    screen = partial(_screen, answer, unit, reach)
    return Document(_data(answer, catalog_hash), blocks, 1 if failed else 0, screen=screen)


def _reach(answer: ServedAnswer, unit: str) -> tuple[str, ...]:
    """Return how far context and concurrency go, and the weight formats in which it needs less."""
    at, context = answer.request["concurrency"], answer.request["context"]
    words = {"fits": "fits", "tight": "tight", "no": "not yet"}
    most = answer.model.spec.max_position_embeddings
    whole = ", all that the model has positions for" if answer.largest_context == most else ""
    return (
        f"largest context at concurrency {at:,}: {answer.largest_context:,} tokens{whole}"
        if answer.largest_context
        else f"no context fits at concurrency {at:,}",
        f"largest concurrency at context {context:,}: {answer.largest_concurrency:,} sequences"
        if answer.largest_concurrency
        else f"no sequence fits at context {context:,}",
        *(
            f"--weights {name}: {format_bytes(plan.device_bytes, unit or 'GiB')}, {words[plan.verdict]}"
            for name, plan in answer.smaller.items()
        ),
    )


def _verdict(answer: ServedAnswer, unit: str) -> str:
    served = answer.served
    sizes = (
        format_bytes(size, unit or "GiB") for size in (served.device_bytes, served.upper_bytes, served.usable_bytes)
    )
    expected, upper, usable = next(sizes), *(size.rpartition(" ")[0] for size in sizes)
    return f"{served.verdict.upper():<5}  {expected} expected, {upper} worst case, {usable} usable"


def _screen(answer: ServedAnswer, unit: str, reach: Sequence[str], canvas: Canvas) -> tuple[Block, ...]:
    """Return the answer on one screen: a bar for every component, a gauge, and how far it goes."""
    served, request = answer.served, answer.request
    usable, total = format_bytes(served.usable_bytes, unit or "GiB"), served.device_bytes
    percent = f"{_percent(total, served.usable_bytes)} % of {usable} usable"
    job = (
        sized(answer.model, ""),
        f"in {'a serving engine' if request['engine'] == 'serving' else request['engine']}",
        f"weights {request['weights']}",
        f"cache {request['kv_dtype']}",
        f"context {request['context']:,}",
        f"concurrency {request['concurrency']:,}",
    )
    rows = [(name, format_bytes(size, unit or "GiB"), size, "") for name, size in served.components.items() if size]
    gauge = canvas.gauge(total, served.upper_bytes, served.usable_bytes, max(8, canvas.width - len(percent) - 8))
    return (
        (*canvas.between(_verdict(answer, unit), answer.device.counted_name, 7), *canvas.joined(job, indent=7)),
        (*canvas.bars(rows), f"  {gauge} {percent}"),
        tuple(line for text in reach for line in canvas.folded(text, 0, 2)),
        tuple(line for note in answer.notes for line in canvas.folded(f"Assumes: {note}", 0, 2)),
    )


def _percent(part: int, whole: int) -> int:
    return (200 * part + whole) // max(1, 2 * whole)


def inference_sentence(answer: ServedAnswer) -> str:
    """Return the verdict in one sentence."""
    served = answer.served
    needs, usable = format_bytes(served.device_bytes), format_bytes(served.usable_bytes)
    each = f"each of {answer.device.count} " if answer.device.count > 1 else ""
    return (
        f"{served.verdict.upper()}: serving {answer.model.spec.name} takes about {needs} of the {usable} usable on {each}{answer.device.name} "
        f"(upper end {format_bytes(served.upper_bytes)})."
    )


def _data(answer: ServedAnswer, catalog_hash: str) -> dict[str, Any]:
    served = answer.served
    return {
        "schema": "memplan/inference/1",
        "memplan_version": memplan.__version__,
        "catalog_hash": catalog_hash,
        "verdict": served.verdict,
        "answer": inference_sentence(answer),
        "model": model_data(answer.model),
        "gpu": {
            "name": answer.device.name,
            "count": answer.device.count,
            "memory_bytes": answer.device.memory_bytes,
            "usable_bytes": served.usable_bytes,
        },
        "inference": dict(answer.request),
        "components": [{"name": name, "bytes": size} for name, size in served.components.items()],
        "device_bytes": served.device_bytes,
        "upper_bytes": served.upper_bytes,
        "largest_context": answer.largest_context,
        "largest_concurrency": answer.largest_concurrency,
        "assumptions": list(answer.notes),
    }
