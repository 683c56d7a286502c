"""What a shell script starts: a command with its words, and the loops in whose first turn it stands."""

from collections.abc import Mapping
from dataclasses import field

from memplan.documents.frozen_values import dataclass
from memplan.importer.shell.written_files import Text


@dataclass(frozen=True, slots=True)
class Turn:
    """The first turn of a loop over several words, or the first task of a scheduler's array."""

    variable: str  # What the loop sets
    word: str  # To what in this turn
    count: int  # Turns of the loop; 0 where that is not known
    line: int  # Where its words stand


@dataclass(frozen=True, slots=True)
class ShellCommand:
    """A command that a script starts."""

    words: tuple[str, ...]
    lines: tuple[int, ...]  # Where each word stands
    environment: dict[str, str]  # Variables that it is given
    unset: tuple[tuple[str, int], ...] = ()  # Words that are nothing since no one sets their variable, with their lines
    written: Mapping[str, Text] = field(default_factory=dict)  # Files that the script has written before
    folder: str = ""  # Where it runs, from where the script does
    turns: tuple[Turn, ...] = ()  # Loops around it, of which it stands in the first turn
