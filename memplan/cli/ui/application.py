"""The page and its answers as an application: names of the catalog in, text out; nothing is run, written or fetched."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from dataclasses import asdict
from functools import cache, partial
from hmac import compare_digest
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from memplan.catalog.catalog import Catalog
from memplan.catalog.training_config import Checkpointing
from memplan.cli.ui.answers import (
    MOST_CHARACTERS,
    MOST_GPUS,
    PRECISIONS,
    Answer,
    Question,
    catalog_of,
    full_answer,
    question_of,
    quick_answer,
    step_answer,
)
from memplan.documents.escaping import escaped_json
from memplan.errors import MemplanError
from memplan.report.page.plan_sections import SCRIPTS, STYLES, asset, document, embedded, hashes, section, text

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send


HOSTS = ("127.0.0.1", "localhost", "[::1]")
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; style-src ",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
"""What is put on every answer; the page's own styles are added to its policy."""
WAITING = {"step": "The step", "changes": "What if", "formulas": "Every formula"}
"""Sections that come with the full answer."""
TOKEN = "x-memplan-token"


def application(token: str, catalog_path: Path | None = None, executor: Executor | None = None) -> Starlette:
    """Return the application.

    Args:
        token: What a request has to carry: the page in its query, answers in a header, which no other site can set.
        catalog_path: A catalog of one's own, added to the shipped one.
        executor: Where what takes longer is worked out; here, where it is None.
    """
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.routing import Route

    answers = {"/quick": (quick_answer, None), "/step": (step_answer, executor), "/full": (full_answer, executor)}
    routes = [
        Route("/", partial(_page, token, catalog_path)),
        *(
            Route(path, partial(_answered, token, catalog_path, function, where))
            for path, (function, where) in answers.items()
        ),
        *(Route(f"/{name}", partial(_file, name)) for name in (*SCRIPTS, "controls.js")),
    ]
    return Starlette(routes=routes, middleware=[Middleware(Guard)])


class Guard:
    """Refuses what does not come from this machine's own page, and puts the headers on what is answered."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it: an unknown host, another method, or a query that no page of ours makes."""
        from starlette.responses import PlainTextResponse

        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] += headers()
            await send(message)

        host = dict(scope["headers"]).get(b"host", b"").decode("latin-1").lower()
        refusal = None
        if host.rsplit(":", 1)[0] not in HOSTS and host not in HOSTS:
            refusal = PlainTextResponse("unknown host", 421)
        elif scope["method"] not in ("GET", "HEAD"):
            refusal = PlainTextResponse("nothing is taken here", 405)
        elif len(scope["query_string"]) > MOST_CHARACTERS:
            refusal = PlainTextResponse("the query is too long", 414)
        await (refusal or self._app)(scope, receive, sent)


@cache
def _styles() -> tuple[str, ...]:
    """Return the page's styles, which stand in it so that it is painted at once."""
    return (*(asset(name) for name in STYLES), _own("controls.css"))


@cache
def headers() -> list[tuple[bytes, bytes]]:
    """Return the headers of every answer."""
    styles = {"content-security-policy": HEADERS["content-security-policy"] + hashes(_styles())}
    return [(name.encode(), value.encode()) for name, value in (HEADERS | styles).items()]


def _own(name: str) -> str:
    return files("memplan.cli.ui").joinpath("assets", name).read_text(encoding="utf-8")


async def _page(token: str, path: Path | None, request: Request) -> Response:
    """Return the page, with the answer to what its address asks."""
    from starlette.responses import HTMLResponse, PlainTextResponse

    given = dict(request.query_params)
    if not compare_digest(given.pop("token", "").encode(), token.encode()):
        return PlainTextResponse("open the address that memplan ui printed", 403)
    catalog = catalog_of(path)
    try:
        question = question_of(given, catalog)
        answer = quick_answer(question, path)
    except MemplanError as error:
        return PlainTextResponse(str(error), 422)
    sections = {name: section(name, title, "<p>Working it out.</p>") for name, title in WAITING.items()}
    shown = [answer["sections"]["answer"], sections.pop("step"), answer["sections"]["components"], *sections.values()]
    head = "".join(f"<style>{style}</style>" for style in _styles())
    scripts = "".join(f'<script defer src="/{name}"></script>' for name in (*SCRIPTS, "controls.js"))
    main = form(question, catalog) + f'<div id="sections">{"".join(shown)}</div>'
    return HTMLResponse(document(answer["title"], head, main, embedded("token", token) + scripts, answer["footer"]))


