"""Training configs: from a name or a file, with what is changed on top, to a training setup."""

import json
from collections.abc import Mapping
from dataclasses import field, replace
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

from memplan.catalog.catalog import Catalog
from memplan.catalog.config_keys.parallel_keys import Parallel
from memplan.catalog.stack_versions import DEFAULT_STACK, PRESET_STACKS
from memplan.catalog.training_config import TrainingConfig
from memplan.documents.frozen_values import dataclass
from memplan.documents.loading import Document, load_document, parse_document, written_json
from memplan.documents.opening import usable_path
from memplan.documents.schemas import validate
from memplan.errors import MOST_EXPLAINED, CannotAnswerError, InvalidFileError, printable
from memplan.library.lookup.model_lookup import models_beside
from memplan.library.lookup.trainer_files import SUFFIXES, GivenFiles, is_trainer_file, training_document
from memplan.model.model import Model
from memplan.step.grids.grid import grid_of
from memplan.step.kernels.refused_row_masks import unpadded
from memplan.step.states.parallel_shards import FULLY_SHARDED
from memplan.training.parallelism import divides_model
from memplan.training.resolution.config_problems import Path as KeyPath
from memplan.training.resolution.config_problems import config_problems
from memplan.training.resolution.resolve_config import resolve
from memplan.training.resolved import TrainingSetup


@dataclass(frozen=True, slots=True)
class Overrides:
    """What the command line changes in a training config."""

    batch: int | None = None
    length: int | None = None
    checkpointing: str | None = None
    settings: tuple[str, ...] = field(default=())
    gpus: int = 1  # GPUs that share the work; a config that says nothing of it is sharded over them
    counted: bool = False  # Whether their number was said, be it one
    stack: str | None = None  # The stack, in place of the config's own
    beside: tuple[str, ...] = ()  # Files of a launcher that go with a trainer's own file
    trainer_version: str = ""  # The version of that trainer


ConfigGiven = str | Mapping[str, Any]
"""A training config by its name or path, or its keys and values."""

OWN_CONFIG = "config"
"""What messages and answers call a training config that is given as keys and values."""


def find_setup(
    config_given: ConfigGiven, overrides: Overrides, catalog: Catalog, model: Model | None = None
) -> TrainingSetup:
    """Return the setup that a training config and overrides describe; ``--set`` stands above shorthands.

    What a shipped config says by default gives way where it cannot be: its sequence length to ``model``'s learned
    positions, its quantised formats to those of the stack that was asked for.

    Args:
        config_given: Catalog name, path, ``-`` for standard input, or keys and values.

    Raises:
        InvalidFileError: Every unknown key, unknown name and impossible value at once.
        CannotAnswerError: Keys whose effect is not modelled.
        UnknownNameError: No config has the name.
    """
    config, document = _config(config_given, overrides, catalog, model)
    name = config_given if isinstance(config_given, str) else OWN_CONFIG
    given = {path for path, _ in _settings(overrides.settings)}
    changes = _changes(config, overrides, given)
    shipped = isinstance(config_given, str) and not _is_file(config_given)
    positions = model.spec.learned_positions if model is not None and shipped else 0
    said = "sequence_length" in changes or ("sequence_length",) in given
    if 0 < positions < config.sequence_length and not said:
        changes["sequence_length"] = positions
    if shipped and overrides.stack is not None:
        own = catalog.stack(overrides.stack).own_formats
        fixed = {path[1] for path in given if path[0] == "weights" and len(path) > 1}
        changes["weights"] = {
            role: name if role in fixed else own.get(name, name) for role, name in config.weights.items()
        }
    title = name if document is None else document.name

    def where(path: KeyPath) -> str:
        is_set = any(one[: len(path)] == path[: len(one)] for one in given)
        if is_set or path[0] in changes or document is None:
            return f"--set {'.'.join(path)}" if is_set else f"{title}: {'.'.join(path)}"
        return document.where(path)

    shown = name if name != "-" else "stdin"
    setup = resolve(replace(config, **changes), catalog, shown, where, models_beside(config.method, catalog))
    if is_trainer_file(name) and ("padded_rows",) not in given:
        setup = _padded_if_planned(setup)
    return replace(setup, changed=True) if overrides.settings else setup


