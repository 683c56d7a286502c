"""Answers for notebooks: HTML without scripts, styles or images from anywhere, every text escaped."""

from collections.abc import Iterable
from html import escape
from typing import Any

import memplan
from memplan.errors import escaped
from memplan.library.answers.planned_job import Plan
from memplan.plan.memory_plan import MemoryPlan
from memplan.plan.reserve.step_timeline import step_timeline
from memplan.report.document import Document, Table
from memplan.report.page.plan_sections import (
    CHART_LIBRARY,
    answer_section,
    changes_section,
    components_section,
    formulas_section,
    one_file,
    timeline_data,
    timeline_section,
    title_of,
)
from memplan.report.pictures.plan_bars import COLOURS
from memplan.units import format_bytes

VERDICT_COLORS = {"fits": "#2e7d32", "tight": "#b26a00", "no": "#c62828"}
CELL = "padding:1px 8px 1px 0;border:0;text-align:"
MARK = "position:absolute;top:0;bottom:0;width:0;border-left:2px"


def plan_html(plan: MemoryPlan, sentence: str) -> str:
    """Return a plan as HTML: its answer, and a bar for each component against what is usable."""
    scale = max(plan.usable_bytes, plan.upper_bytes, 1)
    usable = plan.usable_bytes
    rows = "".join(_bar_row(line.name, line.bytes, scale, COLOURS[line.name], usable) for line in plan.components)
    color = VERDICT_COLORS[plan.verdict]
    totals = (
        ("expected", plan.needed_bytes, color),
        ("upper end", plan.upper_bytes, color),
        ("usable", usable, "#bdbdbd"),
    )
    rows += "".join(_bar_row(name, size, scale, shade, usable) for name, size, shade in totals)
    head = f'<p style="margin:4px 0;color:{color}"><strong>{_text(sentence)}</strong></p>'
    note = f"Peak at the {plan.peak.name} ({plan.peak.operation}). The dashed line is what is usable."
    table = f'<table style="border-collapse:collapse;width:100%;max-width:64em">{rows}</table>'
    return f'<div style="font-family:sans-serif;font-size:13px">{head}{table}<p style="margin:4px 0">{_text(note)}</p></div>'


def _bar_row(name: str, size: int, scale: int, color: str, usable: int) -> str:
    """Return a table row with a bar; its width is in tenths of a per cent of the scale, in whole numbers."""
    bar = f'<div style="background:{color};height:12px;min-width:1px;width:{_share(size, scale)}%"></div>'
    mark = f'<div style="{MARK} dashed #777;left:{_share(usable, scale)}%"></div>'
    return (
        f'<tr style="background:none"><td style="{CELL}left;white-space:nowrap">{_text(name)}</td>'
        f'<td style="{CELL}right;white-space:nowrap">{_text(format_bytes(size))}</td>'
        f'<td style="{CELL}left;width:99%"><div style="position:relative">{bar}{mark}</div></td></tr>'
    )


def _share(size: int, whole: int) -> str:
    tenths = min(1000, (2000 * size + whole) // (2 * whole))
    return f"{tenths // 10}.{tenths % 10}"


def document_html(document: Document) -> str:
    """Return tables and sentences as HTML."""
    blocks = "".join(_block(block) for block in document.blocks if block)
    return f'<div style="font-family:sans-serif;font-size:13px">{blocks}</div>'


def _block(block: Table | str | tuple[str, ...]) -> str:
    if not isinstance(block, Table):
        lines = (block,) if isinstance(block, str) else block
        return f'<p style="margin:4px 0">{"<br>".join(map(_text, lines))}</p>'
    sides = ["right" if header.startswith(">") else "left" for header in block.headers]
    title = f'<caption style="text-align:left;font-weight:bold">{_text(block.title)}</caption>' if block.title else ""
    head = _row("th", block.names, sides)
    rows = "".join(_row("td", row, sides) for row in block.rows)
    return f'<table style="border-collapse:collapse;margin:6px 0">{title}{head}{rows}</table>'


def _row(tag: str, cells: Iterable[str], sides: Iterable[str]) -> str:
    inner = "".join(
        f'<{tag} style="{CELL}{side}">{_text(cell)}</{tag}>' for cell, side in zip(cells, sides, strict=True)
    )
    return f"<tr>{inner}</tr>"


def _text(text: str) -> str:
    """Return a text as one line that is nothing but text, in HTML too."""
    return escape(escaped(text))


COLUMNS = 800
"""Moments of a step on a page, where it can be zoomed."""


def quick_sections(plan: MemoryPlan, sentence: str, command: str, note: str = "") -> dict[str, str]:
    """Return the answer and the components of a plan, as HTML by the section's name.

    Args:
        command: A command line that asks the same, or nothing.
        note: What is to be known of the figures, or nothing.
    """
    return {"answer": answer_section(plan, sentence, command, note), "components": components_section(plan)}


def step_section(plan: MemoryPlan) -> tuple[str, dict[str, Any]]:
    """Return the step as HTML, and what its chart is drawn from."""
    timeline = step_timeline(plan, COLUMNS)
    return timeline_section(plan, timeline), timeline_data(plan, timeline)


def slow_sections(plan: Plan) -> dict[str, str]:
    """Return what would change a plan and every formula, as HTML by the section's name."""
    return {"changes": changes_section(plan.advised, plan.what_if), "formulas": formulas_section(plan.memory)}


def footer_of(plan: Plan) -> str:
    """Return who says so, of which catalog, and whose charting library draws it."""
    return f"memplan {memplan.__version__}, catalog {plan.catalog.hash[:12]}. Chart: {CHART_LIBRARY}."


def report_page(plan: Plan, command: str) -> str:
    """Return a plan as one HTML file that loads nothing."""
    quick, slow = quick_sections(plan.advised, plan.sentence, command), slow_sections(plan)
    step, data = step_section(plan.memory)
    main = "".join((quick["answer"], step, quick["components"], slow["changes"], slow["formulas"]))
    return one_file(title_of(plan.memory), main, data, footer_of(plan))
