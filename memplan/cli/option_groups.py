"""Options that several commands share, declared once."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from memplan.catalog.training_config import MAXIMUM_GPUS


class OutputFormat(StrEnum):
    """How an answer is written."""

    table = "table"
    plain = "plain"
    json = "json"
    csv = "csv"
    md = "md"


class CheckFormat(StrEnum):
    """How the answer of a check is written: as any other, or for a forge or a test report."""

    table = "table"
    plain = "plain"
    json = "json"
    csv = "csv"
    md = "md"
    github = "github"
    gitlab = "gitlab"
    junit = "junit"
    sarif = "sarif"


class Unit(StrEnum):
    """Unit of bytes in tables; without it each figure has the unit that suits it."""

    GiB = "GiB"
    GB = "GB"
    MiB = "MiB"
    bytes = "bytes"


class CheckpointingChoice(StrEnum):
    """What a layer keeps for backward."""

    none = "none"
    selective = "selective"
    full = "full"


_TRAINING, _MODEL, _DEVICE, _OUTPUT = "Training", "Model by its shapes", "Device", "Output"

ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="Catalog name or alias, a directory or config.json, a GGUF or safetensors file, or - for a config.json on standard input.",
        show_default=False,
    ),
]
ConfigOption = Annotated[
    str | None,
    typer.Option(
        "--config",
        "-c",
        metavar="NAME|FILE",
        help="Training config: a catalog name, a YAML or JSON file, or -.",
        rich_help_panel=_TRAINING,
    ),
]
BatchOption = Annotated[
    int | None,
    typer.Option(
        "--micro-batch-size", "-b", min=1, help="Sequences per device per forward pass.", rich_help_panel=_TRAINING
    ),
]
LengthOption = Annotated[
    int | None,
    typer.Option("--sequence-length", "-s", min=1, help="Tokens per sequence.", rich_help_panel=_TRAINING),
]
CheckpointingOption = Annotated[
    CheckpointingChoice | None,
    typer.Option("--checkpointing", help="Activation checkpointing.", rich_help_panel=_TRAINING),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Any key of a training config, such as kernels.optimizer=fused; repeatable.",
        rich_help_panel=_TRAINING,
    ),
]
GpuOption = Annotated[
    str | None,
    typer.Option("--gpu", "-g", metavar="NAME", help="A GPU of the catalog, or local.", rich_help_panel=_DEVICE),
]
GpuMemoryOption = Annotated[
    str | None,
    typer.Option(
        "--gpu-memory",
        metavar="SIZE",
        help="Memory of a GPU that is in no catalog, such as 24GiB.",
        rich_help_panel=_DEVICE,
    ),
]
GpusOption = Annotated[
    int, typer.Option("--gpus", "-n", min=1, max=MAXIMUM_GPUS, help="How many of them.", rich_help_panel=_DEVICE)
]
ProfileOption = Annotated[
    Path | None,
    typer.Option(
        "--profile",
        envvar="MEMPLAN_PROFILE",
        metavar="FILE",
        help="Measured workspaces and context, from memplan validate --calibrate.",
        rich_help_panel=_DEVICE,
    ),
]
PlotOption = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE", help="Draw the answer, as SVG or PNG.", rich_help_panel=_OUTPUT),
]
LayersOption = Annotated[int | None, typer.Option("--layers", help="Layers.", rich_help_panel=_MODEL)]
HiddenOption = Annotated[
    int | None, typer.Option("--hidden", help="Width of the residual stream.", rich_help_panel=_MODEL)
]
IntermediateOption = Annotated[
    int | None, typer.Option("--intermediate", help="Width of the feed-forward part.", rich_help_panel=_MODEL)
]
HeadsOption = Annotated[int | None, typer.Option("--heads", help="Attention heads.", rich_help_panel=_MODEL)]
KvHeadsOption = Annotated[int | None, typer.Option("--kv-heads", help="Key and value heads.", rich_help_panel=_MODEL)]
HeadDimOption = Annotated[int | None, typer.Option("--head-dim", help="Width of a head.", rich_help_panel=_MODEL)]
VocabOption = Annotated[int | None, typer.Option("--vocab", help="Size of the vocabulary.", rich_help_panel=_MODEL)]
TiedOption = Annotated[
    bool | None,
    typer.Option("--tied/--untied", help="Head and embedding share their weights.", rich_help_panel=_MODEL),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Same as --format json.", rich_help_panel=_OUTPUT)]
FormatOption = Annotated[
    OutputFormat, typer.Option("--format", "-f", help="How to write the answer.", rich_help_panel=_OUTPUT)
]
CheckFormatOption = Annotated[
    CheckFormat, typer.Option("--format", "-f", help="How to write the answer.", rich_help_panel=_OUTPUT)
]
OutputOption = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE", help="Write the answer to a file.", rich_help_panel=_OUTPUT),
]
UnitsOption = Annotated[Unit | None, typer.Option("--units", help="Unit of bytes in tables.", rich_help_panel=_OUTPUT)]
QuietOption = Annotated[
    bool,
    typer.Option(
        "--quiet", "-q", help="Only the last line, or nothing besides the exit code.", rich_help_panel=_OUTPUT
    ),
]
StrictOption = Annotated[bool, typer.Option("--strict", help="Treat TIGHT as NO.", rich_help_panel=_OUTPUT)]
CatalogOption = Annotated[
    Path | None,
    typer.Option(
        "--catalog",
        envvar="MEMPLAN_CATALOG",
        metavar="PATH",
        help="Your own catalog file or folder, added to ours.",
        rich_help_panel=_OUTPUT,
    ),
]
