"""``memplan validate``: predicted beside measured, on this machine and for good."""

from __future__ import annotations

import signal
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from memplan.cli import option_groups as o
from memplan.cli.output import emit, unit_text
from memplan.documents.writing import say
from memplan.library.lookup import Overrides, Shapes, open_catalog

_VALIDATE = "Validate"
EXIT_INTERRUPTED = 130


class DeviceChoice(StrEnum):
    """What runs the training steps."""

    cuda = "cuda"
    cpu = "cpu"


DeviceOption = Annotated[
    DeviceChoice | None,
    typer.Option("--device", help="What to measure on; the GPU where there is one.", rich_help_panel=_VALIDATE),
]
SmallOption = Annotated[
    bool | None,
    typer.Option(
        "--small/--whole",
        help="Cut the model to 2 layers of width 256, or leave it; small on the CPU unless told otherwise.",
        show_default=False,
        rich_help_panel=_VALIDATE,
    ),
]
StepsOption = Annotated[
    int,
    typer.Option(
        "--steps", min=2, max=100, help="Training steps; the first is not counted.", rich_help_panel=_VALIDATE
    ),
]
SilenceOption = Annotated[
    int,
    typer.Option(
        "--patience", min=1, help="Seconds without progress after which a run is ended.", rich_help_panel=_VALIDATE
    ),
]
RecordOption = Annotated[
    Path | None,
    typer.Option(
        "--record", metavar="FILE", help="Write the measurement; a folder with --plan.", rich_help_panel=_VALIDATE
    ),
]
ReplayOption = Annotated[
    Path | None,
    typer.Option(
        "--replay",
        metavar="DIR|FILE",
        help="Check records against today's predictions instead.",
        rich_help_panel=_VALIDATE,
    ),
]
PlanOption = Annotated[
    bool,
    typer.Option(
        "--plan",
        help="Run the device's whole measurement plan; what is recorded is skipped.",
        rich_help_panel=_VALIDATE,
    ),
]
CalibrateOption = Annotated[
    Path | None,
    typer.Option(
        "--calibrate",
        metavar="DIR|FILE",
        help="What records say of a machine's own memory; -o FILE is a profile for plans.",
        rich_help_panel=_VALIDATE,
    ),
]
AllocatorOption = Annotated[
    str, typer.Option("--alloc-conf", metavar="CONF", help="As PYTORCH_CUDA_ALLOC_CONF.", rich_help_panel=_VALIDATE)
]  # fmt: skip


def validate_command(
    model: o.ModelArgument = None,
    config: o.ConfigOption = None,
    device: DeviceOption = None,
    small: SmallOption = None,
    steps: StepsOption = 3,
    patience: SilenceOption = 600,
    record: RecordOption = None,
    replay: ReplayOption = None,
    plan: PlanOption = False,
    calibrate: CalibrateOption = None,
    alloc_conf: AllocatorOption = "",
    batch: o.BatchOption = None,
    length: o.LengthOption = None,
    checkpointing: o.CheckpointingOption = None,
    settings: o.SetOption = None,
    layers: o.LayersOption = None,
    hidden: o.HiddenOption = None,
    intermediate: o.IntermediateOption = None,
    heads: o.HeadsOption = None,
    kv_heads: o.KvHeadsOption = None,
    head_dim: o.HeadDimOption = None,
    vocab: o.VocabOption = None,
    tied: o.TiedOption = None,
    as_json: o.JsonOption = False,
    form: o.FormatOption = o.OutputFormat.table,
    output: o.OutputOption = None,
    units: o.UnitsOption = None,
    quiet: o.QuietOption = False,
    catalog_path: o.CatalogOption = None,
) -> None:
    """Is that true here? Real training steps on this machine: predicted beside traced and measured.

    Exit code 0: all agrees; 1: something does not; 2: bad input; 3: nothing could be measured.
    """
    from memplan.cli.torch_commands.validating import ValidateRequest, validate_document

    request = ValidateRequest(
        model=model,
        shapes=Shapes(layers, hidden, intermediate, heads, kv_heads, head_dim, vocab, tied),
        config=config or "tier1",
        overrides=Overrides(batch, length, checkpointing, tuple(settings or ())),
        device=None if device is None else device.value,
        small=small,
        steps=steps,
        patience=patience,
        record=record,
        replay=replay,
        plan=plan,
        calibrate=calibrate,
        alloc_conf=alloc_conf,
        command=" ".join(["memplan", *sys.argv[1:]]),
        quiet=quiet,
    )
    before = signal.signal(signal.SIGTERM, _interrupted)
    try:
        document = validate_document(request, open_catalog(catalog_path), unit_text(units))
    except KeyboardInterrupt:
        say("interrupted; nothing is left running")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    finally:
        signal.signal(signal.SIGTERM, before)
    raise typer.Exit(emit(document, form, as_json, output, quiet))


def _interrupted(*_: Any) -> None:
    """Treat a request to end as an interrupt, so that everything is cleaned up."""
    raise KeyboardInterrupt
