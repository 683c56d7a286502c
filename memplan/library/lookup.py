"""From what was typed to values: models, training setups and devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memplan.catalog.catalog import Catalog, data_directory
from memplan.catalog.entries import Gpu, Interconnect, ModelEntry
from memplan.documents.loading import Document, load_document, parse_document
from memplan.documents.opening import path_kind, shown_path, usable_path
from memplan.documents.schemas import validate
from memplan.errors import (
    CannotAnswerError,
    InvalidFileError,
    MemplanError,
    UnknownNameError,
    normalised_name,
    printable,
    unknown_name,
)
from memplan.model.families import model_spec
from memplan.model.inventory import inventory_of
from memplan.model.model import Model
from memplan.plan.planner import Device
from memplan.step.states.parallel_shards import FULLY_SHARDED
from memplan.training.resolved import Path as KeyPath
from memplan.training.resolved import TrainingSetup, config_problems, resolve
from memplan.units import parse_bytes

if TYPE_CHECKING:
    from memplan.catalog.training_config import Parallel, TrainingConfig
    from memplan.host.nvidia_gpus import NvidiaDevice


def open_catalog(extra: Path | None) -> Catalog:
    """Return the shipped catalog with a user's own added."""
    return Catalog(data_directory(), extra)


# ------------------------------------------------------------------ models
@dataclass(frozen=True, slots=True)
class Shapes:
    """A model given by its shapes on the command line."""

    layers: int | None = None
    hidden: int | None = None
    intermediate: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    vocab: int | None = None
    tied: bool | None = None

    def given(self) -> dict[str, Any]:
        """Return the shapes that were given."""
        return {name: value for name in self.__slots__ if (value := getattr(self, name)) is not None}


def find_model(text: str | None, shapes: Shapes, catalog: Catalog) -> Model:
    """Return the model that MODEL or explicit shapes name.

    Raises:
        MemplanError: An unknown name, an unreadable file, or both a name and shapes.
    """
    given = shapes.given()
    if text is None and not given:
        raise InvalidFileError(
            [
                "no model given: name one (memplan list models), a file, or shapes such as --layers 32 --hidden 4096 --heads 32"
            ]
        )
    if text is None:
        from memplan.model.readers.shapes import model_from_shapes

        missing = [f"--{name}" for name in ("layers", "hidden", "heads") if name not in given]
        if missing:
            raise InvalidFileError([f"a model by its shapes needs {' and '.join(missing)} too"])
        return model_from_shapes(**given)
    if given:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise InvalidFileError([f"both a model ({text!r}) and shapes ({flags}) given: give one of them"])
    found = _catalog_model(text, catalog)
    return found if found is not None else _model_file(text, catalog)


def catalog_model(name: str, catalog: Catalog) -> Model:
    """Return a model of the catalog by its exact name."""
    return _from_entry(name, catalog.models.entries[name])


def _from_entry(name: str, entry: ModelEntry) -> Model:
    spec = model_spec({**entry.config, "model_type": entry.architecture}, entry.title, f"catalog:{name}")
    return Model(spec, inventory_of(spec), f"catalog:{name}")


def _catalog_model(text: str, catalog: Catalog) -> Model | None:
    if text != "-" and not text.startswith((".", "/", "~")):
        if text in catalog.models:
            name = catalog.models.name_of(text)
            return _from_entry(name, catalog.models.entries[name])
        for name, entry in catalog.models.entries.items():
            if normalised_name(entry.hf_id) == normalised_name(text):
                return _from_entry(name, entry)
    return None


def _model_file(text: str, catalog: Catalog) -> Model:
    path = usable_path(text)
    there = path_kind(path) != "nothing"
    if text == "-" or there or path.suffix in (".json", ".gguf", ".safetensors"):
        return read_model_file(path, catalog)
    if len(path.parts) > 2 or text.startswith((".", "/", "~")):
        raise InvalidFileError([f"{shown_path(path)}: no such file or directory"])
    known = [*catalog.models.entries, *(a for e in catalog.models.entries.values() for a in e.aliases)]
    raise unknown_name("model", text, known, "memplan list models")


def read_model_file(path: Path, catalog: Catalog) -> Model:
    """Return the model in a file or directory, told apart by name and content."""
    if path.suffix == ".gguf":
        from memplan.model.readers.gguf import BlockLayout, read_gguf

        layouts = {
            entry.ggml_type: BlockLayout(name, entry.block_elements, entry.block_bytes)
            for name, entry in catalog.formats.entries.items()
            if entry.ggml_type is not None
        }
        return read_gguf(path, layouts)
    if path.suffix == ".safetensors" or path.name.endswith(".safetensors.index.json"):
        from memplan.model.readers.safetensors import read_safetensors

        return read_safetensors(path)
    from memplan.model.readers.huggingface import read_huggingface

    return read_huggingface(path)


