"""Given files and commands read into the job that they describe: a trainer's, its launcher's, and the programs that they start."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from memplan.documents.opening import usable_path, whole_path
from memplan.errors import InvalidFileError, printable
from memplan.importer.files.file_sources import program_keys, read_keys, read_source, started_by_program
from memplan.importer.files.named_files import NamedFiles
from memplan.importer.imported_job import ImportedJob, Question, joined_job
from memplan.importer.python.python_settings import ARGV
from memplan.importer.python.python_words import PROCESSES
from memplan.importer.reading import LAUNCHED, Result
from memplan.importer.referred_files import note_others, note_shipped, note_words
from memplan.importer.shell.written_files import text_written
from memplan.importer.sources.argument_vectors import CONFIG_FLAGS, CommandLine
from memplan.importer.sources.given_keys import MISSING, GivenKeys
from memplan.importer.sources.started_processes import HOSTED, HOSTFILE, processes, with_hosts
from memplan.importer.trainer_detection import NO_TRAINER, is_owned

_MODULE = re.compile(r"[A-Za-z_]\w*(?:\.\w+)+")
"""A module as ``python -m`` is given it."""
NEAR = 4
"""Folders in which a command's program is looked for: where memplan runs, that of the script, and two above it."""


def import_files(paths: Sequence[Path], question: Question) -> ImportedJob:
    """Return the job that a trainer's file and those beside it describe.

    Raises:
        InvalidFileError: A file that cannot be read, keys of no trainer or of several, or impossible values.
    """
    sources: list[GivenKeys] = []
    for path in paths:
        source = read_source(path, question.text if path == paths[0] else None, _processes(question))
        if path == paths[0] and isinstance(source, GivenKeys):
            source = tuple(commands_within(source, question, path)) or source
        if isinstance(source, GivenKeys):
            sources.append(source)
        elif path == paths[0]:
            beside = [read_keys(other) for other in paths[1:]]
            return import_commands(source, replace(question, files=NamedFiles(_folders(paths))), beside)
    return joined_job(sources, replace(question, files=NamedFiles(_folders(paths))))


def commands_within(keys: GivenKeys, question: Question, path: Path | None = None) -> Sequence[CommandLine]:
    """Return the commands that a file holds which is no trainer's own, but for those that no trainer has.

    Args:
        keys: The file's.
        question: What it is read with.
        path: Where it lies; of a program in Python nothing is returned without.
    """
    heads = question.mappings.heads()
    plain = keys.form == "file" and not keys.words
    starts = keys.form == "python" and path is not None and question.text is None
    if not (plain or starts) or question.trainer is not None or is_owned(keys, heads):
        return ()
    if starts and path is not None:
        commands = started_by_program(path, _processes(question))
    else:
        from memplan.importer.files.embedded_commands import embedded_commands

        commands = embedded_commands(keys)
    return commands if any(is_owned(command.job, heads) or command.config for command in commands) else ()


MOST_TRIED = 50
"""Commands of a script that are read one after the other where none is a trainer's as it stands: each takes milliseconds.

Those that name a file which is there come first, each program with its files once: what another does no file says.
"""


def import_commands(
    commands: Sequence[CommandLine], question: Question, beside: Sequence[GivenKeys] = ()
) -> ImportedJob:
    """Return the job of the first command that is one.

    Raises:
        InvalidFileError: None is.
    """
    problem: InvalidFileError | None = None
    jobs: list[tuple[ImportedJob, CommandLine]] = []
    for command in _trainers(commands, question):
        try:
            jobs.append((_import_command(command, question, beside), command))
        except InvalidFileError as error:
            problem = problem or error
    if not jobs:
        raise problem or InvalidFileError(["no command given"])
    training = [pair for pair in jobs if pair[0].role == "job"]
    job, first = (training or jobs)[0]
    note_others(job.reading, first, [command for _, command in training[1:]])
    return job


def _trainers(commands: Sequence[CommandLine], question: Question) -> Sequence[CommandLine]:
    """Return the commands that are a trainer's as they stand; some of them where none is, or there is one alone."""
    heads = question.mappings.heads() if len(commands) > 1 else ()
    owned = [command for command in commands if is_owned(command.job, heads)]
    if owned or len(commands) <= MOST_TRIED:
        return owned or commands
    named = {files: place for place, one in reversed([*enumerate(commands)]) if (files := _files_named(one, question))}
    places = list(dict.fromkeys([*sorted(named.values()), *range(len(commands))]))[:MOST_TRIED]
    return [commands[place] for place in sorted(places)]


