"""Trainers' own files where a model or a training config is asked for."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from memplan.catalog.catalog import Catalog, data_directory
from memplan.catalog.training_config import TrainingConfig
from memplan.documents.frozen_values import dataclass
from memplan.documents.loading import Document, Key
from memplan.documents.opening import is_file, path_kind, require_file, shown_path, usable_path
from memplan.errors import (
    CannotAnswerError,
    InvalidFileError,
    MemplanError,
    UnknownKeyWarning,
    first_lines,
    printable,
)
from memplan.library.lookup.unplanned_keys import (
    method_keys,
    planned_keys,
    refuse_other_policies,
    refuse_unplanned,
    without_keys,
)

if TYPE_CHECKING:  # imported where a file is one
    from memplan.importer.imported_job import ImportedJob
    from memplan.importer.trainer_mappings import TrainerMappings
    from memplan.model.model import Model

MODELLESS = (".yaml", ".yml", ".toml", ".py", ".ipynb", ".sh", ".bash", ".slurm", ".sbatch")
SUFFIXES = (*MODELLESS, ".json")
PARTS = frozenset(("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "linear_bias"))
"""Parts of a decoder that a file has to say for a model to be built of them."""
OWN_KEYS = frozenset(("description", "schema"))
"""Keys of memplan's own files."""
MODEL_KEYS = frozenset(("architectures", "hidden_size", "n_embd", "text_config"))
"""Keys of a model's ``config.json``; trainers' files have ``model_type`` too, for something else."""

STAGES = {
    "sft": "sft",
    "pretraining": "sft",
    "classification": "classification",
    "embedding": "embedding",
    "dpo": "dpo",
    "ipo": "dpo",
    "kto": "kto",
    "reward": "reward",
    "grpo": "grpo",
    "ppo": "ppo",
    "orpo": "orpo",
    "cpo": "cpo",
    "simpo": "simpo",
    "distillation": "distillation",
}
"""What trainers' files call a kind of training -> the stage of a training config."""
FEW = 3
"""Keys that a message names beside the first."""
TUNINGS = ("full", "lora", "qlora", "freeze")
MODELLED = f"planned are {', '.join(STAGES)}, in full or by LoRA"


def trainer_mappings() -> TrainerMappings:
    """Return the shipped mappings."""
    from memplan.importer.trainer_mappings import TrainerMappings

    return TrainerMappings(data_directory() / "configs" / "trainers")


def is_trainer_file(text: str) -> bool:
    """Tell whether a text names a file that is neither a model's nor memplan's own, and has some trainer's keys."""
    path = Path(text)
    if path.suffix not in SUFFIXES or path.name == "config.json":
        return False
    try:
        path = usable_path(text)
        if not is_file(path):
            return False
        about = path.stat()
        return _has_trainers_keys(path, about.st_mtime_ns, about.st_size)
    except (MemplanError, OSError):
        return False


@lru_cache(maxsize=16)
def _has_trainers_keys(path: Path, _changed: int, _size: int) -> bool:
    """Tell it of a file as it was changed last: a command asks several times, and a long list takes seconds to read."""
    from memplan.importer.files.file_sources import read_source
    from memplan.importer.given_job import commands_within
    from memplan.importer.imported_job import Question
    from memplan.importer.sources.given_keys import GivenKeys
    from memplan.importer.trainer_detection import is_owned

    source = read_source(path)
    if not isinstance(source, GivenKeys):
        return True
    own = OWN_KEYS | MODEL_KEYS if path.suffix == ".json" else OWN_KEYS
    if own & source.data.keys():
        return False
    return is_owned(source, trainer_mappings().heads()) or bool(
        commands_within(source, Question(trainer_mappings()), path)
    )


def refuse_no_model(text: str) -> None:
    """Refuse a file of a kind that only training configs have, saying what is wrong with it.

    Raises:
        InvalidFileError: It cannot be read, has no trainer's keys, or is a training config of memplan's own.
    """
    path = usable_path(text)
    if path.suffix not in MODELLESS or (path_kind(path) == "nothing" and "/" not in text and path.suffix == ".py"):
        return
    from memplan.importer.files.file_sources import read_source
    from memplan.importer.sources.given_keys import GivenKeys
    from memplan.importer.trainer_detection import SCRIPT, foreign_kind

    require_file(path)
    source = read_source(path)
    if isinstance(source, GivenKeys) and OWN_KEYS & source.data.keys():
        expected = "give the model, and this file with --config"
        raise InvalidFileError([f"{shown_path(path)}: a training config, which names no model; {expected}"])
    expected = "expected a config.json, a GGUF or safetensors file, or a trainer's file (see: memplan import)"
    what = f"no model, and no trainer's keys that are known; {expected}"
    what = SCRIPT.format(shown_path(path)) if path.suffix == ".py" else what
    if isinstance(source, GivenKeys) and (kind := foreign_kind(source, trainer_mappings().heads())):
        what = f"{kind}, not a training job"
    raise InvalidFileError([f"{shown_path(path)}: {what}"])


