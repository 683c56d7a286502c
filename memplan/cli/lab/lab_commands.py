"""``memplan lab``: estimates and methods held against what really happens; needs torch."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from memplan.cli import option_groups as o
from memplan.cli.lab.learning_commands import add_learning_commands
from memplan.cli.lab.matrix_commands import add_matrix_commands
from memplan.cli.lab.show_records import add_show_command
from memplan.cli.output import emit, unit_text
from memplan.library.lookup import Overrides, Shapes, open_catalog

lab_command = typer.Typer(
    no_args_is_help=True,
    help="Experiments: what formats and methods do to learning, measured for real. Its commands take --json.",
)
for add in (add_learning_commands, add_matrix_commands, add_show_command):
    add(lab_command)

_RUN, _TINY = "Run", "Model"


class Rounding(StrEnum):
    """Rounding of weights that are not fp32."""

    nearest = "nearest"
    stochastic = "stochastic"


class LabDevice(StrEnum):
    """Where to train."""

    cpu = "cpu"
    cuda = "cuda"


StepsOption = Annotated[int, typer.Option("--steps", min=1, help="Optimizer steps.", rich_help_panel=_RUN)]
SeedOption = Annotated[
    list[int] | None, typer.Option("--seed", help="Seed, 0 by default; repeatable.", rich_help_panel=_RUN)
]
RoundingOption = Annotated[
    Rounding, typer.Option("--rounding", help="Of weights that are not fp32.", rich_help_panel=_RUN)
]
MomentumOption = Annotated[
    str | None,
    typer.Option(
        "--momentum-format", metavar="NAME", help="In place of the config's, such as gauss4.", rich_help_panel=_RUN
    ),
]
RateOption = Annotated[float, typer.Option("--lr", min=0.0, help="Largest rate of Muon.", rich_help_panel=_RUN)]
AdamwRateOption = Annotated[
    float, typer.Option("--adamw-lr", min=0.0, help="Largest rate of AdamW.", rich_help_panel=_RUN)
]
DecayOption = Annotated[float, typer.Option("--weight-decay", min=0.0, help="Decoupled.", rich_help_panel=_RUN)]
MatrixOption = Annotated[
    list[str] | None,
    typer.Option(
        "--muon",
        metavar="KEY=VALUE",
        help="Any key of Muon's parameter groups, such as momentum=0.9; repeatable.",
        rich_help_panel=_RUN,
    ),
]
DeviceOption = Annotated[LabDevice, typer.Option("--device", help="Where to train.", rich_help_panel=_RUN)]
ThreadsOption = Annotated[
    int, typer.Option("--threads", min=0, help="Threads on the CPU; 0 leaves it to torch.", rich_help_panel=_RUN)
]
RecordOption = Annotated[
    Path | None,
    typer.Option("--out", metavar="FILE", help="Write the record of the runs, as JSON.", rich_help_panel=_RUN),
]
AgainstOption = Annotated[
    Path | None,
    typer.Option("--against", metavar="FILE", help="A record to compare with, seed by seed.", rich_help_panel=_RUN),
]
LayersOption = Annotated[int, typer.Option("--layers", min=1, help="Layers.", rich_help_panel=_TINY)]
HiddenOption = Annotated[int, typer.Option("--hidden", min=1, help="Width.", rich_help_panel=_TINY)]
IntermediateOption = Annotated[
    int, typer.Option("--intermediate", min=1, help="Width of the feed-forward part.", rich_help_panel=_TINY)
]
HeadsOption = Annotated[int, typer.Option("--heads", min=1, help="Attention heads.", rich_help_panel=_TINY)]
BatchOption = Annotated[int, typer.Option("--batch", "-b", min=1, help="Sequences per step.", rich_help_panel=_RUN)]
LengthOption = Annotated[int, typer.Option("--length", "-s", min=2, help="Tokens of each.", rich_help_panel=_RUN)]


@lab_command.command("train")
def train_command(
    config: Annotated[
        str, typer.Option("--config", "-c", metavar="NAME|FILE", help="Training config.", rich_help_panel=_RUN)
    ],
    steps: StepsOption = 300,
    seed: SeedOption = None,
    rounding: RoundingOption = Rounding.stochastic,
    momentum_format: MomentumOption = None,
    lr: RateOption = 0.02,
    adamw_lr: AdamwRateOption = 0.006,
    weight_decay: DecayOption = 0.0,
    muon: MatrixOption = None,
    settings: o.SetOption = None,
    batch: BatchOption = 16,
    length: LengthOption = 128,
    layers: LayersOption = 4,
    hidden: HiddenOption = 128,
    intermediate: IntermediateOption = 352,
    heads: HeadsOption = 4,
    device: DeviceOption = LabDevice.cpu,
    threads: ThreadsOption = 0,
    record: RecordOption = None,
    against: AgainstOption = None,
    as_json: o.JsonOption = False,
    form: o.FormatOption = o.OutputFormat.table,
    output: o.OutputOption = None,
    units: o.UnitsOption = None,
    quiet: o.QuietOption = False,
    catalog_path: o.CatalogOption = None,
) -> None:
    """Train a tiny byte-level language model under a config, on the sources of Python's library.

    Every format starts from the same numbers and sees the same batches. Bytes are measured beside the plan.
    """
    from memplan.cli.lab.train_command import TrainingRequest, training_document

    request = TrainingRequest(
        config=config,
        overrides=Overrides(batch, length, None, tuple(settings or ())),
        shapes=Shapes(layers, hidden, intermediate, heads, vocab=256),
        seeds=tuple(dict.fromkeys(seed or (0,))),
        steps=steps,
        rates=(lr, adamw_lr, weight_decay),
        rounding=rounding.value,
        momentum_format=momentum_format,
        matrix_options=tuple(muon or ()),
        device=device.value,
        threads=threads,
        out=record,
        against=against,
        quiet=quiet,
    )
    document = training_document(request, open_catalog(catalog_path), unit_text(units))
    raise typer.Exit(emit(document, form, as_json, output, quiet))