# ------------------------------------------------------------------ training setups
@dataclass(frozen=True, slots=True)
class Overrides:
    """What the command line changes in a training config.

    Attributes:
        gpus: GPUs that share the work; a config that says nothing of it is sharded over them.
    """

    batch: int | None = None
    length: int | None = None
    checkpointing: str | None = None
    settings: tuple[str, ...] = field(default=())
    gpus: int = 1


def find_setup(name: str, overrides: Overrides, catalog: Catalog, model: Model | None = None) -> TrainingSetup:
    """Return the setup that a config's name or path and overrides describe; ``--set`` stands above shorthands.

    The default sequence length of a shipped config gives way to ``model``'s learned positions.
    """
    config, document = _config(name, overrides, catalog)
    given = {path for path, _ in _settings(overrides.settings)}
    shorthands = {
        "micro_batch_size": overrides.batch,
        "sequence_length": overrides.length,
        "activation_checkpointing": overrides.checkpointing and str(overrides.checkpointing),
    }
    changes: dict[str, Any] = {k: v for k, v in shorthands.items() if v is not None and (k,) not in given}
    if overrides.gpus > 1:
        changes["parallel"] = _shared_out(config.parallel, overrides.gpus, given)
    positions = model.spec.learned_positions if model is not None and not _is_file(name) else 0
    if (
        0 < positions < config.sequence_length
        and "sequence_length" not in changes
        and ("sequence_length",) not in given
    ):
        changes["sequence_length"] = positions
    shown = name if document is None else document.name

    def where(path: KeyPath) -> str:
        if path in given or path[0] in changes or document is None:
            return f"--set {'.'.join(path)}" if path in given else f"{shown}: {'.'.join(path)}"
        return document.where(path)

    setup = resolve(replace(config, **changes), catalog, name if name != "-" else "stdin", where)
    return replace(setup, changed=True) if overrides.settings else setup


def _shared_out(parallel: Parallel, gpus: int, given: set[KeyPath]) -> Parallel:
    """Return how so many GPUs share the work: as the config says, else with everything sharded.

    Raises:
        InvalidFileError: The config is for another number of GPUs.
    """
    if parallel.data not in (1, gpus):
        raise InvalidFileError(
            [f"--gpus {gpus}: the config is for parallel.data {parallel.data}; give the same number"]
        )
    said = parallel.data > 1 or ("parallel", "zero_stage") in given
    return replace(parallel, data=gpus, zero_stage=parallel.zero_stage if said else FULLY_SHARDED)


def parallels(parallel: Parallel, gpus: int, *, fixed: bool) -> tuple[Parallel, ...]:
    """Return the ways in which so many GPUs may share the work: what a config says, else sharded and replicated.

    Args:
        parallel: What the config says.
        gpus: ``--gpus``, or 1.
        fixed: Whether the stage was set on the command line.
    """
    if gpus == 1 or fixed or parallel.data > 1:
        given: set[KeyPath] = {("parallel", "zero_stage")} if fixed else set()
        return (parallel if gpus == 1 else _shared_out(parallel, gpus, given),)
    return tuple(replace(parallel, data=gpus, zero_stage=stage) for stage in (FULLY_SHARDED, 0))


def require_one_gpu(setup: TrainingSetup, command: str) -> TrainingSetup:
    """Return a setup that one device runs.

    Raises:
        CannotAnswerError: It is for several.
    """
    if setup.config.parallel.data > 1:
        raise CannotAnswerError(
            f"parallel.data: {command} runs on one device; memplan trace follows one GPU of several"
        )
    return setup


def _is_file(name: str) -> bool:
    """Tell a config's path from a catalog name."""
    return name == "-" or name.endswith((".yaml", ".yml", ".json")) or "/" in name


def _config(name: str, overrides: Overrides, catalog: Catalog) -> tuple[TrainingConfig, Document | None]:
    """Return the config, and the document that it stands in where it was not taken as shipped."""
    from memplan.catalog.training_config import TrainingConfig

    if not _is_file(name):
        canonical = catalog.configs.name_of(name)
        if not overrides.settings:
            return catalog.configs.entries[canonical], None
        document = load_document(Path(catalog.configs.origins[canonical]))
        if canonical in (document.data.get("configs") or {}):
            document = Document(document.name, document.data["configs"][canonical], {})
    else:
        document = load_document(usable_path(name))
        if isinstance(document.data, dict) and "schema" in document.data and "training" in document.data:
            document = Document(document.name, document.data["training"], {}, document.problems)
    wanted = with_settings(document, overrides.settings)
    try:
        return validate(TrainingConfig, wanted), document
    except InvalidFileError as error:
        raise InvalidFileError([*error.problems, *_further_problems(wanted, error, catalog)]) from None


