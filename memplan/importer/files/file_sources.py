"""Given files: YAML, JSON, TOML, Python, or the argument vectors of a launch script as JSON."""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from memplan.documents.loading import MAXIMUM_DEPTH, parse_document
from memplan.documents.opening import MAXIMUM_TEXT_BYTES, is_file, read_text, shown_path, usable_path
from memplan.errors import InvalidFileError
from memplan.importer.files.script_commands import command_of, script_commands
from memplan.importer.sources.argument_vectors import CONFIG_FLAGS, CommandLine, command_line
from memplan.importer.sources.given_keys import GivenKeys, given_document
from memplan.importer.sources.included_files import DEFAULTS, interpolated, with_includes

MEGATRON = "MODEL_ARGS"
"""Where Megatron-LM's own test jobs have the flags of a run."""
ENVIRONMENT = "ENV"
"""Where ms-swift's files have variables of the environment (cli/main.py)."""
MAXIMUM_PARSED_BYTES = 2**19
"""Of Python and TOML, whose parsers take seconds and hundreds of megabytes over a few times as much."""
NOTEBOOK = ".ipynb"
MAXIMUM_NOTEBOOK_BYTES = 2**25
"""Of notebooks, which hold the pictures that their cells have drawn."""
SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch")
"""Ends of the names of files that a shell reads."""
DOCUMENTS = (".yaml", ".yml", ".json")
PARSED = (".toml", ".py", *SCRIPTS)
INSTEAD = "give a trainer's YAML, JSON, TOML or Python file, a launch script or notebook"


def read_source(
    path: Path, text: str | None = None, environment: Mapping[str, str] | None = None
) -> GivenKeys | tuple[CommandLine, ...]:
    """Return the keys of a file, or the commands that it lists.

    Args:
        text: What it is to hold, where that is not yet written.
        environment: Variables that a program has.

    Raises:
        InvalidFileError: It cannot be read, is too large, or is none of the kinds that are read.
    """
    name = shown_path(path)
    if text is None:
        usual = MAXIMUM_PARSED_BYTES if path.suffix in PARSED else MAXIMUM_TEXT_BYTES
        most = MAXIMUM_NOTEBOOK_BYTES if path.suffix == NOTEBOOK else usual
        text = read_text(path, most, INSTEAD, "no trainer's configuration is")
    if path.suffix == ".toml":
        return _toml(text, name)
    if path.suffix in SCRIPTS:
        return script_commands(text, name, _sourced_beside(path))
    if path.suffix == NOTEBOOK:
        return _notebook(_json_value(text, name), path, environment)
    if path.suffix == ".py":
        from memplan.importer.python.calls.called_trainers import trainer_keys
        from memplan.importer.python.python_literals import python_keys

        return trainer_keys(python_keys(text, name, files=_files_beside(path), environment=environment))
    if path.suffix not in DOCUMENTS and (script := _launcher(path, text)) is not None:
        return script_commands(script, name)
    if path.suffix != ".json" and (several := _several_documents(text, name)):
        return several
    return _document(text, path)


def _document(text: str, path: Path) -> GivenKeys | tuple[CommandLine, ...]:
    """Return the keys of a file, with those that it includes, or the commands that it lists."""
    name = shown_path(path)
    keys = given_document(_json(text, name) if path.suffix == ".json" else parse_document(text, name, last_counts=True))
    keys = interpolated(
        with_includes(keys, path, _own_keys) if isinstance(keys.data.get(DEFAULTS), list | str) else keys
    )
    if "_target_:" in text:
        from memplan.importer.files.hydra_targets import with_targets

        keys = with_targets(keys)
    if isinstance(keys.data.get(MEGATRON), Mapping):
        return replace(_plain_names(keys.at(MEGATRON)), environment=_variables(keys, "ENV_VARS"))
    if isinstance(keys.data.get(ENVIRONMENT), Mapping):
        data = {key: value for key, value in keys.data.items() if key != ENVIRONMENT}
        keys = replace(keys, data=data, environment=_variables(keys, ENVIRONMENT))
    commands = keys.data.get("commands")
    if list(keys.data) == ["commands"] and isinstance(commands, list):
        return tuple(
            command_line([str(word) for word in words], name) for words in commands if isinstance(words, list) and words
        )
    return keys


MOST_DOCUMENTS = 50
"""Documents of one file that describe a job and what goes with it."""
_BETWEEN = re.compile(r"^---[ \t]*$", re.MULTILINE)


