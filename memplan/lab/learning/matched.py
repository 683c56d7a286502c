"""The comparison that the notes call for: one model, the same steps, data and seeds, momentum in several formats."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isfinite
from statistics import fmean
from typing import Any

from memplan.catalog.catalog import Catalog
from memplan.errors import unknown_name
from memplan.lab.experiment_record import Outcome, Progress, Row, interval
from memplan.lab.learning.variants import (
    LIMITS,
    Size,
    Task,
    Variant,
    chosen,
    gap_percent,
    has_diverged,
    lab_setup,
    one_run,
    percent_text,
    run_text,
)
from memplan.lab.training.loop import Run, TrainingOptions, library_text
from memplan.lab.training.optimizer_groups import with_momentum
from memplan.lab.training.run_bytes import planned_bytes
from memplan.lab.training.training_record import thinned
from memplan.model.inventory import parameter_count
from memplan.muon.state_codecs.codecs import codec_bytes
from memplan.muon.state_codecs.state_formats import momentum_codec
from memplan.report.experiments import row_of

SHAPES: dict[str, Size] = {
    "tiny": Size(4, 128, 4, 352, 256, batch=8, length=128, steps=100),
    "notes-28m": Size(4, 256, 8, 512, 50257, batch=4, length=128, steps=100),
    "notes-282m": Size(24, 768, 12, 2688, 50257, batch=4, length=128, steps=100),
}
"""The notes' ``test-8bit`` and ``d20-e3-full``, with their batch and steps, and the size of ``memplan lab train``."""

MOMENTA = ("fp32", "bf16", "int8", "int4", "gauss4")
DEFAULT = ("fp32", "int8", "int4", "gauss4")
BASELINE = "fp32"
PLANNED = ("notes-28m", "notes-282m")
"""Shapes whose bytes every record has."""


def shape_named(name: str) -> Size:
    """Return a shape of the notes, or the tiny one.

    Raises:
        UnknownNameError: There is no such shape.
    """
    if name not in SHAPES:
        raise unknown_name("shape", name, SHAPES)
    return SHAPES[name]


def matched_8bit(
    catalog: Catalog,
    name: str,
    size: Size,
    seeds: Sequence[int],
    momenta: Sequence[str] = (),
    device: str = "cpu",
    train: bool = True,
) -> Task:
    """Return the experiment.

    Args:
        name: What rows call the shape.
        momenta: Of ``MOMENTA``; all but bf16 by default.

    Raises:
        UnknownNameError: A format is not known.
    """
    names = chosen("momentum", momenta or DEFAULT, MOMENTA, BASELINE)
    planned = {key: SHAPES[key] for key in PLANNED if key != name or not train}
    planned = planned if train or name in planned else {name: size, **planned}

    def run(progress: Progress) -> Outcome:
        rows = trained_rows(catalog, name, size, names, seeds, device, progress) if train else []
        for key, shape in planned.items():
            rows += [planned_row(catalog, key, shape, momentum) for momentum in names]
            progress(len(names) * len(seeds) * train + 1, f"planned {key}")
        settings: dict[str, Any] = {
            **(size.settings(library_text()) if train else {}),
            "tokens": "bytes of the text, so that ids of 256 and above never come up",
        }
        return Outcome("matched-8bit", settings, seeds if train else (), rows, findings(rows), LIMITS)

    return Task(len(names) * len(seeds) * train + 1, run)


def variant_of(catalog: Catalog, size: Size, momentum: str, device: str = "cpu") -> Variant:
    """Return a model with one format of momentum."""
    setup = with_momentum(lab_setup(catalog, size), momentum)
    matrices = {"momentum_format": momentum}
    return Variant(
        {"momentum": momentum}, setup, TrainingOptions(steps=size.steps, matrix_options=matrices, device=device)
    )


def trained_rows(
    catalog: Catalog,
    name: str,
    size: Size,
    momenta: Sequence[str],
    seeds: Sequence[int],
    device: str,
    progress: Progress,
) -> list[Row]:
    """Return a row for each format, after training every seed.

    Seed by seed, so that whatever slows a machine for a while slows all formats.
    """
    text, model = library_text(), size.model
    runs: dict[str, list[Run]] = {momentum: [] for momentum in momenta}
    for count, seed in enumerate(seeds):
        for place, momentum in enumerate(momenta):
            variant = variant_of(catalog, size, momentum, device)
            runs[momentum].append(one_run(variant, model, text, seed))
            progress(count * len(momenta) + place + 1, f"seed {seed}, {run_text(runs[momentum][-1], variant)}")
    baseline = [run.validation_loss for run in runs[BASELINE]]
    speeds = [run.tokens_per_second for run in runs[BASELINE]]
    return [
        {
            **planned_row(catalog, name, size, momentum),
            "steps": size.steps,
            **_measurements(momentum_runs, baseline, speeds),
        }
        for momentum, momentum_runs in runs.items()
    ]


