"""A tiny language model trained in several ways that differ in one thing: what that does to its loss."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from memplan.catalog.catalog import Catalog
from memplan.catalog.training_config import Gradients, TrainingConfig
from memplan.errors import unknown_name
from memplan.lab.experiment_record import Outcome, Progress, Row, interval
from memplan.lab.training.loop import Run, Text, Trainer, TrainingOptions, library_text, trained
from memplan.model.inventory import parameter_count
from memplan.model.model import Model
from memplan.model.readers.given_shapes import model_from_shapes
from memplan.training.resolution.resolve_config import resolve
from memplan.training.resolved import TrainingSetup

LIMITS = (
    "a tiny model, a short run and learning rates tuned for the baseline: they say how methods rank, "
    "not what a model of billions of parameters will do"
)
LEARNED_BELOW = 0.9
"""A run has diverged where a loss is not finite, or the last is above this part of the first."""

NAMED = ("momentum", "weights", "gradient", "second_moment")
"""Keys of a row that name a run in progress messages."""


@dataclass(frozen=True, slots=True)
class Task:
    """An experiment that is ready to run: how often it reports, and the run itself."""

    parts: int
    run: Callable[[Progress], Outcome]


@dataclass(frozen=True, slots=True)
class Size:
    """Shapes of a model, its batch, and the steps that it is trained for."""

    layers: int
    hidden: int
    heads: int
    intermediate: int
    vocab: int
    batch: int
    length: int
    steps: int

    @property
    def model(self) -> Model:
        """Return the model, with a head of its own."""
        shapes = {name: getattr(self, name) for name in ("layers", "hidden", "heads", "intermediate", "vocab")}
        return model_from_shapes(**shapes)

    def settings(self, text: Text) -> dict[str, Any]:
        """Return what a record says of a size, and of the text."""
        shapes = {name: getattr(self, name) for name in self.__slots__}
        return {
            **shapes,
            "parameters": parameter_count(self.model.inventory),
            "text": f"{text.source} (SHA-256 begins with {text.digest})",
        }


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to train."""

    keys: Mapping[str, Any]  # What tells its row from the others
    setup: TrainingSetup  # Formats and optimizers
    options: TrainingOptions = field(default_factory=TrainingOptions)  # How to train
    prepare: Callable[[Trainer], None] | None = None  # Changes something about the trainer before the first step


def lab_setup(
    catalog: Catalog, size: Size, *, weights: str = "fp32", gradient: str | None = None, matrices: str = "muon-fp32"
) -> TrainingSetup:
    """Return a setup of fp32 but for what is named: the format of matrices, gradients, and matrices' optimizer.

    Products are bf16. All weights but matrices are fp32 and take AdamW with fp32 states; embedding
    and head are bf16 where matrices are, since the lab's model takes one float dtype for all products.
    """
    others = {"embedding": weights, "head": weights} if weights == "bf16" else {}
    config = TrainingConfig(
        description="an experiment of the lab",
        weights={"hidden_matrix": weights, **others, "default": "fp32"},
        gradients=Gradients(gradient),
        optimizer={"hidden_matrix": matrices, "default": "adamw-fp32"},
        micro_batch_size=size.batch,
        sequence_length=size.length,
    )
    return resolve(config, catalog, "experiment")


def chosen(kind: str, requested: Sequence[str], known: Sequence[str], baseline: str) -> tuple[str, ...]:
    """Return the requested names, all by default, in the order of ``known`` and with the baseline.

    Raises:
        UnknownNameError: One of them is not known.
    """
    for name in requested:
        if name not in known:
            raise unknown_name(kind, name, known)
    return tuple(name for name in known if not requested or name in requested or name == baseline)


def compared(
    variants: Sequence[Variant], size: Size, seeds: Sequence[int], progress: Progress, done: int = 0
) -> list[Row]:
    """Return a row for each variant; the first is what the others are compared with, seed by seed.

    Args:
        done: Parts that were done before.
    """
    text, rows = library_text(), []
    baseline: list[Run] = []
    for place, variant in enumerate(variants):
        runs = []
        for count, seed in enumerate(seeds):
            runs.append(one_run(variant, size.model, text, seed))
            progress(done + place * len(seeds) + count + 1, run_text(runs[-1], variant))
        baseline = baseline or runs
        rows.append({**variant.keys, **measurements(runs, baseline)})
    return rows


def comparison_task(
    experiment: str,
    variants: Sequence[Variant],
    size: Size,
    seeds: Sequence[int],
    settings: Mapping[str, Any],
    findings: Callable[[Sequence[Row]], list[str]],
) -> Task:
    """Return the task that trains every variant on every seed.

    Args:
        variants: Ways to train, the baseline first.
        settings: What the record says besides the size.
        findings: Sentences that follow from the rows.
    """

    def run(progress: Progress) -> Outcome:
        rows = compared(variants, size, seeds, progress)
        record = {**size.settings(library_text()), **settings}
        return Outcome(experiment, record, seeds, rows, findings(rows), LIMITS)

    return Task(len(variants) * len(seeds), run)


def one_run(variant: Variant, model: Model, text: Text, seed: int) -> Run:
    """Train a fresh model once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a format diverges is the result here
        trainer = Trainer(model, variant.setup, variant.options, text, seed)
    if variant.prepare is not None:
        variant.prepare(trainer)
    return trained(trainer, seed)


def run_text(run: Run, variant: Variant) -> str:
    """Return the progress message of a run."""
    names = [str(variant.keys[key]) for key in NAMED if key in variant.keys]
    if variant.keys.get("scaled"):
        names.append("scaled")
    return f"{' '.join(names)}: {run.validation_loss:.3f}"


def measurements(runs: Sequence[Run], baseline: Sequence[Run]) -> Row:
    """Return the measurements of one variant's runs."""
    losses = [run.validation_loss for run in runs]
    return {
        "loss": interval(losses),
        "gap_percent": gap_percent(losses, [run.validation_loss for run in baseline]),
        "diverged": sum(map(has_diverged, runs)),
        "first_bad_step": interval([bad for run in runs if (bad := first_bad_step(run.losses)) is not None]),
    }


def gap_percent(losses: Sequence[float], baseline: Sequence[float]) -> Row | None:
    """Return by how many percent losses exceed the baseline's of the same seed.

    Formula:
        ``100 * (loss / baseline - 1)``
    """
    return interval([100 * (loss / other - 1) for loss, other in zip(losses, baseline, strict=True)])


def has_diverged(run: Run) -> bool:
    """Whether a loss was not finite, or the loss did not fall by a tenth."""
    return not isfinite(run.validation_loss) or run.validation_loss > LEARNED_BELOW * run.first_validation_loss


def first_bad_step(losses: Sequence[float]) -> int | None:
    """Return the first step, from 1 on, whose loss was not finite."""
    return next((number for number, loss in enumerate(losses, 1) if not isfinite(loss)), None)


# ------------------------------------------------------------------ sentences
def percent_text(value: Row | None) -> str:
    """Return a gap as a sentence has it: ``+4.1 % (+3.2 to +4.9)``."""
    if value is None:
        return "not finite"
    return f"{value['mean']:+.1f} % ({value['low']:+.1f} to {value['high']:+.1f})"


def step_text(value: Row | None) -> str:
    """Return steps as a sentence has them: ``step 78 to 81``."""
    if value is None:
        return "no step"
    low, high = round(value["low"]), round(value["high"])
    return f"step {low}" if low == high else f"steps {low} to {high}"
