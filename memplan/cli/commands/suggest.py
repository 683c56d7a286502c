"""``memplan suggest``: which settings should I use?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from memplan.cli import option_groups as o
from memplan.cli.output import emit, unit_text
from memplan.documents.escaping import json_text
from memplan.documents.opening import is_folder, shown_path
from memplan.documents.writing import make_folder, say, write_file
from memplan.errors import InvalidFileError
from memplan.library.lookup import Overrides, Shapes, find_device, find_model, find_setup, open_catalog, parallels
from memplan.units import parse_bytes

_SEARCH = "Search"
BASE = "bf16-adamw"
CONFIG_SUFFIXES = (".yaml", ".yml", ".json")

KeepOption = Annotated[
    list[str] | None,
    typer.Option(
        "--keep",
        metavar="AXIS",
        help="Keep what the config says of: weights, master, gradients, lifetime, optimizer, offload, checkpointing, "
        "kernels, batch, accumulation; repeatable. A key given by --set is kept anyway.",
        rich_help_panel=_SEARCH,
    ),
]
MinBatchOption = Annotated[
    int, typer.Option("--min-batch", min=1, max=2**24, help="Least micro-batch.", rich_help_panel=_SEARCH)
]
MinStepBatchOption = Annotated[
    int | None,
    typer.Option(
        "--min-step-batch",
        min=1,
        max=2**20,
        help="Least sequences per optimizer step, accumulated; the config's own where --config is given.",
        rich_help_panel=_SEARCH,
    ),
]
MinSequenceOption = Annotated[
    int, typer.Option("--min-sequence", min=1, max=2**30, help="Least tokens per sequence.", rich_help_panel=_SEARCH)
]
HostMemoryOption = Annotated[
    str | None,
    typer.Option(
        "--host-memory",
        metavar="SIZE",
        help="Most host memory for optimizer states, such as 32GiB or 0B.",
        rich_help_panel=_SEARCH,
    ),
]
ExperimentalOption = Annotated[
    bool, typer.Option("--experimental", help="Use experimental settings too.", rich_help_panel=_SEARCH)
]
MostOption = Annotated[
    int, typer.Option("--most", min=1, max=100, help="How many answers at most.", rich_help_panel=_SEARCH)
]
SaveOption = Annotated[
    Path | None,
    typer.Option(
        "--save",
        metavar="DIR|FILE",
        help="Write the first answer to a .yaml or .json file, or all of them into a folder.",
        rich_help_panel=_SEARCH,
    ),
]


def suggest_command(
    model: o.ModelArgument = None,
    gpu: o.GpuOption = None,
    gpu_memory: o.GpuMemoryOption = None,
    gpus: o.GpusOption = 1,
    config: o.ConfigOption = None,
    keep: KeepOption = None,
    min_batch: MinBatchOption = 1,
    min_step_batch: MinStepBatchOption = None,
    min_sequence: MinSequenceOption = 1,
    host_memory: HostMemoryOption = None,
    experimental: ExperimentalOption = False,
    most: MostOption = 5,
    save: SaveOption = None,
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
    """Which settings should I use? The best that fit, ranked, each as a config that can be saved.

    Exit code 0: some fit; 1: none does, and the nearest miss is shown.
    """
    if save is not None:
        check_target(save)
    catalog = open_catalog(catalog_path)
    shapes = Shapes(layers, hidden, intermediate, heads, kv_heads, head_dim, vocab, tied)
    found = find_model(model, shapes, catalog)
    device = find_device(gpu, gpu_memory, 1, catalog)
    overrides = Overrides(batch, length, checkpointing, tuple(settings or ()))
    base = find_setup(BASE if config is None else config, overrides, catalog, found).config
    from memplan.report.plans.suggest_answer import suggest_document
    from memplan.solver.search.suggested_settings import Request, axes_of, suggestions

    given = [tuple(setting.partition("=")[0].strip().split(".")) for setting in settings or ()]
    given += [("micro_batch_size",)] if batch is not None else []
    given += [("activation_checkpointing",)] if checkpointing is not None else []
    shared = parallels(base.parallel, gpus, fixed=("parallel", "zero_stage") in given)
    own = 1 if config is None else base.micro_batch_size * base.gradient_accumulation_steps * base.parallel.data
    request = Request(
        base=base,
        keep=tuple(dict.fromkeys((*(keep or ()), *axes_of(given)))),
        min_batch=min_batch,
        step_batch=own if min_step_batch is None else min_step_batch,
        min_sequence=min_sequence,
        experimental=experimental,
        strict=strict,
        most=most,
        host_bytes=None if host_memory is None else parse_bytes(host_memory),
        parallels=shared,
    )
    document = suggest_document(suggestions(found, request, device, catalog), catalog.hash, unit_text(units))
    if save is not None:
        save_configs(document.data["rows"], save)
    raise typer.Exit(emit(document, form, as_json, output, quiet))


def check_target(target: Path) -> None:
    """Refuse a name that is neither a config's nor that of a folder.

    Raises:
        InvalidFileError: It ends as the file of something else does.
    """
    if target.suffix not in ("", *CONFIG_SUFFIXES) and not is_folder(target):
        wanted = f"a name that ends in {', '.join(CONFIG_SUFFIXES)}, or a folder"
        raise InvalidFileError([f"--save {shown_path(target)}: expected {wanted}"])


def save_configs(rows: list[dict[str, Any]], target: Path) -> None:
    """Write the training configs of suggestions: the first to a file, or all into a folder.

    Raises:
        InvalidFileError: The file or folder cannot be written.
    """
    if not rows:
        say(f"nothing fits, so nothing was written to {target}")
        return
    one = target.suffix in CONFIG_SUFFIXES
    if not one:
        make_folder(target)
    for row in rows[:1] if one else rows:
        path = target if one else target / f"{row['config']}.yaml"
        write_file(path, config_text(row["training"], path.suffix == ".json"))
        say(f"wrote {path}")


def config_text(training: dict[str, Any], as_json: bool) -> str:
    """Return a training config as a file's text."""
    plain = json.loads(json.dumps(training))
    if as_json:
        return json_text(plain)
    import yaml

    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=110)
