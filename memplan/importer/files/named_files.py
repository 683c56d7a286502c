"""Files that a command or another file names: what its script writes there, or what lies beside it."""

from collections.abc import Mapping
from dataclasses import field, replace
from pathlib import Path

from memplan.documents.frozen_values import dataclass
from memplan.documents.opening import is_file, read_text, usable_path
from memplan.errors import InvalidFileError, printable
from memplan.importer.files.file_sources import read_keys, read_source
from memplan.importer.shell.written_files import Text, text_written
from memplan.importer.sources.given_keys import GivenKeys


@dataclass(frozen=True, slots=True)
class NamedFiles:
    """Where files that are named may lie."""

    folders: tuple[Path, ...] = (Path(),)
    written: Mapping[str, Text] = field(default_factory=dict)  # What a script writes to files before, by their paths
    script: str = ""  # That script's name
    counted: str = "line"  # What stands for a line in it: ``line``, or the ``cell`` of a notebook

    def keys(self, name: str) -> GivenKeys | None:
        """Return the keys of a file, those of a here-document with their lines in the script; None where there is no file.

        Raises:
            InvalidFileError: It cannot be read.
        """
        if (text := text_written(self.written, name)) is None:
            path = self.path(name)
            return None if path is None else read_keys(path)
        try:
            keys = read_source(usable_path(name), text[0])
        except InvalidFileError as error:
            place = f"{self.script}: what {self.counted} {text[1]} begins to write"
            raise InvalidFileError([f"{place}: {problem}" for problem in error.problems]) from None
        if not isinstance(keys, GivenKeys):
            raise InvalidFileError(
                [f"{self.script}: {self.counted} {text[1]} writes {printable(name)}, which lists commands"]
            )
        below = self.counted == "line"
        lines = {path: text[1] + (line - 1) * below for path, line in keys.lines.items()}
        return replace(keys, name=self.script, lines=lines, counted=self.counted)

    def path(self, name: str) -> Path | None:
        """Return the file that a name stands for, relative to the first of the folders in which it is one."""
        return next((path for folder in self.folders if is_file(path := folder / usable_path(name))), None)

    def lines(self, name: str) -> list[str]:
        """Return the lines of a file of text; none where there is no file.

        Raises:
            InvalidFileError: It cannot be read.
        """
        if (text := text_written(self.written, name)) is not None:
            return text[0].splitlines()
        path = self.path(name)
        return [] if path is None else read_text(path).splitlines()
