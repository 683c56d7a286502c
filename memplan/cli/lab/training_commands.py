"""``memplan lab train`` and ``memplan lab largest``: seeds are trained with their progress, or the largest model that fits a GPU is."""

from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from memplan.catalog.catalog import Catalog
from memplan.catalog.stack_versions import DEFAULT_STACK
from memplan.cli.grouped_command import command, with_defaults, without
from memplan.cli.lab.experiment_options import NEEDS, RUN, RunOptions, typed_command
from memplan.cli.lab.learning_commands import SizeOptions
from memplan.cli.option_groups import ModelOptions, OutputOptions, option
from memplan.cli.output import Progress, deliver, emit
from memplan.documents.frozen_values import dataclass
from memplan.documents.loading import parse_document
from memplan.errors import CannotAnswerError, InvalidFileError
from memplan.host.this_machine import require_torch
from memplan.library.lookup import (
    Overrides,
    Shapes,
    find_device,
    find_model,
    find_setup,
    require_one_gpu,
    require_own_loop,
)
from memplan.library.runs.largest_trained import CPU_PARAMETERS, Candidate, largest_candidate, planned_candidate
from memplan.report.training_records import largest_run_document, read_evidence, record_text, training_record_document

if TYPE_CHECKING:
    from memplan.lab.training.loop import Run

VALIDATION_WINDOWS = 8


@dataclass(frozen=True, slots=True)
class LargestOptions:
    """What is trained within how much memory, and for how long."""

    config: Annotated[str, option(RUN, "--config -c NAME|FILE", "Training config of all parameters.")] = (
        "q6-muon-ternary"
    )
    gpu_memory: Annotated[str, option(RUN, "--gpu-memory SIZE", "What the process may take of the GPU.")] = "24GiB"
    steps: Annotated[int, option(RUN, "--steps", "Optimizer steps.", min=2)] = 20
    batch: Annotated[int, option(RUN, "--batch -b", "Sequences per step.", min=1)] = 1
    length: Annotated[int, option(RUN, "--length -s", "Tokens of each.", min=2)] = 2048
    lr: Annotated[float, option(RUN, "--lr", "Largest rate of Muon.", min=0.0)] = 0.005
    adamw_lr: Annotated[float, option(RUN, "--adamw-lr", "Largest rate of AdamW.", min=0.0)] = 0.001
    seed: Annotated[int, option(RUN, "--seed", "Of weights, batches and rounding.", min=0, max=2**63 - 1)] = 0
    settings: Annotated[
        list[str] | None, option(RUN, "--set KEY=VALUE", "Any key of a training config; repeatable.")
    ] = None


@command(example="memplan lab largest --layers 2 --hidden 256 --heads 4 --gpu-memory 1GiB --length 128")
def largest_command(
    model: Annotated[ModelOptions, without("beside", "trainer_version", "online")],
    requested: LargestOptions,
    run: Annotated[RunOptions, without("plot", "seed")],
    output: OutputOptions,
) -> int:
    """Train the largest model that fits so much memory, held to it, all parameters from random weights.

    Without MODEL: the largest of the catalog that is planned to fit. The loss must fall, and the bytes be the planned ones.
    """
    require_torch(NEEDS)
    catalog = output.catalog()
    candidate = _candidate(model, requested, catalog)
    require_own_loop(require_one_gpu(candidate.setup, "memplan lab largest"), "memplan lab largest")
    if run.device == "cpu" and candidate.parameters > CPU_PARAMETERS:
        raise CannotAnswerError(
            f"{candidate.model.spec.name} has {candidate.parameters:,} parameters, too many to train on a CPU; give --device "
            "cuda, or a smaller MODEL, --gpu-memory or --layers"
        )
    record = _trained(candidate, requested, run, output.quiet)
    if run.out is not None:
        deliver(record_text(record), run.out)
    return emit(largest_run_document(record, output.unit), output)


def _candidate(model: ModelOptions, requested: LargestOptions, catalog: Catalog) -> Candidate:
    device = find_device(None, requested.gpu_memory, 1, catalog)
    settings = ("activation_checkpointing=full", "kernels.loss=chunked", *(requested.settings or ()))
    overrides = Overrides(requested.batch, requested.length, None, settings, stack=DEFAULT_STACK)
    if model.model is None and not model.shapes.given():
        return largest_candidate(catalog.models.entries, requested.config, overrides, device, catalog)
    known = find_model(model.model, model.shapes, catalog)
    return planned_candidate(known, find_setup(requested.config, overrides, catalog, known), device)


