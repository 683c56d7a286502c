"""``memplan max`` and ``memplan where``: the largest that a GPU holds, the fewest GPUs for a model."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, cast

import typer

from memplan.catalog.catalog import Catalog
from memplan.cli import option_groups as o
from memplan.cli.output import emit, unit_text
from memplan.errors import InvalidFileError
from memplan.library.lookup import Overrides, Shapes, catalog_model, find_devices, find_model, find_setup, open_catalog
from memplan.model.model import Model
from memplan.plan.memory_plan import Device
from memplan.report.document import Document
from memplan.training.resolved import TrainingSetup


class Sought(StrEnum):
    """What the largest is sought of."""

    parameters = "parameters"
    batch = "batch"
    sequence = "sequence"
    lora_rank = "lora-rank"
    layers = "layers"


ForOption = Annotated[
    Sought, typer.Option("--for", help="What to find the largest of; but for parameters it takes a MODEL.")
]


class Accounting(StrEnum):
    """Rules that the notes count by."""

    scale = "notes-scale"
    precision = "notes-precision"
    minimum_gpus = "notes-min-gpus"


AccountingOption = Annotated[
    Accounting | None,
    typer.Option("--accounting", help="Answer by a rule of the notes, not memplan's; labelled as such."),
]
PriceOption = Annotated[
    Path | None,
    typer.Option(
        "--price",
        metavar="FILE",
        help="Your own prices, GPU: price of an hour, as YAML or JSON; the cheapest comes first.",
    ),
]


def max_command(
    model: o.ModelArgument = None,
    what: ForOption = Sought.parameters,
    config: o.ConfigOption = None,
    gpu: o.GpuOption = None,
    gpu_memory: o.GpuMemoryOption = None,
    gpus: o.GpusOption = 1,
    batch: o.BatchOption = None,
    length: o.LengthOption = None,
    checkpointing: o.CheckpointingOption = None,
    settings: o.SetOption = None,
    strict: o.StrictOption = False,
    accounting: AccountingOption = None,
    plot: o.PlotOption = None,
    as_json: o.JsonOption = False,
    form: o.FormatOption = o.OutputFormat.table,
    output: o.OutputOption = None,
    units: o.UnitsOption = None,
    quiet: o.QuietOption = False,
    catalog_path: o.CatalogOption = None,
) -> None:
    """How large can it be? A model for each GPU; with --for, its batch, sequence, adapter rank or layers.

    Without --gpu: every GPU of the catalog. Without --config: tier1, tier2, tier3 and bf16-adamw; with --for,
    bf16-adamw (lora for a rank). What is answered FITS, and one more does not.
    """
    catalog = open_catalog(catalog_path)
    overrides = Overrides(batch, length, checkpointing, tuple(settings or ()))
    if plot is not None:
        if accounting is not None or what is not Sought.parameters:
            raise InvalidFileError(["--plot: draws the largest models; leave out --for and --accounting"])
        from memplan.report.figures import check_drawable, save_figure
        from memplan.report.largest.largest_figure import largest_figure

        check_drawable(plot)
    if accounting is not None:
        _refuse_details(accounting, overrides, model if what is Sought.parameters else f"--for {what.value}")
        from memplan.published.notes_answers import Cards, largest_by_notes
        from memplan.report.largest.accounting_answer import max_by_notes_document

        cards = Cards(gpu, gpu_memory, gpus)
        document = max_by_notes_document(largest_by_notes(accounting.value, config, cards, catalog))
        raise typer.Exit(emit(document, form, as_json, output, quiet))
    devices = find_devices(gpu, gpu_memory, gpus, catalog)
    if what is Sought.parameters:
        document = _largest_models(model, config, overrides, devices, catalog, unit_text(units))
        if plot is not None:
            save_figure(largest_figure(document.data["rows"]), plot)
    else:
        document = _largest(what, model, config, overrides, devices, catalog, unit_text(units), strict)
    raise typer.Exit(emit(document, form, as_json, output, quiet))


def _refuse_details(accounting: Accounting, overrides: Overrides, other: str | None = None) -> None:
    """Refuse what no rule of the notes takes into account."""
    given = [other] if other else []
    given += ["--micro-batch-size"] if overrides.batch is not None else []
    given += ["--sequence-length"] if overrides.length is not None else []
    given += ["--checkpointing"] if overrides.checkpointing is not None else []
    given += [f"--set {setting}" for setting in overrides.settings]
    if given:
        raise InvalidFileError(
            [f"--accounting {accounting.value}: the notes' rule knows no {', '.join(given)}; leave it out"]
        )


def _largest_models(
    model: str | None, config: str | None, overrides: Overrides, devices: list[Device], catalog: Catalog, unit: str
) -> Document:
    if model is not None:
        raise InvalidFileError(
            [f"max --for parameters seeks a model, so it takes none: {model!r}; or give --for batch"]
        )
    names = [config] if config is not None else ["tier1", "tier2", "tier3", "bf16-adamw"]
    setups = [find_setup(name, overrides, catalog) for name in names]
    models = [(name, catalog_model(name, catalog)) for name in catalog.models]
    from memplan.plan.largest_model import largest_models
    from memplan.published.printed_cell import printed_maxima
    from memplan.published.table_schema import Library
    from memplan.report.largest.largest_model_answer import max_document

    rows = [row for setup in setups for row in largest_models(models, setup, devices)]
    return max_document(rows, printed_maxima(Library(catalog.root)), unit)


def _largest(
    what: Sought,
    model: str | None,
    config: str | None,
    overrides: Overrides,
    devices: list[Device],
    catalog: Catalog,
    unit: str,
    strict: bool,
) -> Document:
    from memplan.report.largest.largest_value_answer import largest_document
    from memplan.solver.largest_per_device import Quantity as Kind
    from memplan.solver.largest_per_device import largest_values

    found = find_model(model, Shapes(), catalog)
    default = "lora" if what is Sought.lora_rank else "bf16-adamw"
    setup = find_setup(default if config is None else config, overrides, catalog, found)
    kind = cast("Kind", what.value)
    return largest_document(kind, found, setup, largest_values(kind, found, setup, devices), unit, strict=strict)


def where_command(
    model: o.ModelArgument = None,
    config: o.ConfigOption = None,
    gpu: o.GpuOption = None,
    gpu_memory: o.GpuMemoryOption = None,
    price: PriceOption = None,
    accounting: AccountingOption = None,
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
    """Which GPU, and how many? The fewest of each kind, as fit --gpus plans them; with --price the cheapest.

    Without --config: bf16-adamw. Where a config is not planned on several GPUs, a bound from pooled memory is
    shown, which is no answer. Exit code 0: it fits; 1: on none; 3: only bounds.
    """
    catalog = open_catalog(catalog_path)
    shapes = Shapes(layers, hidden, intermediate, heads, kv_heads, head_dim, vocab, tied)
    found = find_model(model, shapes, catalog)
    overrides = Overrides(batch, length, checkpointing, tuple(settings or ()))
    if accounting is not None:
        given = {"--gpu": gpu, "--gpu-memory": gpu_memory, "--price": price}
        _refuse_details(accounting, overrides, next((name for name, value in given.items() if value is not None), None))
        from memplan.published.notes_answers import fewest_by_notes, nominal_billions
        from memplan.report.largest.accounting_answer import where_by_notes_document

        by_notes = fewest_by_notes(accounting.value, found, config, catalog)
        document = where_by_notes_document(found.spec.name, nominal_billions(found), by_notes)
        raise typer.Exit(emit(document, form, as_json, output, quiet))
    document = _where(
        found,
        config or "bf16-adamw",
        overrides,
        find_devices(gpu, gpu_memory, 1, catalog),
        catalog,
        price,
        unit_text(units),
    )
    raise typer.Exit(emit(document, form, as_json, output, quiet))


def _where(
    model: Model,
    config: str,
    overrides: Overrides,
    devices: list[Device],
    catalog: Catalog,
    price: Path | None,
    unit: str,
) -> Document:
    from memplan.library.lookup.prices import load_prices
    from memplan.plan.largest_model import placements
    from memplan.report.largest.largest_model_answer import where_document

    def setup_of(count: int) -> TrainingSetup:
        return find_setup(config, replace(overrides, gpus=count), catalog, model)

    prices = None if price is None else load_prices(price, catalog)
    setup = setup_of(1)
    return where_document(model, setup.name, placements(model, setup_of, devices), setup.config, unit, prices)
