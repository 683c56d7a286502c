"""Launchers' keys that a trainer's file refers to: those it holds, a file that it names, or a preset of its package."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from memplan.errors import InvalidFileError, printable
from memplan.importer.files.file_sources import read_keys
from memplan.importer.files.named_files import NamedFiles
from memplan.importer.reading import DEFAULTED, LAUNCHED, Reading, Result
from memplan.importer.sources.argument_vectors import FILES, CommandLine
from memplan.importer.sources.conditions import word
from memplan.importer.sources.given_keys import MISSING, GivenKeys, shown_place
from memplan.importer.trainer_mappings import Mapped, Reference, TrainerMappings


def references(
    reading: Reading, mapped: Mapped, keys: GivenKeys, files: NamedFiles, given: bool, mappings: TrainerMappings
) -> list[tuple[GivenKeys, str]]:
    """Return the launcher's keys that a trainer's file holds, names by path, or calls by a preset's name, each with whose they are.

    Args:
        reading: What is known so far; a file that is missing is added as a need.
        mapped: The trainer's mapping, which says where its files refer to others.
        files: Where a named file may lie.
        given: Whether a launcher's file is given besides, so that a missing one is none.

    Raises:
        InvalidFileError: A named file has no keys.
    """
    result = []
    for reference in mapped.references:
        value = keys.value(reference.key)
        if isinstance(value, Mapping):
            result.append((keys.at(reference.key), reference.trainer))
        elif value is not MISSING and word(value) not in ("", "false", "none"):
            result += _named_file(reading, str(value), reference, keys, files, given, mappings)
    return result


MODELS = ("model_name_or_path", "base_model", "model")
"""Keys that name a model."""
SECTION_FILES = ("fsdp_config",)
"""Keys of a section that may name a file of JSON instead (training_args.py, ``_process_fsdp_args``)."""


def with_section_files(reading: Reading, keys: GivenKeys, files: NamedFiles) -> GivenKeys:
    """Return keys in which sections that a path stands for are those of the file; one that is not there is added as a need.

    Raises:
        InvalidFileError: A named file cannot be read.
    """
    for name in SECTION_FILES:
        value = keys.data.get(name)
        if not (isinstance(value, str) and value.endswith(FILES)):
            continue
        if (section := files.keys(value)) is None:
            reading.need(f"the file {printable(value)} that {keys.where(name)} names: it has to lie there")
            continue
        lines = {**keys.lines, **{(name, *path): keys.line(name) for path in section.lines}}
        keys = replace(keys, data={**keys.data, name: section.data}, lines=lines)
    return keys


def checkpoint_dtype(keys: GivenKeys, files: NamedFiles) -> str:
    """Return the dtype that the config.json of a model's folder states; nothing where the model is no folder, or it states none."""
    name = next((value for key in MODELS if isinstance(value := keys.value(key), str) and value), "")
    path = files.path(f"{name}/config.json") if name else None
    if path is None:
        return ""
    data = read_keys(path).data
    inner = data.get("text_config")
    stated = [
        part.get(key)
        for part in (data, inner if isinstance(inner, Mapping) else {})
        for key in ("dtype", "torch_dtype")
    ]
    return next((value for value in stated if isinstance(value, str)), "")


def without_given(mapped: Mapped, later: Sequence[GivenKeys]) -> Mapped:
    """Return a mapping without the references that later sources give, which count over earlier ones."""
    retained = [one for one in mapped.references if all(keys.value(one.key) is MISSING for keys in later)]
    return replace(mapped, references=tuple(retained))


def _named_file(
    reading: Reading,
    value: str,
    reference: Reference,
    keys: GivenKeys,
    files: NamedFiles,
    given: bool,
    mappings: TrainerMappings,
) -> list[tuple[GivenKeys, str]]:
    if value.endswith((".json", ".yaml", ".yml")) and (launching := files.keys(value)) is not None:
        if not launching.data:
            said = f"which {keys.where(reference.key)} names: has no keys of {reference.trainer}"
            raise InvalidFileError([f"{launching.name}, {said}"])
        return [(launching, reference.trainer)]
    place = keys.where(reference.key)
    if given:
        return []
    if result := mappings.shipped(reference.trainer, reference.presets.get(value, value)):
        note_shipped(reading, result.name, value, place, preset=value in reference.presets)
        return [(result, reference.trainer)]
    reading.results.setdefault("let.sharder", Result(reference.trainer, LAUNCHED))
    reading.results["let.unread"] = Result(Path(value).name, LAUNCHED)
    no_file = "" if value.endswith((".json", ".yaml", ".yml")) else "; it takes a file's path"
    named = f"{place} is switched on and names no file" if word(value) == "true" else ""
    reading.need(
        f"{reference.trainer}'s settings, --with FILE: {named}"
        if named
        else f"the file {printable(value)} that {place} names: --with FILE{no_file}"
    )
    return []


def note_shipped(reading: Reading, name: str, named: str, place: str, *, preset: bool = False) -> None:
    """Note as an assumption that a file that is not there, or a preset's name, is what a package has under that name."""
    if preset:
        why = f"{place}: {printable(named)} names this file of the package"
    else:
        why = f"{place}: {printable(named)} is not there; this is what the package has under that name"
    reading.results["let.shipped"] = Result(name, DEFAULTED, "", name, why)


def note_words(reading: Reading, command: CommandLine) -> None:
    """Ask for words of a command that nobody can tell, and note as assumptions those that nobody sets, which are nothing."""
    for text, line in command.unread:
        place = f"{command.job.name}: {command.job.counted} {line}"
        reading.need(
            f"what {printable(text, 60)} stands for in {place}: give the command itself, memplan import -- ..."
        )
    for text, line in command.unset:
        why = f"{shown_place(command.job.name, line)}: nothing sets it, so that it stands for no further words"
        reading.notes.append((printable(text, 60), "nothing", why))


def note_others(reading: Reading, command: CommandLine, others: Sequence[CommandLine]) -> None:
    """Note as an assumption that one of several commands of a script is answered for."""
    if others and command.job.counted == "line":
        why = f"{command.job.name}: others that train begin at lines {', '.join(str(one.line) for one in others)}"
        reading.notes.append(("command", f"the first that trains, at line {command.line}", why))