def _padded_if_planned(setup: TrainingSetup) -> TrainingSetup:
    """Return a setup without the padding that a trainer's collator makes, where another kernel or stack is asked for, with which it is not planned."""
    if not setup.config.padded_rows or not unpadded(setup):
        return setup
    return replace(setup, config=replace(setup.config, padded_rows=None))


def read_config(config_given: ConfigGiven, overrides: Overrides, catalog: Catalog) -> TrainingConfig:
    """Return a training config as it is written, with what is changed in it; arguments and errors as of :func:`find_setup`."""
    config, _ = _config(config_given, overrides, catalog)
    alone = replace(overrides, gpus=1)  # how GPUs share the work is the config's own
    return replace(config, **_changes(config, alone, {path for path, _ in _settings(overrides.settings)}))


def _changes(config: TrainingConfig, overrides: Overrides, given: set[KeyPath]) -> dict[str, Any]:
    """Return the keys of a config that shorthands replace, but for those that are set by name."""
    shorthands = {
        "micro_batch_size": overrides.batch,
        "sequence_length": overrides.length,
        "activation_checkpointing": overrides.checkpointing and str(overrides.checkpointing),
        "stack": overrides.stack,
    }
    changes: dict[str, Any] = {k: v for k, v in shorthands.items() if v is not None and (k,) not in given}
    if overrides.gpus > 1:
        changes["parallel"] = _shared_out(config.parallel, overrides.gpus, given)
    return changes


def _shared_out(parallel: Parallel, gpus: int, given: set[KeyPath]) -> Parallel:
    """Return how so many GPUs share the work: as the config says, else with everything sharded."""
    if divides_model(parallel):
        stage = FULLY_SHARDED if ("parallel", "zero_stage") not in given else parallel.zero_stage
        grid = grid_of(replace(parallel, expert_tensor=parallel.expert_tensor or 1), gpus)
        return replace(parallel, data=grid.data, zero_stage=parallel.zero_stage or stage)
    if parallel.data not in (1, gpus):
        raise InvalidFileError(
            [f"--gpus {gpus}: the config is for parallel.data {parallel.data}; give the same number"]
        )
    said = parallel.data > 1 or ("parallel", "zero_stage") in given
    return replace(parallel, data=gpus, zero_stage=parallel.zero_stage if said else FULLY_SHARDED)


def parallels(parallel: Parallel, gpus: int, *, fixed: bool, coded: bool) -> tuple[Parallel, ...]:
    """Return the ways in which so many GPUs may share the work: what a config says, else sharded and replicated.

    Args:
        gpus: ``--gpus``, or 1.
        fixed: Whether something of it was set on the command line.
        coded: Whether frozen weights are quantised, which FSDP1 alone shards.
    """
    if gpus == 1 or fixed or parallel.data > 1 or divides_model(parallel):
        given: set[KeyPath] = {("parallel", "zero_stage")} if fixed else set()
        return (parallel if gpus == 1 else _shared_out(parallel, gpus, given),)
    ways = tuple(replace(parallel, data=gpus, zero_stage=stage) for stage in (FULLY_SHARDED, 0))
    return (*ways, replace(ways[0], engine="fsdp1")) if coded else ways


def require_one_gpu(setup: TrainingSetup, command: str) -> TrainingSetup:
    """Return a setup that one device runs.

    Raises:
        CannotAnswerError: It is for several.
    """
    if setup.config.parallel.gpus > 1:
        raise CannotAnswerError(
            f"parallel.data: {command} runs on one device; memplan trace follows one GPU of several"
        )
    return setup


