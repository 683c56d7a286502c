"""``memplan lab``: estimates and methods held against what really happens; needs torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from memplan.cli.grouped_command import add_command, command, with_defaults, without
from memplan.cli.lab.experiment_options import RUN, RunOptions
from memplan.cli.lab.largest_command import largest_command
from memplan.cli.lab.learning_commands import SizeOptions, add_learning_commands
from memplan.cli.lab.matrix_commands import add_matrix_commands
from memplan.cli.lab.show_records import add_show_command
from memplan.cli.option_groups import OutputOptions, option
from memplan.cli.output import emit
from memplan.library.lookup import Overrides, Shapes

lab_command = typer.Typer(
    no_args_is_help=True,
    help="Experiments: what formats and methods do to learning, measured for real. Its commands take --json.",
)


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
    from memplan.cli.lab.train_command import TrainingRequest, training_document

    request = TrainingRequest(
        config=training.config,
        overrides=Overrides(size.batch, size.length, None, tuple(training.settings or ())),
        shapes=Shapes(size.layers, size.hidden, size.intermediate, size.heads, vocab=256),
        seeds=run.seeds((0,)),
        steps=size.steps,
        rates=(training.lr, training.adamw_lr, training.weight_decay),
        rounding=training.rounding.value,
        momentum_format=training.momentum_format,
        matrix_options=tuple(training.muon or ()),
        device=run.device.value,
        threads=run.threads,
        out=run.out,
        against=training.against,
        quiet=output.quiet,
    )
    return emit(training_document(request, output.catalog(), output.unit), output)


add_command(lab_command, "train", train_command)
add_command(lab_command, "largest", largest_command)
for add in (add_learning_commands, add_matrix_commands, add_show_command):
    add(lab_command)
