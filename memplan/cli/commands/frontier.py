"""``memplan frontier``: what batch and sequence length?"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from memplan.cli import option_groups as o
from memplan.cli.output import deliver, emit, unit_text
from memplan.errors import InvalidFileError
from memplan.library.lookup import Overrides, Shapes, find_device, find_model, find_setup, open_catalog


class FrontierFormat(StrEnum):
    """How the grid is written."""

    table = "table"
    plain = "plain"
    json = "json"
    csv = "csv"
    md = "md"
    svg = "svg"


BatchesOption = Annotated[
    str | None,
    typer.Option("--batches", metavar="1,2,4", help="Micro-batches of the grid.", rich_help_panel="Grid"),
]
LengthsOption = Annotated[
    str | None,
    typer.Option("--lengths", metavar="512,1024", help="Sequence lengths of the grid.", rich_help_panel="Grid"),
]
FormatOption = Annotated[
    FrontierFormat,
    typer.Option("--format", "-f", help="How to write the answer; svg is a heat map.", rich_help_panel="Output"),
]


def frontier_command(
    model: o.ModelArgument = None,
    gpu: o.GpuOption = None,
    gpu_memory: o.GpuMemoryOption = None,
    gpus: o.GpusOption = 1,
    config: o.ConfigOption = None,
    batches: BatchesOption = None,
    lengths: LengthsOption = None,
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
    form: FormatOption = FrontierFormat.table,
    output: o.OutputOption = None,
    units: o.UnitsOption = None,
    quiet: o.QuietOption = False,
    catalog_path: o.CatalogOption = None,
) -> None:
    """What batch and sequence length? A grid, and the exact line between what fits and what does not.

    Without --config: bf16-adamw. An --output that ends in .svg is a heat map. Exit code 1: nothing in the grid fits.
    """
    catalog = open_catalog(catalog_path)
    shapes = Shapes(layers, hidden, intermediate, heads, kv_heads, head_dim, vocab, tied)
    found = find_model(model, shapes, catalog)
    device = find_device(gpu, gpu_memory, gpus, catalog)
    overrides = Overrides(None, None, checkpointing, tuple(settings or ()))
    setup = find_setup("bf16-adamw" if config is None else config, overrides, catalog, found)
    from memplan.plan.planner import CompiledPlan
    from memplan.report.plans.frontier_answer import frontier_document
    from memplan.solver.batch_frontier import DEFAULT_BATCHES, DEFAULT_LENGTHS, frontier

    limit = found.spec.learned_positions or found.spec.max_position_embeddings
    default = tuple(length for length in DEFAULT_LENGTHS if not limit or length <= limit)
    grid = frontier(
        CompiledPlan(found, setup),
        device,
        numbers("--batches", batches, 2**24) or DEFAULT_BATCHES,
        numbers("--lengths", lengths, 2**30) or default or (limit,),
    )
    if form is FrontierFormat.svg or (output is not None and output.suffix == ".svg" and not as_json):
        raise typer.Exit(_heat_map(grid, output, strict))
    document = frontier_document(grid, catalog.hash, unit_text(units), strict=strict, tidy=form is FrontierFormat.csv)
    raise typer.Exit(emit(document, o.OutputFormat(form.value), as_json, output, quiet))


def _heat_map(grid: object, output: Path | None, strict: bool) -> int:
    from memplan.report.plans.frontier_answer import heat_map_code
    from memplan.report.plans.heatmap import heat_map
    from memplan.solver.batch_frontier import Frontier

    assert isinstance(grid, Frontier)
    deliver(heat_map(grid), output)
    return heat_map_code(grid, strict)


def numbers(option: str, text: str | None, most: int) -> tuple[int, ...]:
    """Return the whole numbers of a list such as ``1,2,4``, ascending; nothing for no list.

    Raises:
        InvalidFileError: Something else, or more numbers than a grid has use for.
    """
    if text is None:
        return ()
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) <= 12 for part in parts):
        raise InvalidFileError([f"{option} {text[:60]}: expected whole numbers, such as 1,2,4"])
    found = tuple(sorted({int(part) for part in parts}))
    if not 1 <= found[0] <= found[-1] <= most or len(found) > 100:
        raise InvalidFileError([f"{option}: expected at most 100 whole numbers from 1 to {most:,}"])
    return found