def _several_documents(text: str, name: str) -> tuple[CommandLine, ...]:
    """Return the commands that documents of one file hold, as Kubernetes has them; none where it is one document alone."""
    from memplan.importer.files.embedded_commands import embedded_commands

    starts = [0, *(one.end() for one in _BETWEEN.finditer(text))]
    parts = [(start, text[start:end]) for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]
    parts = [
        (start, part.replace("---", "")) for start, part in parts if re.search(r"^[ \t]*[\w'\"-]+:", part, re.MULTILINE)
    ]
    commands: list[CommandLine] = []
    for start, part in parts if 1 < len(parts) <= MOST_DOCUMENTS else ():
        document = parse_document("\n" * text.count("\n", 0, start) + part, name, last_counts=True)
        if isinstance(document.data, dict) and not document.problems:
            commands += embedded_commands(given_document(document))
    return tuple(commands)


def _launcher(path: Path, text: str) -> str | None:
    """Return the lines of a launcher that is no shell's as a shell would have them, or None where it is none.

    Raises:
        InvalidFileError: It is longer than any launch script.
    """
    from memplan.importer.files.other_launchers import shell_text

    script = shell_text(path, text)
    if script is not None and len(script) > MAXIMUM_PARSED_BYTES:
        raise InvalidFileError([f"{shown_path(path)}: more than {MAXIMUM_PARSED_BYTES:,} letters; {INSTEAD}"])
    return script


def _notebook(document: Any, path: Path, environment: Mapping[str, str] | None) -> GivenKeys | tuple[CommandLine, ...]:
    """Return what a notebook gives unsloth or TRL's trainers, or else the commands of its lines for a shell.

    Raises:
        InvalidFileError: It cannot be read, or holds neither.
    """
    from memplan.importer.files.notebook_script import notebook_script
    from memplan.importer.python.calls.called_trainers import trains
    from memplan.importer.python.calls.notebook_cells import code_cells, notebook_keys, python_cells
    from memplan.importer.shell.shell_commands import shell_commands

    name = shown_path(path)
    keys = notebook_keys(document, name, MAXIMUM_PARSED_BYTES, _files_beside(path), environment)
    script, cells = notebook_script(list(code_cells(document, name, MAXIMUM_PARSED_BYTES)), keys.data)
    commands = () if trains(keys) else shell_commands(script, name)
    if not commands and not any(python_cells(document, name, MAXIMUM_PARSED_BYTES)):
        raise InvalidFileError([f"{name}: a notebook without cells of Python, or lines for a shell"])
    return tuple(command_of(one, name, cells) for one in commands) or keys


def _variables(keys: GivenKeys, name: str) -> dict[str, str]:
    variables = keys.data.get(name)
    return {str(key): str(value) for key, value in variables.items()} if isinstance(variables, Mapping) else {}


def read_keys(path: Path) -> GivenKeys:
    """Return the keys of a file that lists no commands.

    Raises:
        InvalidFileError: It lists commands, or cannot be read.
    """
    source = read_source(path)
    if not isinstance(source, GivenKeys):
        raise InvalidFileError([f"{path}: lists commands; give one trainer's file"])
    return source


def _plain_names(keys: GivenKeys) -> GivenKeys:
    """Return flags that are written as keys, ``--num-layers: 12``, by their plain names."""
    names = {key: key.lstrip("-").replace("-", "_") for key in keys.data}
    lines = {(names.get(str(path[0]), path[0]), *path[1:]): line for path, line in keys.lines.items() if path}
    return replace(keys, data={names[key]: value for key, value in keys.data.items()}, lines=lines)


def _sourced_beside(path: Path) -> Callable[[str], str]:
    """Return what gives the text of a file that a script takes up: beside it, or where memplan runs; of a folder that nobody knows beside it."""

    def load(name: str) -> str:
        own = usable_path(name.rpartition("/")[2] if "$" in name else name)
        place = next((one for folder in (path.parent, Path()) if is_file(one := folder / own)), None)
        with suppress(InvalidFileError):  # no text
            return read_text(place) if place is not None and not own.is_absolute() else ""
        return ""

    return load


def _files_beside(path: Path) -> Callable[[str], Any]:
    """Return what gives the keys of a file that a program loads, or the text of a module: beside it, in a folder above, or where memplan runs."""
    folders = [path.parent, *list(path.parent.parents)[:2], Path()]

    def load(name: str) -> Any:
        place = next((one for folder in folders if is_file(one := folder / usable_path(name))), None)
        if place is not None and place.suffix == ".py":
            return read_text(place, MAXIMUM_PARSED_BYTES)
        if place is None or place.suffix not in DOCUMENTS:
            return None
        return parse_document(read_text(place, MAXIMUM_PARSED_BYTES), shown_path(place), last_counts=True).data

    return load


