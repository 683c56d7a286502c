"""What a question about a training job is asked with: keywords, and the values that they stand for."""

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict, cast, get_args

from memplan.catalog.catalog import Catalog
from memplan.catalog.config_keys.parallel_keys import MAXIMUM_GPUS
from memplan.catalog.training_config import Checkpointing
from memplan.documents.frozen_values import dataclass
from memplan.documents.loading import setting_text
from memplan.errors import InvalidFileError, StoredWeightsWarning, match_hint, printable, shown_value
from memplan.importer.quantised_names import weights_by_name
from memplan.library.lookup import Overrides, Shapes, find_device, find_model, find_setup, open_catalog
from memplan.library.lookup.config_lookup import ConfigGiven
from memplan.library.lookup.trainer_files import is_trainer_file
from memplan.model.model import Model
from memplan.plan.memory_plan import Device
from memplan.training.resolved import TrainingSetup
from memplan.units import parse_bytes

FilePath = str | os.PathLike[str]
ModelGiven = FilePath | Shapes | Model | None
"""A model by its catalog name, published id or file, by its shapes, or as it was looked up before."""

DEFAULT_CONFIG = "bf16-adamw"
SHORTHANDS = ("stack", "micro_batch_size", "sequence_length", "activation_checkpointing")
"""Keywords that are keys of a training config."""
LIMITS = {"micro_batch_size": 2**24, "sequence_length": 2**30, "gpus": MAXIMUM_GPUS, "gpus_per_node": MAXIMUM_GPUS}


class JobOptions(TypedDict, total=False):
    """Keywords that all questions about a training job share; None means that it is not given.

    Attributes:
        gpu: Catalog name or alias, ``local``, or a device that was looked up before; else this machine's own.
        gpu_memory: Memory of a GPU that is in no catalog, such as ``"24GiB"``, in place of ``gpu``.
        gpus: GPUs that share the work.
        gpus_per_node: GPUs of a node, which share its host memory; eight where it is not given.
        host_memory: Memory of a node's host, such as ``"512GiB"``, that offloading has to fit; for ``suggest`` the most that
            optimizer states may take.
        profile: Measured workspaces and context, a file that ``memplan validate --calibrate`` wrote.
        config: Training config: catalog name, file, or its keys and values.
        stack: Whose training loop runs the job, such as ``"trl"`` or ``"trl@1.14"``; else that of the config.
        micro_batch_size: Sequences per device per forward pass.
        sequence_length: Tokens per sequence.
        activation_checkpointing: ``none``, ``selective`` or ``full``.
        set: Any keys of the training config, such as ``{"kernels.optimizer": "fused"}``.
        shapes: A model by its shapes, in place of the model's name.
        catalog: Your own catalog file or folder, added to ours; or a catalog that was opened before.
        beside: Files of a launcher that go with a trainer's own file: an accelerate YAML, a DeepSpeed JSON.
        trainer_version: The version of the trainer whose own file it is; else the newest that was read.
    """

    gpu: str | Device | None
    gpu_memory: str | None
    gpus: int | None
    gpus_per_node: int | None
    host_memory: str | None
    profile: FilePath | None
    config: ConfigGiven | os.PathLike[str] | None
    stack: str | None
    micro_batch_size: int | None
    sequence_length: int | None
    activation_checkpointing: str | None
    set: Mapping[str, Any] | Sequence[str] | str | None
    shapes: Shapes | None
    catalog: FilePath | Catalog | None
    beside: Sequence[FilePath] | None
    trainer_version: str | None


_OTHER_WEIGHTS = (
    "{!r}: its name says that its weights are {}; they are planned in the formats of the training config, not in this"
)


