"""What ``memplan lab train`` does: train each seed, show progress, and report what came out."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from memplan.catalog.catalog import Catalog
from memplan.catalog.stack_versions import DEFAULT_STACK
from memplan.cli.output import deliver
from memplan.cli.progress import Progress
from memplan.documents.frozen_values import dataclass
from memplan.documents.loading import parse_document
from memplan.errors import CannotAnswerError, InvalidFileError
from memplan.library.lookup import Overrides, Shapes, find_model, find_setup, require_one_gpu, require_own_loop
from memplan.report.document import Document
from memplan.report.evidence_lines import read_evidence
from memplan.report.training_records import record_text, training_record_document

if TYPE_CHECKING:
    from memplan.lab.training.loop import Run, TrainingOptions
    from memplan.lab.training.text import Text
    from memplan.model.model import Model
    from memplan.training.resolved import TrainingSetup


@dataclass(frozen=True, slots=True)
class TrainingRequest:
    """What was asked for on the command line; ``rates`` are those of Muon and AdamW, and weight decay."""

    config: str
    overrides: Overrides
    shapes: Shapes
    seeds: tuple[int, ...]
    steps: int
    rates: tuple[float, float, float]
    rounding: Literal["nearest", "stochastic", "golden"]
    momentum_format: str | None
    matrix_options: tuple[str, ...]
    device: str
    threads: int
    out: Path | None
    against: Path | None
    quiet: bool


def training_document(request: TrainingRequest, catalog: Catalog, unit: str) -> Document:
    """Return the answer of ``memplan lab train``, and write its record where one is asked for.

    Raises:
        CannotAnswerError: torch is missing, or the config cannot be trained.
        InvalidFileError: An option or file that cannot be used.
    """
    baseline = None if request.against is None else read_evidence(request.against)
    matrix_options = dict(_matrix_option(text) for text in request.matrix_options)
    model = find_model(None, request.shapes, catalog)
    overrides = replace(request.overrides, stack=request.overrides.stack or DEFAULT_STACK)
    setup = require_one_gpu(find_setup(request.config, overrides, catalog, model), "memplan lab train")
    require_own_loop(setup, "memplan lab train")
    _prepared_torch(request)
    from memplan.lab.training.loop import TrainingOptions
    from memplan.lab.training.text import library_text
    from memplan.lab.training.training_record import TrainingRequest, evidence

    lr, adamw_lr, decay = request.rates
    options = TrainingOptions(
        steps=request.steps,
        lr=lr,
        adamw_lr=adamw_lr,
        weight_decay=decay,
        rounding=request.rounding,
        momentum_format=request.momentum_format,
        matrix_options=matrix_options,
        device=request.device,
    )
    text = library_text()
    runs = _runs(request, model, setup, options, text)
    training_request = TrainingRequest(setup.name, request.overrides.settings, _command(), date.today().isoformat())
    record = evidence(training_request, model, setup, options, text, runs, baseline)
    if request.out is not None:
        deliver(record_text(record), request.out)
    return training_record_document(record, unit)


def _matrix_option(text: str) -> tuple[str, Any]:
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise InvalidFileError([f"--muon {text}: expected KEY=VALUE"])
    return key, parse_document(value, f"--muon {key}").data


def _prepared_torch(request: TrainingRequest) -> None:
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise CannotAnswerError(
            "training needs torch, which is not installed: pip install '.[torch]' in a checkout of memplan"
        )
    from memplan.lab.training.trained_model import prepare

    prepare(request.device, request.threads)


def _command() -> str:
    """Return the command as it was typed."""
    return shlex.join(["memplan", *sys.argv[1:]])


def _runs(
    request: TrainingRequest, model: Model, setup: TrainingSetup, options: TrainingOptions, text: Text
) -> list[Run]:
    from memplan.lab.training.loop import train

    runs = []
    for seed in request.seeds:
        progress = Progress(f"{setup.label}, seed {seed}", request.steps)
        runs.append(train(model, setup, options, text, seed, None if request.quiet else _shown(progress)))
        if not request.quiet:
            progress.end()
    return runs


def _shown(progress: Progress) -> Callable[[int, float], None]:
    return lambda done, loss: progress(done, f"loss {loss:.3f}")
