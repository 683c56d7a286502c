"""A whole page: its head, its style and its scripts, within it or beside it."""

import json
from base64 import b64encode
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import Any

from memplan.documents.escaping import escaped_json
from memplan.report.page.plan_sections import text

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
