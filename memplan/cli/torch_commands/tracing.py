"""What ``memplan trace`` asks the library, and the timeline that it writes."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import memplan
from memplan.catalog.catalog import Catalog
from memplan.documents.writing import say, write_file
from memplan.errors import InvalidFileError
from memplan.library.answers.traced_step import require_torch
from memplan.library.lookup import Overrides, Shapes
from memplan.report.document import Document


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """What was given on the command line."""

    model: str | None
    shapes: Shapes
    hf: Path | None
    module: str | None
    history: Path | None
    config: str
    overrides: Overrides
    gpu: str | None
    gpu_memory: str | None
    alloc_conf: str
    timeline: Path | None
    largest: int
    quiet: bool


def trace_document(request: TraceRequest, catalog: Catalog, unit: str) -> Document:
    """Return the answer of ``memplan trace``.

    Raises:
        CannotAnswerError: torch is missing, or something cannot be traced.
        InvalidFileError: More than one thing to trace, or a file that cannot be read or written.
    """
    chosen = [v for v in (request.model, request.hf, request.module, request.history) if v is not None]
    if len(chosen) > 1 or (chosen and request.shapes.given()):
        raise InvalidFileError(
            ["give one thing to trace: MODEL, shapes, --hf DIR, --module PKG.MOD:FACTORY or --history FILE"]
        )
    if request.history is not None:
        return memplan.replay(request.history, alloc_conf=request.alloc_conf).document(unit)
    require_torch()
    if request.timeline is not None and request.timeline.suffix not in (".svg", ".json"):
        raise InvalidFileError([f"--timeline {request.timeline}: expected a name that ends in .svg or .json"])
    traced = _traced(request, catalog)
    if request.timeline is not None:
        write_file(request.timeline, traced.timeline("svg" if request.timeline.suffix == ".svg" else "json"))
    return traced.document(unit)


def _traced(request: TraceRequest, catalog: Catalog) -> memplan.Traced:
    overrides = request.overrides
    if request.module is not None:
        sys.path.insert(0, "")  # as python -m has it, so that modules in the working directory are there
    return memplan.trace(
        request.model,
        shapes=request.shapes,
        hf=request.hf,
        module=request.module,
        config=request.config,
        micro_batch_size=overrides.batch,
        sequence_length=overrides.length,
        activation_checkpointing=overrides.checkpointing,
        set=overrides.settings,
        gpu=request.gpu,
        gpu_memory=request.gpu_memory,
        alloc_conf=request.alloc_conf,
        largest=request.largest,
        progress=None if request.quiet else say,
        catalog=catalog,
    )
