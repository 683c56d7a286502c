"""``memplan trace``: the same step on fake tensors, through a simulated CUDA allocator."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from memplan.cli import option_groups as o
from memplan.cli.output import emit, unit_text
from memplan.library.lookup import Overrides, Shapes, open_catalog

_TRACE = "Trace"

HfOption = Annotated[
    Path | None,
    typer.Option(
        "--hf", metavar="DIR", help="Trace transformers' own code for the config.json in DIR.", rich_help_panel=_TRACE
    ),
]
ModuleOption = Annotated[
    str | None,
    typer.Option("--module", metavar="PKG.MOD:FACTORY", help="Trace your own nn.Module.", rich_help_panel=_TRACE),
]
HistoryOption = Annotated[
    Path | None,
    typer.Option(
        "--history", metavar="FILE", help="Replay a memory history exported as JSON instead.", rich_help_panel=_TRACE
    ),
]
TimelineOption = Annotated[
    Path | None,
    typer.Option(
        "--timeline", metavar="FILE", help="Write the step's timeline to an .svg or .json file.", rich_help_panel=_TRACE
    ),
]
AllocatorOption = Annotated[
    str,
    typer.Option(
        "--alloc-conf",
        metavar="CONF",
        help="As PYTORCH_CUDA_ALLOC_CONF, such as expandable_segments:True.",
        rich_help_panel=_TRACE,
    ),
]
LargestOption = Annotated[
    int, typer.Option("--largest", min=0, max=1000, help="Tensors to list at the peak.", rich_help_panel=_TRACE)
]


def trace_command(
    model: o.ModelArgument = None,
    config: o.ConfigOption = None,
    hf: HfOption = None,
    module: ModuleOption = None,
    history: HistoryOption = None,
    timeline: TimelineOption = None,
    alloc_conf: AllocatorOption = "",
    largest: LargestOption = 10,
    gpu: o.GpuOption = None,
    gpu_memory: o.GpuMemoryOption = None,
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
    """What would torch do, exactly? A real training step on tensors without memory; no GPU needed.

    Shows formula beside trace. Without --config: bf16-adamw. Needs torch (pip install memplan[torch]).
    """
    from memplan.cli.torch_commands.tracing import TraceRequest, trace_document

    request = TraceRequest(
        model=model,
        shapes=Shapes(layers, hidden, intermediate, heads, kv_heads, head_dim, vocab, tied),
        hf=hf,
        module=module,
        history=history,
        config=config or "bf16-adamw",
        overrides=Overrides(batch, length, checkpointing, tuple(settings or ())),
        gpu=gpu,
        gpu_memory=gpu_memory,
        alloc_conf=alloc_conf,
        timeline=timeline,
        largest=largest,
        quiet=quiet,
    )
    document = trace_document(request, open_catalog(catalog_path), unit_text(units))
    raise typer.Exit(emit(document, form, as_json, output, quiet))