@dataclass(frozen=True, slots=True)
class GivenFiles:
    """A trainer's file, and what is said besides of how it is read."""

    path: str
    beside: Sequence[str] = ()  # Files that go with it
    version: str = ""  # The trainer's; nothing for what its keys betray, or the newest
    content: str | None = None  # What the file is to hold, where that is not yet written


def trainer_job(files: GivenFiles, gpus: int | None = None, degrees: Mapping[str, int] | None = None) -> ImportedJob:
    """Return what a trainer's file says, with files that go with it.

    Args:
        gpus: GPUs that share the job, or None for as many as the file starts.
        degrees: Keys of ``parallel`` that are given over the file's, and share out the same GPUs.

    Raises:
        InvalidFileError: It is no trainer's file, or no training job.
    """
    from memplan.importer.finished_job import finish
    from memplan.importer.given_job import import_files
    from memplan.importer.imported_job import Question

    paths = [usable_path(files.path), *map(usable_path, files.beside)]
    question = Question(trainer_mappings(), gpus, version=files.version, text=files.content, degrees=degrees or {})
    job = finish(import_files(paths, question))
    if job.role == "not_training":
        raise InvalidFileError([f"{files.path}: {job.other}"])
    return job


def file_model(text: str, shapes: Mapping[str, Any]) -> tuple[str, int] | Model:
    """Return the model that a trainer's file names with the positions that it is built for, or the one that it gives the shapes of.

    The positions are 0 where the trainer takes those that the model was released with.

    Args:
        shapes: Shapes that are given besides, over those of the file.

    Raises:
        CannotAnswerError: It names none and gives no shapes, or some that it needs are not said.
        InvalidFileError: It names a model, and shapes are given too.
    """
    job = trainer_job(GivenFiles(text))
    given, flags = job.value("model.given"), {**job.section("model"), **shapes}
    if job.head.missing or job.role == "launcher":
        _refuse_unread(text, job)
    built = "model_type" in flags  # by the trainer's own registry, under the name that is given
    if given is not None and not (shapes or built):
        return str(given), int(flags.get("max_position_embeddings", 0))
    if given is not None and shapes:
        raise InvalidFileError([f"{text}: names the model {printable(str(given))}, and shapes are given too"])
    if job.refused:
        _refuse_first(job)
    if PARTS - flags.keys() and not built:
        raise CannotAnswerError(f"{text}: names no model; give the model, and this file with --config")
    if "vocab_size" not in flags:
        raise CannotAnswerError(f"{text}: the vocabulary's size is missing: give --vocab N")
    from memplan.model.readers.given_shapes import model_from_flags

    name = Path(text).name.partition(".")[0] if given is None else str(given)
    return model_from_flags(flags, name, text)


def training_document(
    files: GivenFiles,
    gpus: int | None,
    catalog: Catalog,
    given: Mapping[str, Any] | None = None,
    model: Model | None = None,
) -> Document:
    """Return the training config that a trainer's file stands for, as memplan's own files have it, with the lines that said it.

    Args:
        gpus: GPUs that share the job, or None.
        given: Keys of a training config that are said besides, so that the file need not say them, with their values.

    Raises:
        CannotAnswerError: Something of it is not modelled, or missing.
    """
    text, given = files.path, given or {}
    heads = ((key.partition("."), value) for key, value in given.items())
    degrees = {name: value for (head, _, name), value in heads if head == "parallel"}
    job = trainer_job(files, gpus, degrees)
    if model is not None and not model.has_experts:
        job.leave_experts_out()
    _warn_of_unknown(job)
    _refuse_unread(text, job, given)
    method = job.section("method")
    unnamed = job.reading.refusals and not {"stage", "tuning"} <= method.keys()
    if not unnamed and (method.get("stage") not in STAGES or method.get("tuning") not in TUNINGS):
        kind = " ".join(str(method[key]) for key in ("tuning", "stage") if key in method)
        raise CannotAnswerError(f"{text}: {kind} is not modelled; {MODELLED}")
    refuse_other_policies(text, str(method.get("stage")), job.value("training.stack"), catalog)
    if job.refused:
        _refuse_first(job)
    data = without_keys(job.section("training"), given)
    if planned := method_keys(method, STAGES[method["stage"]]):
        data["method"] = planned
    refuse_unplanned(text, data, TrainingConfig)
    stack = _stack(job, catalog)
    if model is not None and catalog.stack(stack).model_code == "transformers":
        data = _with_own_targets(text, data, model) if job.value("let.own_targets") else data
        data = _without_absent_targets(text, data, model)
    other = f", planned as {catalog.stack(stack).label}" if stack != job.value("training.stack") else ""
    shipped = f", {printable(job.value('let.shipped'))}" if job.value("let.shipped") else ""
    description = f"{job.head.title} {job.version}".strip() + other + shipped
    keys = {"description": description, **planned_keys(data, TrainingConfig), "stack": stack}
    return Document(text, keys, _lines(text, job))


