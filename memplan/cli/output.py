"""Where answers go: standard output or a file, in the format that was asked for; and how far a long one has come."""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self, cast

from memplan.cli.option_groups import DetailOptions, OutputOptions, PlotOptions, VerdictOptions
from memplan.documents.writing import say, write_answer, write_file, write_remark
from memplan.errors import InvalidFileError, escaped
from memplan.report.document import PIPED_WIDTH, Document, Format, Table, render

if TYPE_CHECKING:
    from memplan.library.answers.answer import Answer
    from memplan.report.canvas import Canvas

BAR_WIDTH = 30
SOON, MINUTES = 2, 120
"""Seconds before which no time is said, and from which on it is said in minutes."""


class Progress:
    """A bar on a terminal, and a line for every fifth of the parts elsewhere."""

    def __init__(self, title: str, parts: int) -> None:
        self.title, self.parts, self.terminal = escaped(title), max(1, parts), sys.stderr.isatty()
        self.began, self.before = time.monotonic(), 0  # when its parts began, and how many were done by then

    def __call__(self, done: int, note: str = "") -> None:
        """Show how many parts are done, and a word on the last."""
        after = f"{self._left(done)}{f', {escaped(note)}' if note else ''}"
        if self.terminal:
            bar = "#" * (BAR_WIDTH * done // self.parts)
            write_remark(f"\r\x1b[K{self.title} [{bar:<{BAR_WIDTH}}] {done}/{self.parts}{after}")
        elif done % max(1, self.parts // 5) == 0 or done == self.parts:
            say(f"{self.title}: {done}/{self.parts}{after}")

    def loss(self, done: int, loss: float) -> None:
        """Show how many steps of a training run are done, and its loss."""
        self(done, f"loss {loss:.3f}")

    def _left(self, done: int) -> str:
        """Return how long the other parts take if they take what the first ones did; nothing for a few seconds."""
        spent, timed = time.monotonic() - self.began, done - self.before
        seconds = round(spent * (self.parts - done) / timed) if timed else 0
        if spent < SOON or not seconds:
            return ""
        return f", about {seconds} s left" if seconds < MINUTES else f", about {round(seconds / 60)} min left"

    def end(self) -> None:
        """Leave the bar's line."""
        if self.terminal:
            write_remark("\n")


class Waiting:
    """A bar on a terminal for what takes more than a few seconds, gone when the answer comes: ``with Waiting("max") as told``."""

    def __init__(self, title: str) -> None:
        self.title, self.began = title, time.monotonic()
        self.first: tuple[float, int] | None = None  # When parts were first told of, and how many were done
        self.bar: Progress | None = None

    def __call__(self, done: int, parts: int) -> None:
        """Show how many of the parts are done; the first has what is read once in it, and is not counted on."""
        self.first = self.first or (time.monotonic(), done)
        if self.bar is None and sys.stderr.isatty() and time.monotonic() - self.began > SOON:
            self.bar = Progress(self.title, parts)
            self.bar.began, self.bar.before = self.first
        if self.bar is not None:
            self.bar(done)
            if done == parts:
                self.end()

    def __enter__(self) -> Self:
        """Return what is told of the parts."""
        return self

    def __exit__(self, *_: object) -> None:
        """Take the bar away."""
        self.end()

    def end(self) -> None:
        """Take the bar away."""
        if self.bar is not None:
            write_remark("\r\x1b[K")
            self.bar = None


SCREEN_WIDTH = 80, 100
"""Columns of a screen where no terminal is, and the most that it takes of one."""


def emit(document: Document, options: OutputOptions, detail: DetailOptions | None = None) -> int:
    """Write a document and return the command's exit code.

    Args:
        detail: How much of it is shown, for a command that has a screen for a first look.

    Raises:
        InvalidFileError: It cannot be written whole.
    """
    if document.screen is not None and detail is not None and shows_screen(options, detail):
        terminal = sys.stdout.isatty() and options.file is None
        document = Document(document.data, document.screen(_canvas(terminal=terminal)), document.exit_code)
    return emit_as(document, cast("Format", options.format_name(options.form)), options)


def shows_screen(options: OutputOptions, detail: DetailOptions) -> bool:
    """Tell whether a screen is wanted: neither all of the answer nor one line, and no format for other programs."""
    return not (detail.whole or options.quiet) and options.format_name(options.form) == "table"


def show(
    answer: Answer,
    output: OutputOptions,
    verdict: VerdictOptions | None = None,
    plot: PlotOptions | None = None,
    detail: DetailOptions | None = None,
) -> int:
    """Draw an answer where a picture was asked for, write it, and return the command's exit code.

    Raises:
        InvalidFileError: It cannot be written whole.
    """
    draw(answer, plot)
    strict = verdict is not None and verdict.strict
    return emit(answer.document(output.unit, strict=strict, full=output.whole), output, detail)


def draw(answer: Answer, options: PlotOptions | None) -> None:
    """Draw an answer where a picture was asked for.

    Raises:
        InvalidFileError: It cannot be written.
    """
    if options is not None and options.plot is not None:
        answer.plot(options.plot)


def refuse_picture(options: PlotOptions, of: str) -> None:
    """Refuse ``--plot`` before the work, for an answer that has no picture.

    Raises:
        InvalidFileError: A picture was asked for.
    """
    if options.plot is not None:
        raise InvalidFileError([f"--plot: {of} no picture; leave it out"])


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


def _canvas(*, terminal: bool) -> Canvas:
    """Return what a screen is drawn on; what is piped or saved is the same everywhere."""
    from memplan.report.canvas import Canvas

    piped, widest = SCREEN_WIDTH
    return Canvas(min(widest, _width()), _shows_blocks()) if terminal else Canvas(piped)


def _shows_blocks() -> bool:
    """Tell whether a terminal shows block elements: its locale is of UTF-8, and it is not a dumb one.

    Python itself sets LC_CTYPE where the locale is C (PEP 538), which says nothing of the terminal.
    """
    named = [os.environ.get(name, "") for name in ("LC_ALL", "LC_CTYPE", "LANG")]
    coerced = not named[0] and named[1] == "C.UTF-8" and named[2] in ("", "C", "POSIX")
    locale = "C" if coerced else next(filter(None, named), "" if os.name == "nt" else "C")
    able = os.name == "nt" or "utf" in locale.lower()
    return able and os.environ.get("TERM") != "dumb" and "utf" in (sys.stdout.encoding or "").lower()


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
