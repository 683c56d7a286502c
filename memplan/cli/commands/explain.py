"""``memplan explain``: why this number, so that it can be redone by hand."""

from __future__ import annotations

import typer

from memplan.cli import option_groups as o
from memplan.cli.output import emit, unit_text
from memplan.library.lookup import Overrides, Shapes, find_device, find_model, find_setup, open_catalog
from memplan.library.lookup.card_profile import with_profile


def explain_command(
    model: o.ModelArgument = None,
    gpu: o.GpuOption = None,
    gpu_memory: o.GpuMemoryOption = None,
    gpus: o.GpusOption = 1,
    profile: o.ProfileOption = None,
    config: o.ConfigOption = None,
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
    """Why this number? Every formula with its values put in, and its source.

    Without --config: bf16-adamw. Without --gpu: an RTX 4090, which decides only the allowances.
    """
    catalog = open_catalog(catalog_path)
    shapes = Shapes(layers, hidden, intermediate, heads, kv_heads, head_dim, vocab, tied)
    found = find_model(model, shapes, catalog)
    named = gpu if gpu is not None or gpu_memory is not None else "rtx4090"
    device = with_profile(find_device(named, gpu_memory, 1, catalog), profile)
    setup = find_setup(
        "bf16-adamw" if config is None else config,
        Overrides(batch, length, checkpointing, tuple(settings or ()), gpus),
        catalog,
        found,
    )
    from memplan.plan.planner import CompiledPlan
    from memplan.report.plans.explain_answer import explain_document

    plan = CompiledPlan(found, setup).evaluate(device)
    raise typer.Exit(emit(explain_document(plan, catalog.hash, unit_text(units)), form, as_json, output, quiet))
