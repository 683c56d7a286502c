"""``memplan fit``: will this job fit on that GPU?"""

from __future__ import annotations

import typer

from memplan.cli import option_groups as o
from memplan.cli.output import emit, unit_text
from memplan.errors import MemplanError
from memplan.library.lookup import Overrides, Shapes, find_device, find_model, find_setup, open_catalog
from memplan.library.lookup.card_profile import with_profile


def fit_command(
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
    strict: o.StrictOption = False,
    as_json: o.JsonOption = False,
    form: o.FormatOption = o.OutputFormat.table,
    output: o.OutputOption = None,
    units: o.UnitsOption = None,
    quiet: o.QuietOption = False,
    catalog_path: o.CatalogOption = None,
) -> None:
    """Will this training job fit on that GPU? Without --config: one row for every shipped config.

    Exit code 0: it fits (or is TIGHT, without --strict); 1: it does not.
    """
    catalog = open_catalog(catalog_path)
    shapes = Shapes(layers, hidden, intermediate, heads, kv_heads, head_dim, vocab, tied)
    found = find_model(model, shapes, catalog)
    device = with_profile(find_device(gpu, gpu_memory, 1, catalog), profile)
    overrides = Overrides(batch, length, checkpointing, tuple(settings or ()), gpus)
    setups, left_out = [], []
    for name in [config] if config is not None else list(catalog.configs):
        try:
            setups.append(find_setup(name, overrides, catalog, found))
        except MemplanError as error:
            if config is not None or (name == list(catalog.configs)[-1] and not setups):
                raise
            left_out.append(f"{name}: {'; '.join(str(error).splitlines())}")
    if gpus > 1 and left_out:
        names = ", ".join(line.partition(":")[0] for line in left_out)
        left_out = [
            f"{names}: not planned with zero_stage 3; --config NAME says why, --set parallel.zero_stage=0 replicates"
        ]
    from memplan.plan.planner import CompiledPlan
    from memplan.plan.suggestions import with_suggestions
    from memplan.report.plans.fit_answer import rows_document
    from memplan.report.plans.plan_answer import plan_document

    plans = [CompiledPlan(found, setup).evaluate(device) for setup in setups]
    unit, full = unit_text(units), as_json or form == "json"
    catalog_hash = catalog.hash if full else ""
    if config is not None:
        document = plan_document(with_suggestions(plans[0], catalog), catalog_hash, unit, strict)
    else:
        document = rows_document(plans, catalog_hash, unit, strict=strict, full=full, left_out=left_out)
    raise typer.Exit(emit(document, form, as_json, output, quiet))