@dataclass(frozen=True, slots=True)
class JobInputs:
    """A question's keywords, checked, with the catalog that its names are looked up in."""

    catalog: Catalog
    given: ModelGiven  # The model as it was given
    options: JobOptions  # The keywords that were given

    def model(self) -> Model:
        """Return the model.

        Raises:
            MemplanError: An unknown name, an unreadable file, or both a name and shapes.
        """
        model = model_of(self.given, self.shapes, self.catalog)
        if isinstance(self.given, str) and (named := weights_by_name(self.given)):
            warnings.warn(StoredWeightsWarning(_OTHER_WEIGHTS.format(printable(self.given), named)), stacklevel=2)
        return model

    @property
    def shapes(self) -> Shapes | None:
        """The shapes of a model where some are given, or None."""
        shapes = self.options.get("shapes")
        return shapes if shapes is not None and shapes.given() else None

    def device(self, otherwise: str | None = None, count: int = 1) -> Device:
        """Return the GPU that was named, else ``otherwise``, else this machine's own.

        Args:
            count: How many there are, their memory pooled.

        Raises:
            CannotAnswerError: No GPU was named and none is here.
        """
        gpu, memory = self.options.get("gpu"), self.options.get("gpu_memory")
        named = otherwise if gpu is None and memory is None else gpu
        return self._profiled(named, memory, count)

    def _profiled(self, gpu: str | Device | None, memory: str | None, count: int) -> Device:
        profile = self.options.get("profile")
        if isinstance(gpu, Device) and memory is not None:
            raise InvalidFileError(["both gpu and gpu_memory given: give one of them"])
        device = self._on_node(gpu if isinstance(gpu, Device) else find_device(gpu, memory, count, self.catalog))
        if profile is None:
            return device
        from memplan.library.lookup.device_lookup import with_profile

        return with_profile(device, Path(profile))

    def _on_node(self, device: Device) -> Device:
        """Return a device with the host memory of its node, and the GPUs that share it, where they are given."""
        memory, gpus = self.options.get("host_memory"), self.options.get("gpus_per_node")
        device = device if memory is None else replace(device, host_memory_bytes=parse_bytes(memory))
        return device if gpus is None else replace(device, node_gpus=gpus)

    def devices(self, count: int = 1) -> list[Device]:
        """Return the GPU that was named, or every GPU of the catalog.

        Args:
            count: How many of each there are, their memory pooled.

        Raises:
            InvalidFileError: A profile is given, which is that of one card, and no GPU.
        """
        if self.names_device:
            return [self.device(count=count)]
        if self.options.get("profile") is not None:
            raise InvalidFileError(["profile: it is that of one card; name the card with gpu"])
        return [self._on_node(Device(entry, name, count)) for name, entry in self.catalog.gpus.entries.items()]

    def devices_named(self, names: Iterable[str | Device]) -> list[Device]:
        """Return the GPUs called ``names``; where there are none, the one that was named or is here."""
        memory = self.options.get("gpu_memory")
        return [self._profiled(name, memory, 1) for name in names] or [self.device()]

    @property
    def config(self) -> ConfigGiven | None:
        """The training config as it was given, or None."""
        config = self.options.get("config")
        if config is None and isinstance(self.given, str | os.PathLike) and is_trainer_file(os.fspath(self.given)):
            return os.fspath(self.given)
        return os.fspath(config) if isinstance(config, os.PathLike) else config

    @property
    def names_device(self) -> bool:
        """Whether a GPU was named, or its memory."""
        return self.options.get("gpu") is not None or self.options.get("gpu_memory") is not None

    @property
    def gpus(self) -> int:
        """GPUs that share the work, or 1."""
        return self.options.get("gpus") or 1

    def overrides(self, gpus: int = 1) -> Overrides:
        """Return what is changed in a training config."""
        options = self.options
        return Overrides(
            batch=options.get("micro_batch_size"),
            length=options.get("sequence_length"),
            checkpointing=options.get("activation_checkpointing"),
            settings=settings_of(options.get("set")),
            gpus=gpus,
            counted=options.get("gpus") is not None,
            stack=options.get("stack"),
            beside=tuple(map(str, options.get("beside") or ())),
            trainer_version=options.get("trainer_version") or "",
        )

    def setup(self, model: Model | None, default: ConfigGiven = DEFAULT_CONFIG, gpus: int = 1) -> TrainingSetup:
        """Return the training setup.

        Args:
            default: The config where none was given.
        """
        config = default if self.config is None else self.config
        return find_setup(config, self.overrides(gpus), self.catalog, model)


def job_inputs(
    question: str,
    given: ModelGiven,
    options: Mapping[str, Any],
    known: type = JobOptions,
    *,
    refused: Mapping[str, str] | None = None,
) -> JobInputs:
    """Return a question's keywords, checked.

    Args:
        question: The function that was called, for messages.
        options: Keywords; one that is None counts as not given.
        known: The keywords that it takes, as a typed dictionary.
        refused: Those that would change nothing in its answer, each with what to do instead.

    Raises:
        TypeError: A keyword that it does not take.
        InvalidFileError: A number that is out of range, or an unknown kind of checkpointing.
    """
    for name, instead in (refused or {}).items():
        value = options.get(name)
        if value is not None and not (isinstance(value, tuple | list | dict) and value in ((), [], {})):
            raise TypeError(f"memplan.{question}() takes no {name}: {instead}")
    for name in options:
        if name not in known.__annotations__:
            words = [one for one in known.__annotations__ if name in one.split("_")]
            hint = match_hint(
                words[0] if len(words) == 1 else name,
                known.__annotations__,
                f"; it takes {', '.join(known.__annotations__)}",
            )
            raise TypeError(f"memplan.{question}() got an unexpected keyword argument {name!r}{hint}")
    _check_values(options)
    return JobInputs(catalog_of(options.get("catalog")), given, cast("JobOptions", options))


