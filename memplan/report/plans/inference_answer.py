"""The answer of ``memplan fit --method inference``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import memplan
from memplan.documents.frozen_values import dataclass
from memplan.model.inventory import active_parameter_count, parameter_count
from memplan.model.model import Model
from memplan.report.document import Document, Table
from memplan.units import format_bytes, format_count

if TYPE_CHECKING:
    from memplan.plan.inference.served_plan import Served
    from memplan.plan.memory_plan import Device

WORDS = {"fits": "FITS", "tight": "TIGHT", "no": "NO"}


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


def inference_document(answer: ServedAnswer, catalog_hash: str, unit: str, *, strict: bool) -> Document:
    """Return the components, how far context and concurrency go, and the verdict."""
    served, spec = answer.served, answer.model.spec
    total = served.device_bytes
    head = (
        f"{WORDS[served.verdict]:<6} {format_bytes(total, unit)} expected, {format_bytes(served.upper_bytes, unit)} "
        f"worst case, {format_bytes(served.usable_bytes, unit)} usable",
        f"       {answer.device.name}, served, engine {answer.request['engine']}",
        f"{spec.name} ({format_count(parameter_count(answer.model.inventory))}), weights {answer.request['weights']}, "
        f"cache {answer.request['kv_dtype']},",
        f"       context {answer.request['context']:,}, concurrency {answer.request['concurrency']:,}",
    )
    rows = [*served.components.items(), ("device", total)]
    table = Table(
        ("component", ">bytes", ">share"),
        tuple((name, format_bytes(size, unit), f"{100 * size / total:.1f} %") for name, size in rows),
    )
    reach = (
        f"largest context at concurrency {answer.request['concurrency']:,}: {answer.largest_context:,} tokens",
        f"largest concurrency at context {answer.request['context']:,}: {answer.largest_concurrency:,} sequences",
    )
    failed = served.verdict == "no" or (strict and served.verdict == "tight")
    blocks = (head, table, reach, tuple(f"Assumed: {note}" for note in answer.notes))
    return Document(_data(answer, catalog_hash), blocks, 1 if failed else 0)


def inference_sentence(answer: ServedAnswer, unit: str = "") -> str:
    """Return the verdict in one sentence."""
    served = answer.served
    needs, usable = format_bytes(served.device_bytes, unit), format_bytes(served.usable_bytes, unit)
    return (
        f"{WORDS[served.verdict]}: serving {answer.model.spec.name} takes about {needs} of the {usable} usable on {answer.device.name} "
        f"(upper end {format_bytes(served.upper_bytes, unit)})."
    )


def _data(answer: ServedAnswer, catalog_hash: str) -> dict[str, Any]:
    served, model = answer.served, answer.model
    return {
        "schema": "memplan/inference/1",
        "memplan_version": memplan.__version__,
        "catalog_hash": catalog_hash,
        "verdict": served.verdict,
        "answer": inference_sentence(answer),
        "model": {
            "name": model.spec.name,
            "parameters": parameter_count(model.inventory),
            "active_parameters": active_parameter_count(model.inventory),
            "architecture": model.spec.architecture,
            "source": model.source,
        },
        "gpu": {
            "name": answer.device.name,
            "count": 1,
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