async def _answered(
    token: str,
    path: Path | None,
    function: Callable[[Question, Path | None], Answer],
    executor: Executor | None,
    request: Request,
) -> Response:
    """Return an answer as JSON, or the one line that refuses it."""
    from starlette.responses import Response

    def response_of(data: Any, status: int = 200) -> Response:
        import json

        return Response(escaped_json(json.dumps(data, allow_nan=False)), status, media_type="application/json")

    if not compare_digest(request.headers.get(TOKEN, "").encode(), token.encode()):
        return response_of({"refused": "open the address that memplan ui printed"}, 403)
    try:
        question = question_of(dict(request.query_params), catalog_of(path))
        if executor is None:
            return response_of(function(question, path))
        return response_of(await asyncio.get_running_loop().run_in_executor(executor, function, question, path))
    except MemplanError as error:
        return response_of({"refused": str(error)}, 422)


async def _file(name: str, request: Request) -> Response:  # noqa: ARG001
    """Return a script."""
    from starlette.responses import Response

    return Response(_own(name) if name == "controls.js" else asset(name), media_type="text/javascript")


OWN = "default"
SLIDERS = {"batch": ("Micro-batch", 0, 8), "length": ("Sequence length", 7, 17)}
"""Field -> its label, and the powers of two that its slider goes from and to."""


def form(question: Question, catalog: Catalog) -> str:
    """Return the controls, set to a question."""
    given = {key: str(value) for key, value in asdict(question).items()}
    choices = (
        ("model", "Model", catalog.models, ""),
        ("gpu", "GPU", catalog.gpus, ""),
        ("config", "Method", catalog.configs, ""),
        ("stack", "Training library", catalog.stacks, OWN),
        ("precision", "Precision", PRECISIONS, OWN),
        ("checkpointing", "Checkpointing", get_args(Checkpointing), OWN),
    )
    fields = [_choice(name, label, options, given[name], none) for name, label, options, none in choices]
    fields.append(
        _field(
            "gpus",
            "GPUs",
            f'<input type="number" id="gpus" name="gpus" min="1" max="{MOST_GPUS}" value="{given["gpus"]}">',
        )
    )
    fields += [_slider(name, *of, int(given[name])) for name, of in SLIDERS.items()]
    return (
        f'<form id="controls" aria-label="The job">{"".join(fields)}</form>'
        '<p id="refused" role="alert"></p><p id="said" role="status" class="unseen"></p>'
    )


def _field(name: str, label: str, control: str) -> str:
    return f'<div class="field"><label for="{name}">{label}</label>{control}</div>'


def _choice(name: str, label: str, options: Iterable[str], chosen: str, none: str) -> str:
    listed = [("", none)] if none else []
    listed += [(option, option) for option in options]
    shown = "".join(
        f'<option value="{text(value)}"{" selected" if value == chosen else ""}>{text(word)}</option>'
        for value, word in listed
    )
    return _field(name, label, f'<select id="{name}" name="{name}">{shown}</select>')


def _slider(name: str, label: str, first: int, last: int, value: int) -> str:
    power = min(last, max(first, value.bit_length() - 1))
    return (
        f'<div class="field wide"><label for="{name}">{label}</label><div class="pair">'
        f'<input type="number" id="{name}" name="{name}" min="1" value="{value}">'
        f'<input type="range" data-power-of="{name}" aria-label="{label}, in powers of two" min="{first}" max="{last}" value="{power}"></div></div>'
    )
