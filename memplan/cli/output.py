"""Where answers go: standard output or a file, in the format that was asked for."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, cast

from memplan.cli.option_groups import OutputOptions, PlotOptions
from memplan.documents.writing import write_answer, write_file
from memplan.report.document import PIPED_WIDTH, Document, Format, Table, render

if TYPE_CHECKING:
    from memplan.library.answers.answer import Answer


def emit(document: Document, options: OutputOptions) -> int:
    """Write a document and return the command's exit code.

    Raises:
        InvalidFileError: It cannot be written whole.
    """
    return emit_as(document, cast("Format", options.format_name(options.form)), options)


def draw(answer: Answer, options: PlotOptions) -> None:
    """Draw an answer where a picture was asked for.

    Raises:
        InvalidFileError: It cannot be written.
    """
    if options.plot is not None:
        answer.plot(options.plot)


def emit_as(document: Document, form: Format, options: OutputOptions) -> int:
    """Write a document in a format and return the command's exit code.

    Raises:
        InvalidFileError: It cannot be written whole.
    """
    if options.quiet and form in ("table", "plain", "md"):
        last = [block for block in document.blocks if block and not isinstance(block, Table)][-1:]
        document = Document(document.data, tuple(last), document.exit_code)
    terminal = sys.stdout.isatty() and options.file is None
    text = render(document, form, terminal, color=terminal and _color(), width=_width())
    deliver(text, options.file)
    return document.exit_code


def deliver(text: str, output: Path | None) -> None:
    """Write an escaped text to a file, or to standard output.

    Raises:
        InvalidFileError: It cannot be written whole.
    """
    if output is None or str(output) in ("-", "/dev/stdout"):
        write_answer(text)
    else:
        write_file(output, text)


def _color() -> bool:
    return "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def _width() -> int:
    """Return the terminal's width, or a fixed one that numbers fit in."""
    if sys.stdout.isatty():
        return max(40, shutil.get_terminal_size((PIPED_WIDTH, 24)).columns)
    columns = os.environ.get("COLUMNS", "")
    return (
        max(PIPED_WIDTH, int(columns)) if columns.isascii() and columns.isdigit() and len(columns) < 5 else PIPED_WIDTH
    )