def _with_own_targets(text: str, data: dict[str, Any], model: Model) -> dict[str, Any]:
    """Return a training config with the targets of adapters that PEFT has of its own for a model's family."""
    from memplan.training.adapters import OWN_TARGETS

    if "targets" not in data.get("adapter", {}):
        return data
    if (family := model.spec.architecture) not in OWN_TARGETS:
        why = f"PEFT has no list of its own for {family}; name them in lora_target_modules"
        raise CannotAnswerError(f"{text}: says no modules for adapters, and {why}")
    return {**data, "adapter": {**data["adapter"], "targets": list(OWN_TARGETS[family])}}


def _without_absent_targets(text: str, data: dict[str, Any], model: Model) -> dict[str, Any]:
    """Return a training config without adapters' targets that no module of a model is named by, where others are."""
    # Source: ``inject_adapter`` in peft/tuners/tuners_utils.py (0.21.2), which fails where none of them is found alone.
    from memplan.training.adapted_ends import selects

    targets = data.get("adapter", {}).get("targets", [])
    parts = [tensor.name.split(".") for tensor in model.inventory]
    modules = {".".join(name[:length]) for name in parts for length in range(1, len(name) + 1)}
    absent = [one for one in targets if one != "all-linear" and not any(selects((one,), name) for name in modules)]
    if not absent or len(absent) == len(targets):
        return data
    names = ", ".join(printable(one, 40) for one in absent)
    line = f"{text}: adapter.targets: PEFT leaves out {names}, which {model.spec.name} has no module of"
    warnings.warn(UnknownKeyWarning(line), stacklevel=2)
    return {**data, "adapter": {**data["adapter"], "targets": [one for one in targets if one not in absent]}}


def _warn_of_unknown(job: ImportedJob) -> None:
    """Name the keys that a trainer does not have, which are left out."""
    from memplan.importer.sources.given_keys import shown_place

    unknown = [
        f"{shown_place(one.source, one.line)}: {one.key}: {job.head.title} has no such key, which is left out{one.nearest}"
        for one in job.keys.unknown
    ]
    for line in first_lines(unknown):
        warnings.warn(UnknownKeyWarning(line), stacklevel=2)


def _lines(text: str, job: ImportedJob) -> dict[tuple[Key, ...], int]:
    """Return the line of the file for every key of a training config that one of its own keys says; no other has one."""
    lines: dict[tuple[Key, ...], int] = {(): 0}
    own = next((keys for keys in job.sources if keys.name == text and keys.form == "file"), None)
    if own is None:
        return lines
    for name, result in job.reading.results.items():
        said = result.source == text and own.has(result.key.partition(".")[0])
        if said and name.startswith("training."):
            lines[tuple(name.split(".")[1:])] = own.line(result.key)
    return lines


def _refuse_unread(text: str, job: ImportedJob, given: Collection[str] = ()) -> None:
    """Refuse what cannot be planned with what else is given: the model, and keys of a training config."""
    if job.reading.problems:
        raise InvalidFileError(job.reading.problems)
    if job.head.missing:
        raise CannotAnswerError(
            f"{text}: a file of {job.head.title}, which is recognised and not read: {job.head.missing}"
        )
    from memplan.importer.reading import MODEL, need_of

    answered = tuple(need_of(key.removesuffix(".model")) for key in (MODEL, *given))
    if needs := [need for need in job.reading.needs if not need.startswith(answered)]:
        if job.reading.refusals:  # which nothing that is given answers
            _refuse_first(job)
        raise CannotAnswerError(f"{text}: cannot be planned without {'; '.join(needs)}")


def _refuse_first(job: ImportedJob) -> NoReturn:
    """Refuse a job for the first of its keys that is not modelled."""
    first = job.reading.refusals[0]
    from memplan.importer.sources.given_keys import shown_place

    place = f"{shown_place(first.source, first.line)}: {first.key}" if first.key else first.source
    why = first.why if "not modelled" in first.why else f"not modelled: {first.why}"
    others = list(dict.fromkeys(one.key for one in job.reading.refusals if one.key not in ("", first.key)))
    more = ", ".join(others[:FEW]) + (f" and {len(others) - FEW} more" if len(others) > FEW else "")
    change = "" if ";" in why or not first.key else "; leave it out to plan without it"
    raise CannotAnswerError(f"{place}: {why}{change}{f'; also refused: {more}' if others else ''}")


def _stack(job: ImportedJob, catalog: Catalog) -> str:
    """Return the stack at the version of the file, or at the oldest from there on that was read with all families, if any was."""
    name, _, version = str(job.value("training.stack")).partition("@")
    if not version:
        return name
    newest = catalog.stack(name)
    history, every = newest.history, newest.models.families
    whole = [older.since for older in history if catalog.stack(f"{name}@{older.since}").models.families == every]
    try:
        restricted = catalog.stack(f"{name}@{version}").models.families != every and bool(whole)
    except CannotAnswerError:
        restricted = True
    if restricted:
        return f"{name}@{(whole or [older.since for older in history[-1:]])[0]}" if history else name
    return f"{name}@{version}"
