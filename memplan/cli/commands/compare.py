"""``memplan compare``: configs and GPUs side by side."""

from __future__ import annotations

from typing import Annotated

import typer

from memplan.cli import option_groups as o
from memplan.cli.output import emit, unit_text
from memplan.library.lookup import Overrides, Shapes, find_device, find_model, find_setup, open_catalog

ConfigsOption = Annotated[
    list[str] | None,
    typer.Option("--config", "-c", metavar="NAME|FILE", help="A training config; repeat it for each."),
]
GpusOption = Annotated[
    list[str] | None,
    typer.Option("--gpu", "-g", metavar="NAME", help="A GPU of the catalog, or local; repeat it for each."),
]


def compare_command(
    model: o.ModelArgument = None,
    configs: ConfigsOption = None,
    gpu: GpusOption = None,
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
    strict: o.StrictOption = False,
    as_json: o.JsonOption = False,
    form: o.FormatOption = o.OutputFormat.table,
    output: o.OutputOption = None,
    units: o.UnitsOption = None,
    quiet: o.QuietOption = False,
    catalog_path: o.CatalogOption = None,
) -> None:
    """How do these compare? Configs and GPUs side by side, component by component, differences marked.

    Without --config: bf16-adamw and tier1. Exit code 0: at least one fits; 1: none does.
    """
    catalog = open_catalog(catalog_path)
    shapes = Shapes(layers, hidden, intermediate, heads, kv_heads, head_dim, vocab, tied)
    found = find_model(model, shapes, catalog)
    overrides = Overrides(batch, length, checkpointing, tuple(settings or ()))
    setups = [find_setup(name, overrides, catalog, found) for name in configs or ["bf16-adamw", "tier1"]]
    names: list[str | None] = [*(gpu or [])] or [None]
    devices = [find_device(name, gpu_memory, 1, catalog) for name in names]
    from memplan.plan.planner import CompiledPlan
    from memplan.report.plans.compare_answer import compare_document

    compiled = [CompiledPlan(found, setup) for setup in setups]
    plans = [plan.evaluate(device) for device in devices for plan in compiled]
    document = compare_document(plans, catalog.hash, unit_text(units), several=len(devices) > 1, strict=strict)
    raise typer.Exit(emit(document, form, as_json, output, quiet))
