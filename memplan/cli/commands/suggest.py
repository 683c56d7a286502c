"""``memplan suggest``: which settings should I use?"""

import json
from pathlib import Path
from typing import Annotated, Any, cast

import memplan
from memplan.cli.grid_options import GridOptions
from memplan.cli.grouped_command import command, without
from memplan.cli.option_groups import PARALLEL, DeviceOptions, ModelOptions, OutputOptions, VerdictOptions, option
from memplan.cli.output import Waiting, emit
from memplan.cli.training_options import TrainingOptions, job_options
from memplan.documents.escaping import json_text
from memplan.documents.frozen_values import dataclass
from memplan.documents.opening import is_folder, shown_path
from memplan.documents.writing import make_folder, say, write_file
from memplan.errors import InvalidFileError
from memplan.library.job_options import JobOptions
from memplan.library.runs.searched_layouts import Layouts
from memplan.library.several.suggested_plans import SearchOptions as Searched
from memplan.library.several.suggested_plans import Suggested
from memplan.solver.search.axes import AXES

_SEARCH = "Search"
CONFIG_SUFFIXES = (".yaml", ".yml", ".json")


_LEAST = "Least of each: sequences, tokens, sequences of a step."


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """What may be changed, and what an answer must have."""

    keep: Annotated[
        list[str] | None,
        option(
            _SEARCH, "--keep AXIS", f"What stays as in the config; repeatable. One of {', '.join((*AXES, 'kernels'))}."
        ),
    ] = None
    min_batch: Annotated[int, option(_SEARCH, "--min-batch N", _LEAST, min=1, max=2**24)] = 1
    min_sequence: Annotated[int, option(_SEARCH, "--min-sequence N", _LEAST, min=1, max=2**30)] = 1
    min_step_batch: Annotated[int | None, option(_SEARCH, "--min-step-batch N", _LEAST, min=1, max=2**20)] = None
    host_memory: Annotated[
        str | None, option(_SEARCH, "--host-memory SIZE", "Most host memory for optimizer states, as 32GiB.")
    ] = None
    network: Annotated[
        str | None, option(PARALLEL, "--network NAME", "Between nodes, as infiniband-400g: a port for each GPU.")
    ] = None
    experimental: Annotated[bool, option(_SEARCH, "--experimental", "Use experimental settings too.")] = False
    most: Annotated[int, option(_SEARCH, "--most N", "How many answers at most.", min=1, max=100)] = 5
    save: Annotated[
        Path | None, option(_SEARCH, "--save DIR|FILE", "Write the first config to a file, or all into a folder.")
    ] = None
    write: Annotated[bool, option(_SEARCH, "--write", "Change the trainer's file; the old one stays as .bak.")] = False


@command(example="memplan suggest llama-8b --gpu rtx4090 --save best.yaml")
def suggest_command(
    model: ModelOptions,
    device: Annotated[DeviceOptions, without("profile", "host_memory")],
    training: TrainingOptions,
    grid: Annotated[GridOptions, without("rank")],
    search: SearchOptions,
    verdict: VerdictOptions,
    output: OutputOptions,
) -> int:
    """Which settings should I use? The best that fit, ranked, as configs to save.

    On several GPUs: how to share the job. Exit code 0: some fit; 1: none does.
    """
    if search.save is not None:
        check_target(search.save)
    options = job_options(output, grid.over(training), model, grid.counted(device))
    own_file = model.model is not None and options["config"] == model.model and search.save is None
    if search.write and not own_file:
        raise InvalidFileError(["--write changes a trainer's file: give one as MODEL, and neither --config nor --save"])
    if model.model is not None and own_file:
        _refuse_search(search)
        return _rewrite(model.model, search.write, options, verdict, output)
    document = _suggestions(model.model, search, verdict, options).document(output.unit, full=output.whole)
    if search.save is not None:
        save_configs(document.data["rows"], search.save)
    return emit(document, output)


def _suggestions(
    model: str | None, search: SearchOptions, verdict: VerdictOptions, options: JobOptions
) -> Suggested | Layouts:
    """Return how several GPUs best share the job, or the best settings."""
    from memplan.library.runs.searched_layouts import searches_layouts

    if search.network is not None and (options["gpus"] or 1) == 1:
        raise InvalidFileError(["--network joins nodes of several GPUs: add --gpus"])
    requested = cast("Searched", dict(options))
    requested |= {
        "min_batch": search.min_batch,
        "min_step_batch": search.min_step_batch,
        "min_sequence": search.min_sequence,
        "strict": verdict.strict,
        "most": search.most,
        "network": search.network,
    }
    with Waiting("suggest") as waiting:
        if not (search.keep or search.host_memory or search.experimental) and searches_layouts(model, options):
            return memplan.suggest_layouts(model, progress=waiting, **requested)
        requested |= {"keep": search.keep, "host_memory": search.host_memory, "experimental": search.experimental}
        return memplan.suggest(model, progress=waiting, **requested)


def _refuse_search(search: SearchOptions) -> None:
    """Refuse what changes of a trainer's file take no account of."""
    names = [name for name in search.__slots__ if name != "write"]
    given = [name for name in names if (getattr(search, name) or None) != (getattr(SearchOptions(), name) or None)]
    if given:
        text = "is for a search of configs, and not for changes of a trainer's file: leave it out, or add --save FILE"
        raise InvalidFileError([f"--{given[0].replace('_', '-')} {text}"])


def _rewrite(file: str, write: bool, options: JobOptions, verdict: VerdictOptions, output: OutputOptions) -> int:
    """Answer in the keys of a trainer's own file, and write it where that is asked for."""
    from memplan.library.trainers.written_back import write_back

    answer = memplan.rewrite(file, **options)
    document = answer.document(output.unit, strict=verdict.strict)
    if write and document.exit_code == 0 and (copy := write_back(answer.rewritten)) is not None:
        say(f"wrote {file}; as it was: {copy}")
    return emit(document, output)


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