def refuse_set(inputs: JobInputs, reasons: Mapping[str, str]) -> None:
    """Refuse keys of a training config that are set, and would change nothing in an answer.

    Args:
        reasons: Key -> why it would not.

    Raises:
        InvalidFileError: One of them is set, by ``set`` or by a keyword.
    """
    keys = {setting.partition("=")[0].strip() for setting in inputs.overrides().settings}
    given = [key for key in reasons if key in keys or inputs.options.get(key) is not None]
    if given:
        raise InvalidFileError([f"{key}: {reasons[key]}; leave it out" for key in given])


def _check_values(options: Mapping[str, Any]) -> None:
    """Refuse numbers out of range, an unknown kind of checkpointing and keys that are given twice, all at once."""
    problems = number_problems(options, LIMITS)
    kind, kinds = options.get("activation_checkpointing"), get_args(Checkpointing)
    if kind is not None and kind not in kinds:
        hint = match_hint(str(kind), kinds)
        shown = shown_value(kind)
        problems.append(f"activation_checkpointing: expected {', '.join(kinds[:-1])} or {kinds[-1]}, got {shown}{hint}")
    keys = {setting.partition("=")[0].strip() for setting in settings_of(options.get("set"))}
    twice = [key for key in SHORTHANDS if key in keys and options.get(key) is not None]
    problems += [f"{key}: given by itself and in set: give one of them" for key in twice]
    if problems:
        raise InvalidFileError(problems)


def number_problems(values: Mapping[str, Any], limits: Mapping[str, int]) -> list[str]:
    """Return what is wrong with numbers, each of which may be None or left out.

    Args:
        values: Numbers by the names of their keywords, and others.
        limits: Name -> the most that it may be; the least is 1.
    """
    return [
        f"{name}: expected a whole number from 1 to {most:,}, got {shown_value(values[name])}"
        for name, most in limits.items()
        if values.get(name) is not None and not is_whole(values[name], most)
    ]


def is_whole(value: object, most: int) -> bool:
    """Tell whether a value is a whole number from 1 to ``most``."""
    return type(value) is int and 1 <= value <= most


def catalog_of(given: FilePath | Catalog | None) -> Catalog:
    """Return a catalog that was opened before, or the shipped one with a user's own added."""
    return given if isinstance(given, Catalog) else open_catalog(None if given is None else Path(given))


def model_of(given: ModelGiven, shapes: Shapes | None, catalog: Catalog) -> Model:
    """Return a model by its name, file or shapes, or one that was looked up before."""
    if isinstance(given, Model):
        return given
    if isinstance(given, Shapes):
        return find_model(None, given, catalog)
    return find_model(None if given is None else os.fspath(given), shapes or Shapes(), catalog)


def settings_of(given: Mapping[str, Any] | Sequence[str] | str | None) -> tuple[str, ...]:
    """Return keys of a training config and their values as ``--set`` takes them.

    Example:
        >>> settings_of({"kernels.optimizer": "fused", "micro_batch_size": 4})
        ('kernels.optimizer=fused', 'micro_batch_size=4')
    """
    if given is None:
        return ()
    if isinstance(given, Mapping):
        return tuple(f"{key}={setting_text(value)}" for key, value in given.items())
    return (given,) if isinstance(given, str) else tuple(given)


def keys_set(inputs: JobInputs) -> tuple[tuple[str, ...], ...]:
    """Return the paths of the keys of a training config that were set, by ``set`` or by a keyword."""
    paths = [tuple(setting.partition("=")[0].strip().split(".")) for setting in inputs.overrides().settings]
    paths += [("micro_batch_size",)] if inputs.options.get("micro_batch_size") is not None else []
    paths += [("activation_checkpointing",)] if inputs.options.get("activation_checkpointing") is not None else []
    return tuple(paths)