def program_keys(
    path: Path,
    text: str | None,
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    configured: Sequence[GivenKeys],
    *,
    alone: bool,
) -> GivenKeys | None:
    """Return what a program in Python that a command starts gives a trainer; None where it calls none that is read.

    Args:
        text: What it holds, where a script writes it.
        flags: What the command gives the program.
        environment: Variables that the command gives it.
        configured: Keys of the files that the command names.
        alone: Whether these would do without the program, which counts then where they are of its own classes.
    """
    from memplan.importer.python.calls.called_trainers import reads_file, trainer_keys, trains
    from memplan.importer.python.python_literals import python_keys

    try:
        text = read_text(path, MAXIMUM_PARSED_BYTES) if text is None else text
        called = python_keys(text, shown_path(path), flags, _files_beside(path), environment)
        if configured and reads_file(called):
            below = {key: value for keys in configured for key, value in keys.data.items()}
            given = {**below, **{key: value for key, value in flags.items() if key not in CONFIG_FLAGS}}
            called, alone = python_keys(text, shown_path(path), given, _files_beside(path), environment), False
    except InvalidFileError:  # the command alone says what it can
        return None
    return trainer_keys(called) if not alone and trains(called) else None


def started_by_program(path: Path, environment: Mapping[str, str]) -> tuple[CommandLine, ...]:
    """Return the commands that a program in Python, or a notebook's code, starts.

    Args:
        path: Where it lies.
        environment: Variables that it has.
    """
    from memplan.importer.files.program_commands import STARTS, program_commands
    from memplan.importer.python.calls.notebook_cells import python_cells

    name = shown_path(path)
    text = read_text(path, MAXIMUM_NOTEBOOK_BYTES if path.suffix == NOTEBOOK else MAXIMUM_PARSED_BYTES)
    if path.suffix == NOTEBOOK:
        text = "\n".join(source for _, source in python_cells(_json_value(text, name), name, MAXIMUM_PARSED_BYTES))
    return program_commands(text, name, _files_beside(path), environment) if STARTS.search(text) else ()


_PACKAGE = re.compile(r"^\s*#\s*@package\s+([\w.]+)", re.MULTILINE)


def _own_keys(path: Path) -> tuple[GivenKeys, str]:
    text = read_text(path, instead=INSTEAD)
    package = _PACKAGE.match(text)
    return given_document(parse_document(text, shown_path(path))), package[1] if package else ""


def _json(text: str, name: str) -> Any:
    """Return a JSON document with the lines of its keys, of which the last of two alike counts."""
    _json_value(text, name)
    return parse_document(text.replace("\t", " "), name, last_counts=True)


def _json_value(text: str, name: str) -> Any:
    """Return what a JSON text holds; comments and placeholders, which JSON has not, are named with their line."""
    import json

    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = text.split("\n")[error.lineno - 1].strip()[:60]
        raise InvalidFileError(
            [f"{name}:{error.lineno}: not JSON, which has no comments or placeholders: {line!r}"]
        ) from None
    except (RecursionError, ValueError):
        raise InvalidFileError([f"{name}:1: not JSON that can be read"]) from None


_DEEP_KEY = re.compile(rf"(?<![\w\"'.-])(?:[\w\"'-]+[ \t]*\.[ \t]*){{{MAXIMUM_DEPTH}}}")
"""What tomllib takes quadratic time over: a key of so many parts."""


def _toml(text: str, name: str) -> GivenKeys:
    import tomllib

    if result := _DEEP_KEY.search(text):
        raise InvalidFileError([f"{name}:{text[: result.start()].count(chr(10)) + 1}: nested too deeply"])
    try:
        data = _plain(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"line (\d+)", str(error))
        raise InvalidFileError([f"{name}:{line[1] if line else 1}: not valid TOML: {error}"]) from None
    except (RecursionError, ValueError):  # of integers with thousands of digits
        raise InvalidFileError(
            [f"{name}:1: not TOML that can be read: nested too deeply, or a number too long"]
        ) from None
    return GivenKeys(name, data, toml_lines(text))


def _plain(value: Any) -> Any:
    """Return a TOML value as YAML and JSON have it: dates and times as text.

    Raises:
        ValueError: A whole number of more than TOML's own 64 bits, which base 16 may write.
    """
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError
    return value if isinstance(value, str | int | float) else str(value)


def toml_lines(text: str) -> dict[tuple[str | int, ...], int]:
    """Return the line of every table and of every key that is written ``key = value``."""
    lines: dict[tuple[str | int, ...], int] = {}
    table: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), 1):
        if head := re.match(r"\s*\[\[?\s*([^\]]+?)\s*\]\]?", line):
            table = tuple(part.strip().strip("\"'") for part in head[1].split("."))
            lines.setdefault(table, number)
        elif entry := re.match(r"\s*([A-Za-z0-9_.\"'-]+)\s*=", line):
            lines.setdefault((*table, *(part.strip("\"'") for part in entry[1].split("."))), number)
    return lines