def _trained(candidate: Candidate, requested: LargestOptions, run: RunOptions, quiet: bool) -> dict[str, Any]:
    from memplan.lab.training.loop import Trainer, TrainingOptions, library_text, trained
    from memplan.lab.training.run_bytes import MemoryLimit, limit_record, refused_if_out_of_memory
    from memplan.lab.training.trained_model import prepare
    from memplan.lab.training.training_record import TrainingRequest, evidence

    device, seed = run.device, requested.seed
    prepare(device, run.threads)
    options = TrainingOptions(
        steps=requested.steps,
        lr=requested.lr,
        adamw_lr=requested.adamw_lr,
        rounding="golden",
        matrix_options={"momentum": 0.8},
        device=device,
        validation_windows=VALIDATION_WINDOWS,
    )
    limit, text = MemoryLimit(device, candidate.capacity_bytes), library_text()
    progress = Progress(f"{candidate.model.spec.name}, {candidate.setup.label}", requested.steps)

    def on_step(done: int, loss: float) -> None:
        if done == 1:
            limit.forget()
        if not quiet:
            progress.loss(done, loss)

    with refused_if_out_of_memory(candidate.plan):
        limit.begin()
        trainer = Trainer(candidate.model, candidate.setup, options, text, seed)
        result: Run = trained(trainer, seed, on_step)
    if not quiet:
        progress.end()
    request = TrainingRequest(candidate.setup.name, (), typed_command(), date.today().isoformat())
    record = evidence(request, candidate.model, candidate.setup, options, text, [result], None)
    return {**record, "memory": limit_record(limit, candidate.plan)}


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """What is trained, and how."""

    config: Annotated[str, option(RUN, "--config -c NAME|FILE", "Training config, which must be given.")]
    rounding: Annotated[
        Literal["nearest", "stochastic", "golden"],
        option(RUN, "--rounding KIND", "Of weights that are not fp32: nearest, stochastic or golden."),
    ] = "stochastic"
    momentum_format: Annotated[
        str | None, option(RUN, "--momentum-format NAME", "In place of the config's, such as gauss4.")
    ] = None
    lr: Annotated[float, option(RUN, "--lr", "Largest rate of Muon.", min=0.0)] = 0.02
    adamw_lr: Annotated[float, option(RUN, "--adamw-lr", "Largest rate of AdamW.", min=0.0)] = 0.006
    weight_decay: Annotated[float, option(RUN, "--weight-decay", "Decoupled.", min=0.0)] = 0.0
    muon: Annotated[
        list[str] | None,
        option(RUN, "--muon KEY=VALUE", "Any key of Muon's parameter groups, such as momentum=0.9; repeatable."),
    ] = None
    settings: Annotated[
        list[str] | None,
        option(RUN, "--set KEY=VALUE", "Any key of a training config, such as kernels.optimizer=fused; repeatable."),
    ] = None
    against: Annotated[Path | None, option(RUN, "--against FILE", "A record to compare with, seed by seed.")] = None


@command(example="memplan lab train --config tier1 --steps 20 --batch 4 --length 64")
def train_command(
    training: TrainOptions,
    size: Annotated[SizeOptions, with_defaults(steps=300, batch=16, layers=4)],
    run: Annotated[RunOptions, without("plot")],
    output: OutputOptions,
) -> int:
    """Train a tiny byte-level language model under a config, on the sources of Python's library.

    Every format starts from the same numbers and sees the same batches. Bytes are measured beside the plan.
    """
    catalog = output.catalog()
    baseline = None if training.against is None else read_evidence(training.against)
    matrix_options = dict(map(_matrix_option, training.muon or ()))
    shapes = Shapes(size.layers, size.hidden, size.intermediate, size.heads, vocab=256)
    model = find_model(None, shapes, catalog)
    settings = tuple(training.settings or ())
    overrides = Overrides(size.batch, size.length, None, settings, stack=DEFAULT_STACK)
    setup = require_one_gpu(find_setup(training.config, overrides, catalog, model), "memplan lab train")
    require_own_loop(setup, "memplan lab train")
    require_torch("training needs")
    from memplan.lab.training.loop import TrainingOptions, library_text, train
    from memplan.lab.training.trained_model import prepare
    from memplan.lab.training.training_record import TrainingRequest, evidence

    prepare(run.device, run.threads)
    options = TrainingOptions(
        steps=size.steps,
        lr=training.lr,
        adamw_lr=training.adamw_lr,
        weight_decay=training.weight_decay,
        rounding=training.rounding,
        momentum_format=training.momentum_format,
        matrix_options=matrix_options,
        device=run.device,
    )
    text, runs = library_text(), []
    for seed in run.seeds((0,)):
        progress = Progress(f"{setup.label}, seed {seed}", size.steps)
        runs.append(train(model, setup, options, text, seed, None if output.quiet else progress.loss))
        if not output.quiet:
            progress.end()
    request = TrainingRequest(setup.name, overrides.settings, typed_command(), date.today().isoformat())
    record = evidence(request, model, setup, options, text, runs, baseline)
    if run.out is not None:
        deliver(record_text(record), run.out)
    return emit(training_record_document(record, output.unit), output)


def _matrix_option(text: str) -> tuple[str, Any]:
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise InvalidFileError([f"--muon {text}: expected KEY=VALUE"])
    return key, parse_document(value, f"--muon {key}").data