def require_own_loop(setup: TrainingSetup, command: str) -> TrainingSetup:
    """Return a setup that memplan's own training loop runs.

    Raises:
        CannotAnswerError: It is of another stack.
    """
    if setup.stack.name != DEFAULT_STACK:
        raise CannotAnswerError(
            f"stack: {command} runs memplan's own loop, not {setup.stack.name}; use --stack {DEFAULT_STACK}"
        )
    return setup


def _is_file(name: str) -> bool:
    """Tell a config's path from a catalog name."""
    return name == "-" or name.endswith(SUFFIXES) or "/" in name


def _config(
    name: ConfigGiven, overrides: Overrides, catalog: Catalog, model: Model | None = None
) -> tuple[TrainingConfig, Document | None]:
    """Return the config, and the document that it stands in where it was not taken as shipped."""
    alone = [f"--with {printable(one)}" for one in overrides.beside[:1]]
    alone += [f"--trainer-version {printable(overrides.trainer_version)}"] if overrides.trainer_version else []
    if alone and not (isinstance(name, str) and is_trainer_file(name)):
        raise InvalidFileError([f"{alone[0]}: goes with a trainer's own file, and none is given"])
    if not isinstance(name, str):
        data = json.loads(written_json(dict(name), OWN_CONFIG))
        document = Document(OWN_CONFIG, data if "training" in data else {"description": "", **data}, {})
    elif not _is_file(name):
        canonical = catalog.configs.name_of(name)
        if not overrides.settings:
            return catalog.configs.entries[canonical], None
        document = load_document(Path(catalog.configs.origins[canonical]))
        if canonical in (document.data.get("configs") or {}):
            document = Document(document.name, document.data["configs"][canonical], {})
    elif is_trainer_file(name):
        gpus = overrides.gpus if overrides.counted or overrides.gpus > 1 else None
        said = _command_line_keys(overrides)
        files = GivenFiles(name, overrides.beside, overrides.trainer_version)
        document = training_document(files, gpus, catalog, given=said, model=model)
    else:
        document = load_document(usable_path(name))
    if isinstance(document.data, dict) and "schema" in document.data and "training" in document.data:
        document = Document(document.name, document.data["training"], {}, document.problems)
    _refuse_settings_of_no_adapter(document, overrides.settings)
    _refuse_trainers_keys(overrides.settings, catalog)
    wanted = without_preset(_with_listed_targets(with_settings(document, overrides.settings)))
    try:
        return validate(TrainingConfig, wanted), document
    except InvalidFileError as error:
        raise InvalidFileError([*error.problems, *_further_problems(wanted, error, catalog)]) from None


def _command_line_keys(overrides: Overrides) -> dict[str, Any]:
    """Return the dotted keys of a training config that the command line says, with their values."""
    sizes = {"micro_batch_size": overrides.batch, "sequence_length": overrides.length}
    keys = {key: size for key, size in sizes.items() if size is not None}
    return keys | {".".join(path): value for path, value in _settings(overrides.settings)}


def without_preset(document: Document) -> Document:
    """Return a config without the kernel preset that configs had before stacks, which becomes a problem of the document."""
    data = document.data
    kernels = data.get("kernels") if isinstance(data, dict) else None
    if not isinstance(kernels, dict) or "preset" not in kernels:
        return document
    place = document.where(("kernels", "preset"))
    stack = PRESET_STACKS.get(str(kernels["preset"]), DEFAULT_STACK)
    problem = f"{place}: kernel presets are part of stacks now; write stack: {stack} in place of it"
    rest = {**data, "kernels": {key: value for key, value in kernels.items() if key != "preset"}}
    return Document(document.name, rest, document.lines, (*document.problems, problem), document.settings)


def _with_listed_targets(document: Document) -> Document:
    """Return a config in which an adapter's targets are a list, where they were one word such as ``all-linear``."""
    data = document.data
    adapter = data.get("adapter") if isinstance(data, dict) else None
    if not isinstance(adapter, dict) or not isinstance(adapter.get("targets"), str):
        return document
    listed = {**data, "adapter": {**adapter, "targets": [adapter["targets"]]}}
    return Document(document.name, listed, document.lines, document.problems, document.settings)


