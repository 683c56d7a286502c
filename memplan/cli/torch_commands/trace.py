"""``memplan trace``: the same step on fake tensors, through a simulated CUDA allocator."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import memplan
from memplan.allocator.settings import parse_alloc_conf
from memplan.cli.grouped_command import command, without
from memplan.cli.option_groups import DeviceOptions, ModelOptions, OutputOptions, PlotOptions, option
from memplan.cli.output import draw, emit
from memplan.cli.training_options import TrainingOptions, job_options
from memplan.documents.frozen_values import dataclass
from memplan.documents.writing import say, write_file
from memplan.errors import InvalidFileError
from memplan.host.installed_torch import require_torch
from memplan.report.figures import check_drawable

ONE = "give one thing to trace: MODEL, shapes, --hf DIR, --module PKG.MOD:FACTORY or --history FILE"
_TRACE = "Trace"


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """What is traced in place of MODEL, and what is shown of it."""

    hf: Annotated[Path | None, option(_TRACE, "--hf DIR", "transformers' own code for the config.json in DIR.")] = None
    module: Annotated[str | None, option(_TRACE, "--module PKG.MOD:FACTORY", "Your own nn.Module.")] = None
    history: Annotated[Path | None, option(_TRACE, "--history FILE", "Replay a memory history exported as JSON.")] = (
        None
    )
    timeline: Annotated[Path | None, option(_TRACE, "--timeline FILE", "The step's timeline, as .svg or .json.")] = None
    alloc_conf: Annotated[str, option(_TRACE, "--alloc-conf CONF", "As PYTORCH_CUDA_ALLOC_CONF.")] = ""
    largest: Annotated[int, option(_TRACE, "--largest N", "Tensors to list at the peak.", min=0, max=1000)] = 10


@command(example="memplan trace llama-8b --config qlora --gpu rtx4090")
def trace_command(
    model: Annotated[ModelOptions, without("beside")],
    traced: TraceOptions,
    device: Annotated[DeviceOptions, without("gpus", "profile")],
    training: TrainingOptions,
    plot: PlotOptions,
    output: OutputOptions,
) -> int:
    """What would torch do, exactly? A real training step on tensors without memory; no GPU needed.

    Shows formula beside trace. Without --config: bf16-adamw. Needs torch (pip install '.[torch]' in a checkout).
    """
    if traced.history is not None:
        given = [model.model, traced.hf, traced.module, *model.shapes.given()]
        if any(value is not None for value in given) or plot.plot is not None:
            raise InvalidFileError([ONE])
        return emit(memplan.replay(traced.history, alloc_conf=traced.alloc_conf).document(output.unit), output)
    timeline = timeline_form(traced.timeline)
    if traced.module is not None:
        sys.path.insert(0, "")  # as python -m has it, so that modules in the working directory are there
    parse_alloc_conf(traced.alloc_conf)
    answer = memplan.trace(
        model.model,
        hf=traced.hf,
        module=traced.module,
        alloc_conf=traced.alloc_conf,
        largest=traced.largest,
        progress=None if output.quiet else say,
        **job_options(output, training, model, device),
    )
    if traced.timeline is not None and timeline is not None:
        write_file(traced.timeline, answer.timeline(timeline))
    draw(answer, plot)
    return emit(answer.document(output.unit), output)


def timeline_form(path: Path | None) -> Literal["svg", "json"] | None:
    """Return what a timeline is written as.

    Raises:
        CannotAnswerError: Nothing can be traced here.
        InvalidFileError: The file's name says nothing that a timeline can be.
    """
    require_torch()
    if path is not None and path.suffix not in (".svg", ".json"):
        raise InvalidFileError([f"--timeline {path}: expected a name that ends in .svg or .json"])
    if path is not None and path.suffix == ".svg":
        check_drawable(path)
    return None if path is None else "svg" if path.suffix == ".svg" else "json"
