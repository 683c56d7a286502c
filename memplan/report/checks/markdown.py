"""Markdown for pull requests and step summaries, which refuse long texts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from memplan.budget.evaluation import Result
from memplan.documents.escaping import markdown
from memplan.errors import escaped
from memplan.report.checks.check_answer import WORDS, answer, cells, sentence
from memplan.units import format_bytes

MOST_BYTES = 59_000
"""A comment may hold 64 KB; this leaves room for what others put around it."""

MARKER = "<!-- memplan:{} -->"
"""First line by which a later run finds the comment that it is to replace."""

LONGEST_MESSAGE = 2_000
MOST_DETAILS = 20


def markdown_text(results: Sequence[Result]) -> str:
    """Return the answer, a table, and details of what is not within its budget.

    Args:
        results: Worst first, so that what does not fit into the text is the least interesting.
    """
    headers = ("budget", "job", "GPU", "needs", "limit", "headroom", "basis", "fits")
    rows = [row(cells(result)) for result in results]
    head = [MARKER.format("check"), "### memplan check", "", cell(answer(results), LONGEST_MESSAGE), ""]
    details = [line for r in results[:MOST_DETAILS] if r.status != "within" for line in _details(r)]
    table = [row(headers), row(("---", "---", "---", "---:", "---:", "---:", "---", "---"))]
    return trimmed([*head, *table], rows, details)


def trimmed(head: Sequence[str], rows: Sequence[str], tail: Sequence[str]) -> str:
    """Return lines as one text of at most :data:`MOST_BYTES`, leaving out the last rows, then the tail.

    Args:
        rows: As many as fit; a line says how many do not.
        tail: Kept as far as half of the room goes.
    """
    room = MOST_BYTES - _size(head) - 200
    shown_tail = list(_fitting(["", *tail], room // 2)) if tail else []
    shown = list(_fitting(rows, room - _size(shown_tail)))
    lines = [*head, *shown]
    if len(shown) < len(rows):
        lines += ["", f"... and {len(rows) - len(shown):,} more rows that would make this text too long."]
    if len(shown_tail) < len(tail):
        shown_tail += ["", "... and further details."]
    return "\n".join([*lines, *shown_tail]) + "\n"


def _fitting(lines: Iterable[str], room: int) -> Iterable[str]:
    for line in lines:
        room -= len(line.encode()) + 1
        if room < 0:
            return
        yield line


def _size(lines: Iterable[str]) -> int:
    return sum(len(line.encode()) + 1 for line in lines)


def row(texts: Sequence[str]) -> str:
    """Return a row of a table."""
    return "| " + " | ".join(cell(text) for text in texts) + " |"


def cell(text: str, longest: int = 100) -> str:
    """Return text that nothing in it can turn into something else, on one line and not too long."""
    short = text if len(text) <= longest else f"{text[: longest - 3]}..."
    return markdown(escaped(" ".join(short.split())))


def _details(result: Result) -> list[str]:
    """Return what is wrong with a job, and its components: one line of HTML, so that it is cut nowhere."""
    lines = [f"<details><summary>{WORDS[result.status]}: {cell(sentence(result), LONGEST_MESSAGE)}</summary>"]
    if result.figures is not None:
        sizes = sorted(result.figures.components.items(), key=lambda item: (-item[1], item[0]))
        body = "".join(f"<tr><td>{name}</td><td>{format_bytes(size)}</td></tr>" for name, size in sizes)
        lines.append(f"<table>{body}</table>")
    return ["".join([*lines, "</details>"])]
