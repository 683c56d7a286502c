"""A document is a few tables and sentences, and the JSON that says the same."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any, Literal

from memplan.documents.escaping import csv_cell, json_text, markdown
from memplan.documents.frozen_values import dataclass
from memplan.errors import escaped

if TYPE_CHECKING:
    from rich.text import Text

    from memplan.report.canvas import Canvas

Format = Literal["table", "plain", "json", "csv", "md"]

PIPED_WIDTH = 120

LEAST_WORDS = 24
"""Columns of a terminal that words fold in at least."""

WIDEST = 100_000
"""Columns that rich is told the terminal has, so that it wraps nothing by itself."""

STYLES = {
    r"\bFITS\b": "bold green",
    r"\bTIGHT\b": "bold yellow",
    r"\bNO(?=:|  |\n|\Z)": "bold red",
    "[█▏▎▍▌▋▊▉]+": "cyan",
    "▒+": "yellow",
    "(?<=┤)[█▒]+": "red",
    "<- .*": "bold",
}
"""What a terminal with colours shows in one."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table of ready text."""

    headers: tuple[str, ...]  # Column titles; a leading ``>`` aligns a column to the right
    rows: tuple[tuple[str, ...], ...]  # Cells, as many as headers
    title: str = ""  # What stands above it, or nothing

    @property
    def names(self) -> tuple[str, ...]:
        """Column titles without alignment marks."""
        return tuple(header.lstrip(">") for header in self.headers)

    @property
    def width(self) -> int:
        """Columns of a terminal that it takes."""
        widths = (max(map(len, column)) for column in zip(self.names, *self.rows, strict=True))
        return sum(widths) + 2 * (len(self.headers) - 1)


Block = Table | str | tuple[str, ...]
"""A table, a line, or several lines. A line break within any text is no layout, but somebody's text."""


@dataclass(frozen=True, slots=True)
class Document:
    """What a command answers."""

    data: dict[str, Any]  # The JSON answer
    blocks: tuple[Block, ...] = field(default=())  # Tables and lines in reading order
    exit_code: int = 0  # 0 or 1, as DESIGN section 7 says
    # Makes what a person is shown first in place of the blocks, on a terminal's canvas; None where that is all.
    screen: Callable[[Canvas], tuple[Block, ...]] | None = None


def render(
    document: Document, form: Format, terminal: bool = False, color: bool = False, width: int = PIPED_WIDTH
) -> str:
    """Return the text of a document, ending in a line break.

    Args:
        form: How; tables are ruled on a terminal and merely aligned elsewhere.
        terminal: Whether a person is looking.
        color: Whether the terminal shows colours.
        width: Columns to keep words within; numbers are never cut.
    """
    if form == "json":
        return json_text(document.data)
    blocks = [_escaped(block) for block in document.blocks if block]
    if form == "csv":
        return _csv(blocks)
    if form == "md":
        return "\n\n".join(map(_markdown, blocks)) + "\n"
    if form == "plain":
        return "\n\n".join(map(_plain, blocks)) + "\n"
    if not terminal:
        return "\n\n".join(_plain(block, width) for block in blocks) + "\n"
    return _rich(blocks, color, width)


def _escaped(block: Block) -> Table | tuple[str, ...]:
    """Return a block whose texts are only text, and a single line as the one line that it is."""
    if isinstance(block, Table):
        rows = tuple(tuple(map(escaped, row)) for row in block.rows)
        return Table(tuple(map(escaped, block.headers)), rows, escaped(block.title))
    return tuple(map(escaped, (block,) if isinstance(block, str) else block))


def _csv(blocks: Iterable[Table | tuple[str, ...]]) -> str:
    """Return the tables as CSV; several are told apart by a first column with their titles."""
    tables = [block for block in blocks if isinstance(block, Table)]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for index, table in enumerate(tables):
        if index:
            out.write("\n")
        writer.writerows([csv_cell(cell) for cell in row] for row in (table.names, *table.rows))
    return out.getvalue()


