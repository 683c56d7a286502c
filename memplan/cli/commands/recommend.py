"""``memplan recommend``: which config and which Newton-Schulz precision, for each GPU."""

from __future__ import annotations

import typer

from memplan.cli import option_groups as o
from memplan.cli.output import emit, unit_text
from memplan.library.lookup import Overrides, catalog_model, find_devices, find_setup, open_catalog


def recommend_command(
    gpu: o.GpuOption = None,
    gpu_memory: o.GpuMemoryOption = None,
    gpus: o.GpusOption = 1,
    batch: o.BatchOption = None,
    length: o.LengthOption = None,
    checkpointing: o.CheckpointingOption = None,
    as_json: o.JsonOption = False,
    form: o.FormatOption = o.OutputFormat.table,
    output: o.OutputOption = None,
    units: o.UnitsOption = None,
    quiet: o.QuietOption = False,
    catalog_path: o.CatalogOption = None,
) -> None:
    """What should I train with on this GPU? The config that holds the most, and the precision of Newton-Schulz.

    Derived from the catalog and the evidence; what no measurement covers is said. Without --gpu: every GPU.
    """
    catalog = open_catalog(catalog_path)
    overrides = Overrides(batch, length, checkpointing, ())
    devices = find_devices(gpu, gpu_memory, gpus, catalog)
    names = [name for name, config in catalog.configs.entries.items() if config.adapter is None]
    setups = [find_setup(name, overrides, catalog) for name in names]
    models = [(name, catalog_model(name, catalog)) for name in catalog.models]
    from memplan.catalog.recorded_rows import Records
    from memplan.plan.recommended_configs import recommendations
    from memplan.report.experiments import shipped_record
    from memplan.report.plans.recommend_answer import recommend_document

    found = recommendations(models, setups, devices, Records(catalog.root).verdict)
    evidence = catalog.root / "configs" / "evidence"
    precision, on_gpu = (shipped_record(name, evidence) for name in ("precision", "precision-h200"))
    document = recommend_document(found, setups[0], precision, on_gpu, unit_text(units))
    raise typer.Exit(emit(document, form, as_json, output, quiet))