def _measurements(runs: Sequence[Run], baseline: Sequence[float], speeds: Sequence[float]) -> Row:
    losses = [run.validation_loss for run in runs]
    ratios = [100 * (run.tokens_per_second / speed - 1) for run, speed in zip(runs, speeds, strict=True)]
    return {
        "loss": interval(losses),
        "gap_percent": gap_percent(losses, baseline),
        "diverged": sum(map(has_diverged, runs)),
        "tokens_per_second": interval([run.tokens_per_second for run in runs]),
        "throughput_percent": interval(ratios),
        "measured_bytes": {item.component: item.measured_bytes for item in runs[0].bytes},
        "curve": mean_curve([run.losses for run in runs]),
    }


def mean_curve(losses: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return (step, mean, lowest, highest) over the seeds, of about thirty points, up to the first that is not finite."""
    curves = [thinned(one) for one in losses]
    points = []
    for parts in zip(*curves, strict=False):
        values = [value for _, value in parts if value is not None and isfinite(value)]
        if len(values) < len(curves) or len({step for step, _ in parts}) > 1:
            break
        points.append([parts[0][0] or 0, round(fmean(values), 4), min(values), max(values)])
    return points


def planned_row(catalog: Catalog, name: str, size: Size, momentum: str) -> Row:
    """Return a row with planned bytes and without training."""
    model, setup = size.model, lab_setup(catalog, size)
    codec = momentum_codec(momentum)
    sizes = [(tensor.elements, tensor.count) for tensor in model.inventory if tensor.role == "hidden_matrix"]
    momentum_bytes = sum(count * codec_bytes(codec, elements) for elements, count in sizes)
    bytes_now = planned_bytes(model, with_momentum(setup, momentum))
    baseline = planned_bytes(model, with_momentum(setup, BASELINE))
    matrices = sum(count * elements for elements, count in sizes)
    return {
        "shape": name,
        "parameters": parameter_count(model.inventory),
        "muon_parameters": matrices,
        "momentum": momentum,
        "steps": 0,
        "loss": None,
        "gap_percent": None,
        "diverged": 0,
        "tokens_per_second": None,
        "throughput_percent": None,
        "predicted_bytes": bytes_now,
        "momentum_bytes": momentum_bytes,
        "saving_percent": _savings(bytes_now, baseline, momentum_bytes, 4 * matrices),
        "measured_bytes": None,
        "curve": [],
    }


def _savings(
    now: Mapping[str, int], before: Mapping[str, int], momentum: int, momentum_before: int
) -> dict[str, float]:
    """Return what a format saves, in percent of momentum, of all optimizer states, and of all persistent bytes."""
    states, total = before["optimizer_states"], sum(before.values())
    return {
        "momentum": round(100 * (1 - momentum / momentum_before), 2),
        "optimizer_states": round(100 * (1 - now["optimizer_states"] / states), 2),
        "weights_gradients_and_states": round(100 * (1 - sum(now.values()) / total), 2),
    }


# ------------------------------------------------------------------ sentences
def findings(rows: Sequence[Row]) -> list[str]:
    """Return what follows from the rows."""
    trained = [row for row in rows if row["steps"]]
    sentences = [_comparison(row) for row in trained if row["momentum"] != BASELINE]
    if trained:
        equal = sum(row["predicted_bytes"] == row["measured_bytes"] for row in trained)
        sentences.append(
            f"Planned and measured bytes of weights, gradients and states are equal to the byte in {equal} of "
            f"{len(trained)} formats."
        )
    for name in dict.fromkeys(row["shape"] for row in rows):
        row = row_of(rows, shape=name, momentum="int8")
        if row:
            sentences.append(_saving(row))
    return sentences


def _comparison(row: Row) -> str:
    return (
        f"{row['momentum']} momentum against fp32, the same {row['parameters'] / 1e6:.3g}M model, {row['steps']} steps, "
        f"data and seeds: loss {percent_text(row['gap_percent'])}, throughput {percent_text(row['throughput_percent'])}."
    )


def _saving(row: Row) -> str:
    saving = row["saving_percent"]
    return (
        f"{row['shape']}, {row['parameters']:,} parameters, of which {row['muon_parameters']:,} are Muon's: int8 saves "
        f"{saving['momentum']:.1f} % of momentum, but {saving['optimizer_states']:.1f} % of all optimizer states and "
        f"{saving['weights_gradients_and_states']:.1f} % of weights, gradients and states."
    )


def with_steps(size: Size, steps: int | None, batch: int | None, length: int | None) -> Size:
    """Return a size with the given steps, batch and length in place of its own."""
    overrides = {"steps": steps, "batch": batch, "length": length}
    return replace(size, **{name: value for name, value in overrides.items() if value is not None})
