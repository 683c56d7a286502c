"""Elements of a page: every text escaped, no style and no script within."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from memplan.errors import escaped
from memplan.report.document import Table
from memplan.report.pictures.plan_bars import COLOURS


def text(value: str) -> str:
    """Return a text as one line that is nothing but text, in HTML too."""
    return escape(escaped(value))


def table(content: Table, caption: str, identity: str = "") -> str:
    """Return a table with a caption and headers, which scrolls by itself where a page is narrow."""
    name = f' id="{identity}"' if identity else ""
    sides = ['class="number"' if header.startswith(">") else "" for header in content.headers]
    head = "".join(
        f'<th scope="col" {side}>{text(header)}</th>' for header, side in zip(content.names, sides, strict=True)
    )
    rows = "".join(_row(row, sides) for row in content.rows)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{text(caption)}"><table{name}>'
        f"<caption>{text(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _row(row: Iterable[str], sides: Iterable[str]) -> str:
    first, *rest = (f"{side}>{text(cell)}" for cell, side in zip(row, sides, strict=True))
    return f'<tr><th scope="row" {first}</th>{"".join(f"<td {cell}</td>" for cell in rest)}</tr>'


def swatch(component: str) -> str:
    """Return a component's colour, beside its name."""
    return f'<svg class="swatch" aria-hidden="true" viewBox="0 0 12 12">{rectangle(component, 0, 12, 12)}</svg>'


def rectangle(component: str, left: int, width: int, height: int) -> str:
    """Return a rectangle in a component's colour."""
    return (
        f'<rect data-component="{component}" x="{left}" width="{width}" height="{height}" fill="{COLOURS[component]}"/>'
    )


def lines(values: Iterable[str]) -> str:
    """Return texts as a list, or nothing where there are none."""
    items = "".join(f"<li>{text(value)}</li>" for value in values)
    return f"<ul>{items}</ul>" if items else ""


def section(identity: str, title: str, content: str) -> str:
    """Return a part of the page under a heading."""
    return (
        f'<section id="{identity}" aria-labelledby="{identity}-title"><h2 id="{identity}-title">{text(title)}</h2>'
        f"{content}</section>"
    )


def folded(summary: str, content: str) -> str:
    """Return what a reader opens to see."""
    return f"<details><summary>{text(summary)}</summary>{content}</details>"