def _markdown(block: Table | tuple[str, ...]) -> str:
    if not isinstance(block, Table):
        return "  \n".join(map(markdown, block))  # two spaces break a line without HTML
    rule = ["---:" if header.startswith(">") else "---" for header in block.headers]
    names, *rows = ([markdown(cell) for cell in line] for line in (block.names, *block.rows))
    text = "\n".join("| " + " | ".join(line) + " |" for line in (names, rule, *rows))
    return f"**{markdown(block.title)}**\n\n{text}" if block.title else text


def _plain(block: Table | tuple[str, ...], width: int | None = None) -> str:
    """Return a block as aligned text; with a width, the last column folds to keep within it."""
    if not isinstance(block, Table):
        return "\n".join(block)
    rows = [block.names, *block.rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(block.headers))]
    lines = []
    for row in rows:
        lines += _folded(row, widths, block.headers, width)
    return "\n".join([block.title, *lines] if block.title else lines)


def _parts(table: Table, width: int) -> Iterable[Table]:
    """Yield a table as several that keep within a width, one below another, each with the first column; words may fold."""
    columns = [*zip(table.names, *table.rows, strict=True)]
    first, *widths = (max(map(len, column)) for column in columns)
    parts: list[list[int]] = [[]]
    used = first
    for column, needed in enumerate(widths, start=1):
        words = (len(word) for cell in columns[column] for word in cell.split())
        folded = needed if table.headers[column].startswith(">") else min(needed, max(LEAST_WORDS, *words, 0))
        if parts[-1] and used + 2 + folded > width:
            parts.append([])
            used = first
        parts[-1].append(column)
        used += 2 + needed
    for number, part in enumerate(parts):
        headers, *rows = (tuple(row[column] for column in (0, *part)) for row in (table.headers, *table.rows))
        yield Table(headers, tuple(rows), "" if number else table.title)


def _folded(row: Sequence[str], widths: Sequence[int], headers: Sequence[str], width: int | None) -> list[str]:
    """Return the lines of one row: more than one where its last cell, being words, does not fit."""
    indent = sum(widths[:-1]) + 2 * (len(widths) - 1)
    room = 0 if width is None or headers[-1].startswith(">") else max(LEAST_WORDS, width - indent)
    if not room or len(row[-1]) <= room:
        return [_aligned(row, widths, headers)]
    from textwrap import wrap

    first, *rest = wrap(row[-1], room, break_long_words=False, break_on_hyphens=False) or [""]
    return [_aligned([*row[:-1], first], widths, headers), *(" " * indent + line for line in rest)]


def _aligned(row: Sequence[str], widths: Sequence[int], headers: Sequence[str]) -> str:
    cells = (
        cell.rjust(width) if header.startswith(">") else cell.ljust(width)
        for cell, width, header in zip(row, widths, headers, strict=True)
    )
    return "  ".join(cells).rstrip()


def _rich(blocks: Iterable[Table | tuple[str, ...]], color: bool, width: int) -> str:
    """Return blocks for a person at a terminal: prose folded to its width, verdicts coloured, numbers never cut."""
    from textwrap import fill

    from rich.console import Console
    from rich.text import Text

    out = io.StringIO()
    console = Console(file=out, width=WIDEST, force_terminal=color, no_color=not color, highlight=False)
    for index, block in enumerate(blocks):
        if index:
            console.print()
        if isinstance(block, Table):
            text = Text("\n\n").join(_headed(part, width) for part in _parts(block, width))
        else:
            lines = (fill(line, width, break_long_words=False, break_on_hyphens=False) for line in block)
            text = Text("\n".join(lines))
        for pattern, style in STYLES.items():
            text.highlight_regex(pattern, style)
        console.print(text)
    return out.getvalue()


def _headed(table: Table, width: int) -> Text:
    """Return a table whose title and column titles are bold."""
    from rich.text import Text

    text = Text(_plain(table, width))
    head = len(table.title) + 1 if table.title else 0
    text.stylize("bold", 0, head + text.plain[head:].find("\n") + 1)
    return text
