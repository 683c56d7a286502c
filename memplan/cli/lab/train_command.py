"""``memplan lab train``: each seed is trained, with its progress, and what came out is reported."""

from datetime import date
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from memplan.catalog.stack_versions import DEFAULT_STACK
from memplan.cli.grouped_command import command, with_defaults, without
from memplan.cli.lab.experiment_options import RUN, RunOptions, typed_command
from memplan.cli.lab.learning_commands import SizeOptions
from memplan.cli.option_groups import OutputOptions, option
from memplan.cli.output import Progress, deliver, emit
from memplan.documents.frozen_values import dataclass
from memplan.documents.loading import parse_document
from memplan.errors import InvalidFileError
from memplan.host.this_machine import require_torch
from memplan.library.lookup import Overrides, Shapes, find_model, find_setup, require_one_gpu, require_own_loop
from memplan.report.training_records import read_evidence, record_text, training_record_document


class Rounding(StrEnum):
    """Rounding of weights that are not fp32."""

    nearest = "nearest"
    stochastic = "stochastic"
    golden = "golden"


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """What is trained, and how."""

    config: Annotated[str, option(RUN, "--config -c NAME|FILE", "Training config, which must be given.")]
    rounding: Annotated[
        Rounding, option(RUN, "--rounding KIND", "Of weights that are not fp32: nearest, stochastic or golden.")
    ] = Rounding.stochastic
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

    prepare(run.device.value, run.threads)
    options = TrainingOptions(
        steps=size.steps,
        lr=training.lr,
        adamw_lr=training.adamw_lr,
        weight_decay=training.weight_decay,
        rounding=training.rounding.value,
        momentum_format=training.momentum_format,
        matrix_options=matrix_options,
        device=run.device.value,
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
