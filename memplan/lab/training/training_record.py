"""What a training run leaves behind: a record that a config can name as its evidence."""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from statistics import fmean
from typing import Any

import torch

from memplan.lab.training.loop import WARMUP_STEPS, Run, Text, TrainingOptions
from memplan.lab.training.trained_model import products_of
from memplan.model.inventory import parameter_count
from memplan.model.model import Model
from memplan.model.spec import Attention, Mlp
from memplan.report.training_records import SCHEMA
from memplan.training.resolved import TrainingSetup

LIMITS = "a tiny model and a short run say how methods rank, not what a model of billions of parameters will do"
CURVE_POINTS = 30

VERDICTS = ((0.5, "level"), (5.0, "close"), (12.0, "behind"))
"""Most percent above the baseline's validation loss, and the word for it; beyond all of them: far behind."""


@dataclass(frozen=True, slots=True)
class TrainingRequest:
    """The config, settings and command of a run, as its record repeats them."""

    config: str
    settings: tuple[str, ...]
    command: str
    date: str


def evidence(
    request: TrainingRequest,
    model: Model,
    setup: TrainingSetup,
    options: TrainingOptions,
    text: Text,
    runs: Sequence[Run],
    baseline: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return the record of the runs of one config.

    Args:
        request: The config, the settings and the command.
        baseline: The record to compare with, or None.
    """
    gap = None if baseline is None else gap_percent(runs, baseline)
    return {
        "schema": SCHEMA,
        "config": request.config,
        "settings": list(request.settings),
        "verdict": verdict(runs, gap),
        "validation_loss": _interval([run.validation_loss for run in runs]),
        "gap_percent": gap,
        "baseline": None if baseline is None else _named(baseline),
        "model": _shapes(model),
        "training": {
            "micro_batch_size": setup.config.micro_batch_size,
            "sequence_length": setup.config.sequence_length,
            "warmup_steps": WARMUP_STEPS,
            "schedule": "cosine to zero",
            **asdict(options),
            "products": products_of(options.device, setup.config.compute_dtype),
        },
        "text": {"source": text.source, "python": platform.python_version(), "sha256": text.digest},
        "bytes": {
            item.component: {"predicted_bytes": item.predicted_bytes, "measured_bytes": item.measured_bytes}
            for item in runs[0].bytes
        },
        "runs": [_run(run) for run in runs],
        "date": request.date,
        "machine": machine_class(options.device),
        "torch": torch.__version__,
        "command": request.command,
        "limits": LIMITS,
    }


def verdict(runs: Sequence[Run], gap: Mapping[str, float] | None) -> str:
    """Return one word or two for how training went.

    ``diverges``: a loss was not finite, or none fell by a tenth. Else by the mean gap to the
    baseline: ``level`` to 0.5 %, ``close`` to 5 %, ``behind`` to 12 %, ``far behind`` beyond; but
    ``indistinct`` where some seeds did better than the baseline and others worse, by less than 12 %
    on average. ``learns`` where there is no baseline.
    """
    if any(not isfinite(run.validation_loss) or run.validation_loss > 0.9 * run.first_validation_loss for run in runs):
        return "diverges"
    if gap is None:
        return "learns"
    word = next((word for most, word in VERDICTS if gap["mean"] <= most), "far behind")
    return "indistinct" if word in ("close", "behind") and gap["low"] < 0 < gap["high"] else word


def gap_percent(runs: Sequence[Run], baseline: Mapping[str, Any]) -> dict[str, float] | None:
    """Return by how many percent validation losses exceed the baseline's, seed by seed.

    Formula:
        ``100 * (loss / baseline's loss of the same seed - 1)``: its mean, lowest and highest.
    """
    losses = {run["seed"]: run["validation_loss"] for run in baseline["runs"]}
    pairs = [(run.validation_loss, losses.get(run.seed)) for run in runs]
    gaps = [100 * (loss / other - 1) for loss, other in pairs if other and isfinite(loss)]
    return _interval(gaps, 2) if len(gaps) == len(runs) else None


def _interval(values: Sequence[float], digits: int = 4) -> dict[str, float] | None:
    if not values or not all(map(isfinite, values)):
        return None
    return {"mean": round(fmean(values), digits), "low": round(min(values), digits), "high": round(max(values), digits)}


def _named(baseline: Mapping[str, Any]) -> dict[str, Any]:
    return {key: baseline[key] for key in ("config", "settings", "validation_loss", "command")}


def _shapes(model: Model) -> dict[str, Any]:
    spec, layer = model.spec, model.spec.runs[0].layer
    shapes: dict[str, Any] = {
        "architecture": spec.architecture,
        "parameters": parameter_count(model.inventory),
        "num_hidden_layers": spec.num_hidden_layers,
        "hidden_size": spec.hidden_size,
        "vocab_size": spec.vocab_size,
    }
    if isinstance(layer.feed_forward, Mlp):
        shapes["intermediate_size"] = layer.feed_forward.intermediate_size
    if isinstance(layer.attention, Attention):
        shapes["num_attention_heads"] = layer.attention.num_heads
    return shapes


def _run(run: Run) -> dict[str, Any]:
    return {
        "seed": run.seed,
        "validation_loss": _finite(run.validation_loss),
        "first_validation_loss": _finite(run.first_validation_loss),
        "steps": len(run.losses),
        "tokens": run.tokens,
        "tokens_per_second": round(run.tokens_per_second),
        "curve": thinned(run.losses),
    }


def thinned(losses: Sequence[float], points: int = CURVE_POINTS) -> list[list[float | None]]:
    """Return (step, mean training loss since the point before) of about ``points`` points, from step 1 on."""
    stride = max(1, -(-len(losses) // points))
    ends = range(stride, len(losses) + stride, stride)
    parts = [(min(end, len(losses)), losses[end - stride : end]) for end in ends]
    return [[last, _finite(fmean(part))] for last, part in parts if part]


def _finite(value: float) -> float | None:
    """Return a number as JSON can say it: four digits, or null for one that is not finite."""
    return round(value, 4) if isfinite(value) else None


def machine_class(device: str) -> str:
    """Return what kind of machine this is, without its name."""
    if device.startswith("cuda"):
        return f"{torch.cuda.get_device_name(device)}, 1 GPU"
    return f"CPU ({platform.machine()}), {torch.get_num_threads()} thread(s)"