def _files_named(command: CommandLine, question: Question) -> tuple[str, ...]:
    """Return the program and the files that a command names, as far as they are there, or its script writes them."""
    programs = [word for word in command.job.words if word.endswith(".py")]
    programs += [f"{word.replace('.', '/')}.py" for word in command.job.words if _MODULE.fullmatch(word)]
    near = replace(question.files, folders=question.files.folders[:NEAR])
    names = (*programs[:1], *command.config)
    return tuple(name for name in names if name in command.written or near.path(name) is not None)


def _import_command(command: CommandLine, question: Question, beside: Sequence[GivenKeys]) -> ImportedJob:
    script, counted = command.job.name, command.job.counted
    inside = [folder / command.folder for folder in question.files.folders[:NEAR] if command.folder]
    near = (*inside, *question.files.folders)
    files = replace(question.files, folders=near, written=command.written, script=script, counted=counted)
    if command.launcher == HOSTED and HOSTFILE in command.launched.data:
        command = with_hosts(command, files.lines(str(command.launched.data[HOSTFILE])))
    given = {Path(keys.name).name for keys in beside}
    named = {text: files.keys(text) for text in command.config if Path(text).name not in given}
    absent = [text for text, keys in named.items() if keys is None]
    launcher = command.launched.value("config_file")
    if launcher is not MISSING and not beside and (launching := files.keys(str(launcher))) is not None:
        beside = [launching]
    alone = launcher is not MISSING and not beside
    shipped = question.mappings.shipped("accelerate", str(launcher)) if alone else None
    if shipped is not None:
        beside = [shipped]
    heads = question.mappings.heads()
    configured = [keys for keys in named.values() if keys is not None]
    owned = any(is_owned(keys, heads) for keys in configured)
    program = _program(command, files, configured, _processes(question), alone=owned)
    sources = [*beside, *(() if program else configured), program or command.job]
    further = [path.parent for text in command.config if (path := files.path(text)) is not None]
    files = replace(files, folders=(*files.folders, *further))
    try:
        job = joined_job(sources, replace(question, files=files), command)
    except InvalidFileError as error:
        raise _unread(error, command, absent) from None
    if shipped is not None:
        note_shipped(job.reading, shipped.name, str(launcher), "the command")
    elif alone:
        absent.append(str(launcher))
        job.reading.results["let.unread"] = Result(Path(str(launcher)).name, LAUNCHED)
    for text in absent:
        job.reading.need(f"the file {printable(text)}, which the command names: --with FILE")
    note_words(job.reading, command)
    return job


def _unread(error: InvalidFileError, command: CommandLine, absent: Sequence[str]) -> InvalidFileError:
    """Return an error that names the file which would tell whose command it is, where that is not there."""
    if not absent or not any(problem.endswith(NO_TRAINER) for problem in error.problems):
        return error
    text = f"{command.job.name}: it names {printable(absent[0])}, which is not here, and nothing else in it tells a trainer"
    return InvalidFileError([f"{text}; run memplan where that file lies, or give the file itself"])


def _program(
    command: CommandLine, files: NamedFiles, configured: Sequence[GivenKeys], given: Mapping[str, str], *, alone: bool
) -> GivenKeys | None:
    """Return what a program of one's own that lies beside a command gives a trainer; None where it is not there, or calls none.

    Args:
        configured: Keys of the files that the command names.
        alone: Whether these would do without the program.
        given: Variables that hold where the command does not say otherwise.
    """
    near = replace(files, folders=files.folders[: NEAR * (1 + bool(command.folder))])
    modules = [f"{word.replace('.', '/')}.py" for word in command.job.words if _MODULE.fullmatch(word)]
    name = next((word for word in command.job.words if word.endswith(".py")), "")
    text = text_written(files.written, name) if name else None
    path = usable_path(name) if text else next(filter(None, map(near.path, [name] if name else modules)), None)
    own = command.job.environment or {}
    counted = processes(command.launched, own)
    environment = {**given, **({PROCESSES: str(counted[1])} if counted else {}), **own}
    words = list(command.job.words[command.job.words.index(name) :]) if name in command.job.words else []
    flags = {
        **{flag: text for flag in CONFIG_FLAGS for text in command.config},
        **command.short,
        **command.job.data,
        ARGV: words,
    }
    if path is None:
        return None
    program = program_keys(path, text and text[0], flags, environment, configured, alone=alone)
    return program and replace(program, environment={**(program.environment or {}), **own})


def _processes(question: Question) -> dict[str, str]:
    """Return the variable with the number of processes, where that is given."""
    return {} if question.gpus is None else {PROCESSES: str(question.gpus)}


def _folders(paths: Sequence[Path]) -> tuple[Path, ...]:
    return (Path(), *(folder for path in paths for folder in whole_path(path).parents))
