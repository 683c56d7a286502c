"""A plan's page: its sections, and the whole with head, style and scripts; every text escaped."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from hashlib import sha256
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from memplan.documents.escaping import escaped_json
from memplan.errors import escaped
from memplan.report.document import Table
from memplan.report.pictures.plan_bars import COLOURS
from memplan.report.plans.explain_answer import LEGEND, instant_forms_table, saved_table, states_table
from memplan.report.plans.plan_answer import (
    device_name,
    heading,
    share,
    suggestions_table,
    total_words,
    totals_table,
)
from memplan.units import format_bytes

if TYPE_CHECKING:
    from memplan.plan.memory_plan import MemoryPlan
    from memplan.plan.reserve.step_timeline import Timeline
    from memplan.plan.suggested.suggestions import WhatIf


MOST_BESIDE = 3
"""Columns that a narrow page shows beside each other."""


def text(value: str) -> str:
    """Return a text as one line that is nothing but text, in HTML too."""
    return escape(escaped(value))


def table(content: Table, caption: str, identity: str = "") -> str:
    """Return a table with a caption and headers; on a narrow page one of many columns has a line for each cell, others scroll."""
    name = f' id="{identity}"' if identity else ""
    name += ' class="many"' if len(content.headers) > MOST_BESIDE else ""
    sides = ['class="number"' if header.startswith(">") else "" for header in content.headers]
    head = "".join(
        f'<th scope="col" {side}>{text(header)}</th>' for header, side in zip(content.names, sides, strict=True)
    )
    labelled = [f'data-label="{text(header)}" {side}' for header, side in zip(content.names, sides, strict=True)]
    rows = "".join(_row(row, labelled) for row in content.rows)
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


GAUGE = 1000
"""Units that a gauge is wide."""


def title_of(plan: MemoryPlan) -> str:
    """Return the job in a few words."""
    return f"{plan.model.spec.name} with {plan.setup.label} on {device_name(plan)}"


def answer_section(plan: MemoryPlan, sentence: str, command: str = "", note: str = "") -> str:
    """Return the verdict, the figures that it rests on, a gauge, and the command that asks the same."""
    word = plan.verdict.upper()
    needed, most = total_words(plan)
    figures = ((needed, plan.needed_bytes), (most, plan.upper_bytes), ("usable", plan.usable_bytes))
    listed = "".join(f"<div><dt>{name}</dt><dd>{text(format_bytes(size))}</dd></div>" for name, size in figures)
    words = " ".join(f"<span>{text(word)}</span>" for word in command.split(" "))
    shown = (
        f'<div class="command"><code id="command" tabindex="0">{words}</code>'
        f'<button type="button" data-copy="command">Copy</button></div>'
        if command
        else ""
    )
    return section(
        "answer",
        "Answer",
        f'<p class="verdict {plan.verdict}" id="verdict">{word}</p><p id="sentence">{text(sentence.removeprefix(f"{word}: "))}</p>'
        f'<dl class="figures">{listed}</dl>{_gauge(plan)}<p class="quiet">{"<br>".join(map(text, (*heading(plan), *([note] if note else []))))}</p>{shown}',
    )


def _gauge(plan: MemoryPlan) -> str:
    """Return a bar of the components against what is usable, in whole numbers."""
    scale = max(plan.usable_bytes, plan.upper_bytes, 1)
    parts, left = [], 0
    for line in plan.components:
        end = min(GAUGE, left + line.bytes * GAUGE // scale)
        parts.append(rectangle(line.name, left, end - left, 22))
        left = end
    upper, usable = (size * GAUGE // scale for size in (plan.upper_bytes, plan.usable_bytes))
    label = f"{share(plan.needed_bytes, plan.usable_bytes)} of what is usable, {share(plan.upper_bytes, plan.usable_bytes)} {'with memory to spare' if plan.releases_cache else 'in the worst case'}"
    return (
        f'<svg class="gauge" role="img" aria-label="{text(label)}" viewBox="0 0 {GAUGE} 30" preserveAspectRatio="none">'
        f'<rect class="room" width="{usable}" height="22"/>{"".join(parts)}'
        f'<rect class="upper" x="{left}" width="{max(0, upper - left)}" height="22"/>'
        f'<rect class="usable" x="{usable - 4}" width="4" height="30"/></svg><p class="quiet">{text(label)}</p>'
    )


def components_section(plan: MemoryPlan) -> str:
    """Return the sum at the peak, with a bar for each component, and the totals."""
    largest = max(line.bytes for line in plan.components)
    rows = "".join(
        f'<tr><th scope="row">{swatch(line.name)} {text(line.name)}</th><td class="number">{text(format_bytes(line.bytes))}</td>'
        f'<td class="number">{share(line.bytes, plan.device_bytes)}</td><td class="bar"><svg aria-hidden="true" viewBox="0 0 {GAUGE} 12" '
        f'preserveAspectRatio="none">{rectangle(line.name, 0, max(4, line.bytes * GAUGE // largest), 12)}</svg></td>'
        f'<td class="kind">{text(line.kind)}</td></tr>'
        for line in plan.components
    )
    caption = f"At the peak: {plan.peak.name} ({plan.peak.operation})"
    head = '<th scope="col">component</th><th scope="col" class="number">bytes</th><th scope="col" class="number">share</th><td></td><th scope="col" class="kind">kind</th>'
    content = (
        f'<div class="scroll" tabindex="0" role="region" aria-label="Components"><table><caption>{text(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>{table(totals_table(plan, ''), 'Totals')}"
    )
    return section("components", "Components", content)


# ------------------------------------------------------------------ the step
def timeline_section(plan: MemoryPlan, timeline: Timeline) -> str:
    """Return the place of the chart, its legend with the bytes at the peak, and its phases as a table."""
    peak = timeline.columns[timeline.peak]
    legend = "".join(
        f'<tr><th scope="row">{swatch(name)} {text(name)}</th><td class="number now" data-now="{name}"></td>'
        f'<td class="number">{text(format_bytes(size))}</td></tr>'
        for name, size in zip(reversed(timeline.components), reversed(peak.sizes), strict=True)
    )
    rows = tuple(
        (phase, format_bytes(max(column.bytes for column in timeline.columns[first : last + 1])))
        for phase, first, last in timeline.phases
    )
    said = f"Memory over one step: {format_bytes(peak.bytes)} live at the peak, {plan.peak.name}"
    chart = (
        f'<div id="chart" role="img" aria-label="{text(said)}"></div><noscript><p>The chart takes JavaScript; the table '
        'below has the same phases.</p></noscript><div class="moment"><label for="moment">Moment of the step</label>'
        f'<input type="range" id="moment" min="0" max="{len(timeline.columns) - 1}" value="{timeline.peak}">'
        '<span role="group" aria-label="Zoom"><button type="button" data-zoom="in">Zoom in</button>'
        '<button type="button" data-zoom="out">Zoom out</button><button type="button" data-zoom="all">Whole step</button></span></div>'
        '<output id="readout" for="moment"></output>'
    )
    reason = (
        ""
        if timeline.from_events
        else f'<p class="quiet">Each instant at its fullest, not every event: {text(timeline.reason)}.</p>'
    )
    content = (
        f'<p>{text(said)}.</p>{reason}{chart}<div class="scroll" tabindex="0" role="region" aria-label="Bytes at that moment"><table class="legend"><caption>Live bytes</caption><thead><tr><th scope="col">component</th>'
        f'<th scope="col" class="number">at that moment</th><th scope="col" class="number">at the peak</th></tr></thead><tbody>{legend}</tbody></table></div>'
        f"{table(Table(('phase', '>at its fullest'), rows), 'The step, phase by phase')}"
    )
    return section("step", "The step", content)


def timeline_data(plan: MemoryPlan, timeline: Timeline) -> dict[str, Any]:
    """Return what the chart is drawn from; bytes are integers."""
    return {
        "components": list(timeline.components),
        "colours": [COLOURS[name] for name in timeline.components],
        "contextColour": COLOURS["device_context"],
        "sizes": [[column.sizes[index] for column in timeline.columns] for index in range(len(timeline.components))],
        "phases": [list(span) for span in timeline.phases],
        "peak": timeline.peak,
        "peakInstant": plan.peak.name,
        "context": plan.allowances.context_bytes,
        "expected": plan.device_bytes,
        "usable": plan.usable_bytes,
    }


# ------------------------------------------------------------------ what would change it, and why it is so
def changes_section(plan: MemoryPlan, others: Sequence[WhatIf]) -> str:
    """Return what makes the job fit, and what other changes would do."""
    content = (
        table(suggestions_table(plan.suggestions, plan.usable_bytes, ""), "What makes it fit, simulated")
        if plan.suggestions
        else ""
    )
    rows = tuple(
        (
            other.change,
            other.verdict.upper(),
            format_bytes(other.device_bytes),
            f"{'+' if other.adds_bytes > 0 else '-'}{format_bytes(abs(other.adds_bytes))}",
            other.cost,
        )
        for other in others
    )
    if rows:
        headers = ("change (--set)", "verdict", ">device", ">difference", "what it costs or gives")
        content += table(Table(headers, rows), "One change at a time, with the allocator's reserve as a share")
    return section("changes", "What if", content or "<p>No single change that is modelled makes a difference.</p>")


def formulas_section(plan: MemoryPlan) -> str:
    """Return every formula with its values and its source, and what is taken for granted."""
    tables = (
        (states_table(plan), "Model states, bytes of one tensor"),
        (saved_table(plan, ""), "Saved for backward by one layer"),
        (instant_forms_table(plan, ""), "Live bytes beyond weights, states and buffers at each instant"),
    )
    folds = "".join(folded(caption, table(content, caption)) for content, caption in tables)
    rows = Table(("component", ">bytes", "formula", "with", "kind", "source"), tuple(_sources(plan)))
    lists = "".join(
        f"<h3>{name}</h3>{lines(values)}"
        for name, values in (("Assumed", plan.assumptions), ("Not counted", plan.not_modelled))
        if values
    )
    content = f'{table(rows, "Formulas and sources")}<p class="quiet">{text(LEGEND)}</p>{folds}{lists}'
    return section("formulas", "Every formula", content)


def _sources(plan: MemoryPlan) -> Iterator[tuple[str, ...]]:
    for line in plan.components:
        values = ", ".join(f"{k} = {v:,}" if isinstance(v, int) else f"{k} = {v}" for k, v in line.values.items())
        yield line.name, f"{line.bytes:,}", line.formula, values, line.kind, line.source


CHART_LIBRARY = "uPlot 1.6.32 (MIT)"
STYLES = ("uplot/uPlot.min.css", "page.css")
SCRIPTS = ("uplot/uPlot.iife.min.js", "chart.js")


@cache
def asset(name: str) -> str:
    """Return a file that pages are made with."""
    return files("memplan.report.page").joinpath("assets", name).read_text(encoding="utf-8")


def one_file(title: str, main: str, data: Any, footer: str) -> str:
    """Return a page that needs nothing besides: styles and scripts are in it, and nothing else may run or load.

    Args:
        data: What its chart is drawn from.
    """
    styles, scripts = [asset(name) for name in STYLES], [asset(name) for name in SCRIPTS]
    policy = f"default-src 'none'; style-src {hashes(styles)}; script-src {hashes(scripts)}; base-uri 'none'; form-action 'none'"
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">' + "".join(
        f"<style>{style}</style>" for style in styles
    )
    tail = "".join(f"<script>{script}</script>" for script in scripts)
    return document(title, head, main, f"{embedded('timeline', data)}{tail}", footer)


def document(title: str, head: str, main: str, tail: str, footer: str) -> str:
    """Return an HTML document."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">'
        f'<meta name="referrer" content="no-referrer"><link rel="icon" href="data:,"><title>{text(title)}</title>{head}</head><body>'
        f'<header><h1 id="title">{text(title)}</h1></header><main id="main">{main}</main>'
        f"<footer><p>{text(footer)}</p></footer>{tail}</body></html>\n"
    )


def embedded(identity: str, data: Any) -> str:
    """Return data within a page, which no text in it can end."""
    content = escaped_json(json.dumps(data, separators=(",", ":"), allow_nan=False)).replace("<", "\\u003c")
    return f'<script type="application/json" id="{identity}">{content}</script>'


def hashes(contents: Sequence[str]) -> str:
    """Return what a content security policy calls styles and scripts that stand in a page."""
    return " ".join(f"'sha256-{b64encode(sha256(content.encode()).digest()).decode()}'" for content in contents)