def _further_problems(document: Document, error: InvalidFileError, catalog: Catalog) -> list[str]:
    """Return what is wrong with the rest of a config, its values of the wrong kind left out."""
    from memplan.catalog.training_config import TrainingConfig

    if not isinstance(document.data, dict):
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


def _settings(settings: tuple[str, ...]) -> list[tuple[KeyPath, Any]]:
    found = []
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key.strip():
            raise InvalidFileError([f"--set {printable(setting)}: expected KEY=VALUE, such as kernels.optimizer=fused"])
        value = parse_document(text, f"--set {printable(key)}").data
        found.append((tuple(part.strip() for part in key.split(".")), value))
    return found


def _assigned(data: Mapping[str, Any], path: KeyPath, value: Any) -> dict[str, Any]:
    """Return ``data`` with the value at ``path`` replaced."""
    head, *rest = path
    if not rest:
        return {**data, head: value}
    inner = data.get(head)
    if not isinstance(inner, dict):
        inner = {}
    return {**data, head: _assigned(inner, tuple(rest), value)}


# ------------------------------------------------------------------ devices
def find_device(name: str | None, memory: str | None, count: int, catalog: Catalog) -> Device:
    """Return the device that ``--gpu``, ``--gpu-memory`` or the machine itself names.

    Raises:
        CannotAnswerError: No GPU was named and none is here.
    """
    if name is not None and memory is not None:
        raise InvalidFileError(["both --gpu and --gpu-memory given: give one of them"])
    if memory is not None:
        return Device(custom_gpu(parse_bytes(memory), memory), f"a GPU of {memory}", count)
    if name is None or normalised_name(name) == "local":
        return Device(*local_gpu(catalog), count)
    return Device(catalog.gpus[name], catalog.gpus.name_of(name), count)


def find_devices(name: str | None, memory: str | None, count: int, catalog: Catalog) -> list[Device]:
    """Return the device that was named, or every GPU of the catalog where none was."""
    if name is not None or memory is not None:
        return [find_device(name, memory, count, catalog)]
    return [Device(entry, known, count) for known, entry in catalog.gpus.entries.items()]


def custom_gpu(size: int, shown: str) -> Gpu:
    """Return a catalog entry for a GPU of which only the memory is known."""
    if size <= 0:
        raise InvalidFileError([f"--gpu-memory {shown}: expected more than nothing"])
    return Gpu(
        name=f"GPU with {shown}",
        vendor="nvidia",
        architecture="unknown",
        memory_bytes=size,
        memory_kind="stated",
        cuda_total_bytes=size,
        cuda_total_kind="stated",
        bandwidth_bytes_per_second=0,
        dense_flops={},
        interconnect=Interconnect("unknown", 0),
        unified_memory=False,
        sources=(),
    )


def local_gpu(catalog: Catalog) -> tuple[Gpu, str]:
    """Return the first GPU of this machine as its driver describes it, and its name.

    Raises:
        CannotAnswerError: No driver, or no device.
    """
    from memplan.host.nvidia_gpus import nvidia_devices

    devices = nvidia_devices()
    if not devices:
        raise CannotAnswerError(
            "no GPU found on this machine; name one with --gpu (memplan list gpus) or give --gpu-memory 24GiB"
        )
    device = devices[0]
    return _closest_entry(device, catalog), device.name


def _closest_entry(device: NvidiaDevice, catalog: Catalog) -> Gpu:
    """Return the catalog entry of a card with the driver's own totals, or one made from these."""
    name, total, usable = device
    key = normalised_name(name.removeprefix("NVIDIA "))
    for entry in catalog.gpus.entries.values():
        names = (entry.name.removeprefix("NVIDIA "), *entry.aliases)
        if key in map(normalised_name, names) and abs(entry.memory_bytes - total) < 2**30:
            return replace(entry, memory_bytes=total, cuda_total_bytes=min(entry.cuda_total_bytes, usable))
    return replace(custom_gpu(usable, "its driver's total"), name=name, memory_bytes=total)


__all__ = [
    "MemplanError",
    "Overrides",
    "Shapes",
    "UnknownNameError",
    "find_device",
    "find_model",
    "find_setup",
    "open_catalog",
]
