"""Notebooks: their cells of code as one Python file, without IPython's own lines; nothing is run."""

import ast
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from memplan.errors import InvalidFileError
from memplan.importer.python.calls.called_trainers import trainer_keys
from memplan.importer.python.python_literals import python_keys
from memplan.importer.python.python_values import Files
from memplan.importer.sources.given_keys import GivenKeys

_OWN = re.compile(
    r"^([ \t]*)(?:[!%?](?:.*\\\n)*.*|(?:pip3?|conda|cd|ls|cat|mkdir|wget) [^=(\n]*|\w[\w.]*\?{1,2})$", re.MULTILINE
)
"""Lines that IPython runs: those of a shell, magics, help, and commands that it takes without a sign."""
MOST_CELLS = 10_000
PYTHON = ("capture", "time", "timeit", "prun")
"""Magics of a whole cell that is Python all the same."""


def notebook_keys(
    document: Any, name: str, most: int, files: Files, environment: Mapping[str, str] | None
) -> GivenKeys:
    """Return the keywords and literals of a notebook's code, each with the number of its cell among all cells, from 1.

    Args:
        document: The notebook as parsed JSON: format 4 has ``cells``.
        most: Letters of code that are read.
        files: What stands in a file beside it.
        environment: Variables that it has.

    Raises:
        InvalidFileError: It is no notebook, a cell is not Python, or its code is longer than that.
    """
    cells = list(python_cells(document, name, most))
    starts, line = [], 1
    for _, source in cells:
        starts.append(line)
        line += source.count("\n") + 1
    keys = python_keys("".join(f"{source}\n" for _, source in cells), name, None, files, environment)
    numbers = [number for number, _ in cells]
    lines = {path: numbers[bisect_right(starts, line) - 1] for path, line in keys.lines.items()}
    return trainer_keys(replace(keys, lines=lines, counted="cell"))


def code_cells(document: Any, name: str, most: int) -> Iterator[tuple[int, str]]:
    """Yield the cells of code with their numbers among all cells, from 1.

    Raises:
        InvalidFileError: It is no notebook, has more cells than ``MOST_CELLS``, or its code is longer than that.
    """
    letters = 0
    cells = document.get("cells") if isinstance(document, dict) else None
    if not isinstance(cells, list):
        raise InvalidFileError([f"{name}:1: not a notebook of format 4, which has cells"])
    if len(cells) > MOST_CELLS:
        raise InvalidFileError([f"{name}: more than {MOST_CELLS:,} cells: no notebook that trains has as many"])
    for number, cell in enumerate(cells, 1):
        if not isinstance(cell, dict) or cell.get("cell_type") != "code":
            continue
        source = cell.get("source", "")
        text = "".join(map(str, source)) if isinstance(source, list) else str(source)
        letters += len(text)
        if letters > most:
            raise InvalidFileError([f"{name}: more than {most:,} letters of code: no notebook that trains has as many"])
        yield number, text


def python_cells(document: Any, name: str, most: int) -> Iterator[tuple[int, str]]:
    """Yield the cells of Python with their numbers, IPython's lines in them passed."""
    for number, text in code_cells(document, name, most):
        magic = re.match(r"\s*%%(\w+)", text)
        if magic and magic[1] not in PYTHON:
            continue
        if not _is_python(text) and not _is_python(text := _OWN.sub(r"\1pass", text)):
            raise InvalidFileError([f"{name}: cell {number}: not Python that can be read"])
        yield number, text


def _is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
