"""Commands that a script starts, each taken apart, with what following the script assumes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from memplan.errors import InvalidFileError, printable
from memplan.importer.sources.argument_vectors import CommandLine, command_line
from memplan.importer.sources.given_keys import shown_place

if TYPE_CHECKING:
    from memplan.importer.shell.shell_turns import ShellCommand, Turn


def script_commands(text: str, name: str, beside: Callable[[str], str] | None = None) -> tuple[CommandLine, ...]:
    """Return the commands of a shell script, none of which is run.

    Args:
        beside: What stands in a file that it takes up with ``source``.

    Raises:
        InvalidFileError: It cannot be read, or starts nothing.
    """
    from memplan.importer.shell.shell_commands import shell_commands

    commands = shell_commands(text, name, beside)
    if not commands:
        raise InvalidFileError(
            [f"{name}: a shell script that starts no trainer; give the command, memplan import -- ..."]
        )
    return tuple(command_of(one, name) for one in commands)


def command_of(one: ShellCommand, name: str, cells: Sequence[int] = ()) -> CommandLine:
    """Return a command of a script taken apart.

    Args:
        one: The command.
        name: What messages call the script.
        cells: The cell of each line where the script is a notebook's.
    """
    lines = [cells[line - 1] for line in one.lines] if cells else one.lines
    command = command_line(one.words, name, lines, one.environment)
    job, launched = command.job, command.launched
    if cells:
        job, launched = (replace(keys, counted="cell") for keys in (job, launched))
    written = {path: (text, cells[line - 1] if cells else line) for path, (text, line) in one.written.items()}
    noted = tuple((turn.variable, printable(turn.word, 60), _turn(turn, name)) for turn in one.turns)
    return replace(
        command, job=replace(job, noted=noted), launched=launched, unset=one.unset, written=written, folder=one.folder
    )


def _turn(turn: Turn, name: str) -> str:
    count = f" of {turn.count}" if turn.count else ""
    return f"the first{count} that {shown_place(name, turn.line)} lists"