def _further_problems(document: Document, error: InvalidFileError, catalog: Catalog) -> list[str]:
    """Return what is wrong with the rest of a config, its values of the wrong kind left out."""
    if not isinstance(document.data, dict) or len(error.paths) > MOST_EXPLAINED:
        return []
    data: Any = document.data
    for path in error.paths:
        data = _without(data, path)
    try:
        config = validate(TrainingConfig, Document(document.name, {"description": "", **data}, document.lines))
    except InvalidFileError:
        return []
    return [f"{document.where(path)}: {text}" for path, text in config_problems(config, catalog)]


def _without(data: Any, path: tuple[Any, ...]) -> Any:
    """Return ``data`` without what stands at ``path``; of a list, the whole list goes."""
    if not isinstance(data, dict) or not path or path[0] not in data:
        return data
    inner = data[path[0]]
    if len(path) == 1 or not isinstance(inner, dict):
        return {key: value for key, value in data.items() if key != path[0]}
    return {**data, path[0]: _without(inner, path[1:])}


MORE_OF_ADAPTER = frozenset(("dtype", "dropout", "modules_to_save", "vision"))
"""Keys that say more of an adapter, and not that there is one, as its kind, rank and targets do."""


def _refuse_settings_of_no_adapter(document: Document, settings: tuple[str, ...]) -> None:
    """Refuse more of an adapter where a config has none and nothing set makes one."""
    if isinstance(document.data, dict) and document.data.get("adapter"):
        return
    given = [(path, value) for path, value in _settings(settings) if path[0] == "adapter"]
    said = [path[1:2] or tuple(value) for path, value in given if path[1:] or isinstance(value, dict)]
    if said and MORE_OF_ADAPTER.issuperset(chain.from_iterable(said)):
        where = ".".join(map(printable, given[0][0]))
        raise InvalidFileError([f"--set {where}: the config has no adapter; --set adapter.kind=lora gives it one"])


def with_settings(document: Document, settings: tuple[str, ...]) -> Document:
    """Return a config document with ``--set`` values put in; one name for weights or optimizer is the default."""
    data = document.data
    given = _settings(settings)
    for path, value in given:
        if not isinstance(data, dict):
            raise InvalidFileError([f"{document.where(())}: expected keys and values"])
        if path in (("weights",), ("optimizer",)) and isinstance(value, str):
            value = {"default": value}
        data = _assigned(data, path, value)
    return Document(document.name, data, document.lines, document.problems, frozenset(path for path, _ in given))


def _refuse_trainers_keys(settings: tuple[str, ...], catalog: Catalog) -> None:
    """Refuse a trainer's key, with what it is called here."""
    for (head, *rest), _ in _settings(settings):
        if rest or head in TrainingConfig.__dataclass_fields__:
            continue
        for stack in catalog.stacks.entries.values():
            if ours := next((key for key, own in stack.keys.items() if own.rpartition(".")[2] == head), ""):
                raise InvalidFileError([f"--set {printable(head)}: unknown key; here it is {ours}"])


def _settings(settings: tuple[str, ...]) -> list[tuple[KeyPath, Any]]:
    pairs = []
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key.strip():
            raise InvalidFileError([f"--set {printable(setting)}: expected KEY=VALUE, such as kernels.optimizer=fused"])
        pairs.append((tuple(part.strip() for part in key.split(".")), _set_value(key, text)))
    return pairs


@lru_cache(maxsize=64)
def _set_value(key: str, text: str) -> Any:
    """Return the value of a setting, which is read once for all configs that it is set in."""
    return parse_document(text, f"--set {printable(key)}").data


def _assigned(data: Mapping[str, Any], path: KeyPath, value: Any) -> dict[str, Any]:
    """Return ``data`` with the value at ``path`` replaced."""
    head, *rest = path
    if not rest:
        return {**data, head: value}
    inner = data.get(head)
    if not isinstance(inner, dict):
        inner = {}
    return {**data, head: _assigned(inner, tuple(rest), value)}
