"""``memplan run``: the reader's own training script, on a GPU that is not there."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import memplan
from memplan.catalog.config_keys.parallel_keys import MAXIMUM_GPUS
from memplan.cli.grouped_command import command, without
from memplan.cli.option_groups import DeviceOptions, OutputOptions, option
from memplan.cli.output import emit
from memplan.cli.torch_commands.trace import timeline_form
from memplan.documents.frozen_values import dataclass
from memplan.documents.writing import say, write_file
from memplan.errors import InvalidFileError

_RUN = "Run"


LONGEST_RUN = 7 * 86_400


@dataclass(frozen=True, slots=True)
class RunOptions:
    """A script with its own arguments, and how it is run."""

    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SCRIPT [-- ARGS]", help="The script, and what it is to be given.", show_default=False,
            rich_help_panel=_RUN,
        ),
    ] = None  # fmt: skip
    module: Annotated[str | None, option(_RUN, "--module -m MODULE", "A module in place of SCRIPT, as python -m.")] = (
        None
    )
    gpus: Annotated[
        int | None, option(_RUN, "--gpus -n N", "Processes, as torchrun starts them.", min=1, max=MAXIMUM_GPUS)
    ] = None
    rank: Annotated[int, option(_RUN, "--rank R", "Which of them runs.", min=0)] = 0
    synthetic: Annotated[
        int | None, option(_RUN, "--synthetic TOKENS", "Rows of so many tokens in place of the loader's.", min=1)
    ] = None
    check: Annotated[
        Path | None, option(_RUN, "--check FILE", "A budget, one of whose jobs bears the script's name.")
    ] = None
    steps: Annotated[int, option(_RUN, "--steps N", "Training steps to take.", min=1, max=100)] = 3
    timeline: Annotated[
        Path | None, option(_RUN, "--timeline FILE", "The fullest step's timeline, as .svg or .json.")
    ] = None
    timeout: Annotated[
        float, option(_RUN, "--timeout S", "Seconds that the script may take.", min=1, max=LONGEST_RUN)
    ] = 600
    worst: Annotated[bool, option(_RUN, "--worst", "Masks hold everything, and tokens go to the same experts.")] = False
    allow_writes: Annotated[bool, option(_RUN, "--allow-writes", "Let the script write its files.")] = False
    alloc_conf: Annotated[str, option(_RUN, "--alloc-conf CONF", "As PYTORCH_CUDA_ALLOC_CONF.")] = ""
    largest: Annotated[int, option(_RUN, "--largest N", "Tensors to list at the peak.", min=0, max=1000)] = 10


@command(example="memplan run train.py --gpu rtx4090 -- --batch-size 8")
def run_command(
    script: RunOptions, device: Annotated[DeviceOptions, without("profile", "gpus")], output: OutputOptions
) -> int:
    """What would my own script need? It runs here, against a GPU that is not, on tensors without memory.

    It runs the script's code, as python would. Exit code 1: it would run out of memory; 2: it fails by itself;
    3: it does what cannot be pretended. Needs torch.
    """
    words = list(script.words or ())
    if script.module is None and not words:
        raise InvalidFileError(["give a SCRIPT, or a module with -m"])
    form = timeline_form(script.timeline)
    if not output.quiet:
        say("running the script's own code, on tensors without memory")
    answer = memplan.run(
        words.pop(0) if script.module is None else script.module,
        words,
        module=script.module is not None,
        gpu=device.gpu,
        gpu_memory=device.gpu_memory,
        synthetic=script.synthetic,
        check=script.check,
        gpus=script.gpus,
        rank=script.rank,
        steps=script.steps,
        timeout=script.timeout,
        worst=script.worst,
        allow_writes=script.allow_writes,
        alloc_conf=script.alloc_conf,
        largest=script.largest,
        quiet=output.quiet,
        catalog=output.catalog_path,
    )
    if script.timeline is not None and form is not None:
        write_file(script.timeline, answer.timeline(form))
    return emit(answer.document(output.unit), output)
