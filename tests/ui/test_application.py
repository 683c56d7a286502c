"""The page's server: who may ask, what is answered, and that hostile input is text at most."""

import asyncio
import re

import pytest

pytest.importorskip("starlette")
pytest.importorskip("httpx2")
from starlette.testclient import TestClient

import memplan
from memplan.cli.ui import serve
from memplan.cli.ui.application import HEADERS, TOKEN, application
from tests.report.test_page import Page

SECRET = "the-token"
SMALL = {"model": "gpt2", "gpu": "t4", "config": "lora", "length": "128"}


@pytest.fixture(scope="module")
def client():
    return TestClient(application(SECRET), base_url="http://127.0.0.1:1234")


@pytest.fixture
def asked(client):
    def ask(path, query=SMALL, token=SECRET, **headers):
        return client.get(path, params=query, headers={TOKEN: token, **headers})

    return ask


def test_the_page_has_the_answer_before_any_script_has_run(client):
    page = Page(client.get("/", params={"token": SECRET, **SMALL}).text)
    plan = memplan.job("gpt2", config="lora").plan("t4", sequence_length=128)
    assert plan.verdict.upper() in page.contents["p"]
    assert memplan.plan("gpt2", gpu="t4", config="lora", sequence_length=128).model in page.contents["h1"][0]
    chosen = {own["value"] for own in page.named("option") if "selected" in own}
    assert {"gpt2", "t4", "lora"} <= chosen
    labels = {own["for"] for own in page.named("label")}
    controls = [own for tag in ("select", "input") for own in page.named(tag)]
    assert all(own.get("id") in labels or "aria-label" in own for own in controls)
    assert {own.get("role") for own in page.named("p")} >= {"alert", "status"}
    assert not [name for _, own in page.elements for name in own if name.startswith("on") or name == "style"]


def test_quick_step_and_full_answers_are_sections(asked):
    quick, step, full = (asked(path).json() for path in ("/quick", "/step", "/full"))
    assert set(quick["sections"]) == {"answer", "components"}
    assert set(step["sections"]) == {"step"}
    assert set(full["sections"]) == {"answer", "components", "step", "changes", "formulas"}
    assert step["timeline"]["sizes"] == full["timeline"]["sizes"]
    plan = memplan.plan("gpt2", gpu="t4", config="lora", sequence_length=128)
    assert full["timeline"]["expected"] == plan.expected_bytes
    for answer in (quick, step, full):
        for name, html in answer["sections"].items():
            assert Page(html).elements[0] == ("section", {"id": name, "aria-labelledby": f"{name}-title"})


def test_every_answer_has_the_headers(client, asked):
    for answer in (client.get("/"), asked("/quick"), client.get("/chart.js"), client.get("/no-such"), client.post("/")):
        assert {name: value for name, value in HEADERS.items() if not answer.headers[name].startswith(value)} == {}
        assert re.fullmatch(
            r"style-src( 'sha256-[^']{44}'){3}", answer.headers["content-security-policy"].split("; ")[-1]
        )
    assert "unsafe" not in HEADERS["content-security-policy"]


def test_files_are_those_that_the_page_names(client):
    page = Page(client.get("/", params={"token": SECRET}).text)
    names = {own[key] for _, own in page.elements for key in ("src", "href") if key in own} - {"data:,"}
    assert len(names) == 3
    assert {client.get(name).status_code for name in names} == {200}
    assert client.get("/../pyproject.toml").status_code == 404
    assert client.get("/uplot/%2e%2e/vendored.yaml").status_code == 404


# ------------------------------------------------------------------ who may ask
@pytest.mark.parametrize("path", ["/quick", "/step", "/full"])
@pytest.mark.parametrize("token", ["", "wrong", SECRET + "x", "\u00e9"])
def test_without_the_token_nothing_is_answered(client, path, token):
    headers = {TOKEN: token.encode("latin-1")} if token else {}
    answer = client.get(path, params={**SMALL, "token": SECRET}, headers=headers)
    assert (answer.status_code, set(answer.json())) == (403, {"refused"})


def test_the_page_takes_the_token_of_its_address(client):
    assert client.get("/").status_code == 403
    assert client.get("/", params={"token": "wrong"}).status_code == 403
    assert SECRET not in client.get("/").text


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:80", "", "localhost.evil", "10.0.0.1:1234"])
def test_another_host_name_is_refused(asked, host):
    assert asked("/quick", host=host).status_code == 421


@pytest.mark.parametrize("host", ["127.0.0.1:1234", "localhost:99", "LOCALHOST", "[::1]:80"])
def test_names_of_this_machine_are_answered(asked, host):
    assert asked("/quick", host=host).status_code == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_is_taken(client, method):
    assert client.request(method, "/quick", headers={TOKEN: SECRET}, content=b"x" * 100).status_code == 405


# ------------------------------------------------------------------ hostile questions
def test_a_query_of_a_megabyte_is_refused_unread(asked):
    assert asked("/quick", {"model": "x" * 3000}).status_code == 414
    told = []
    scope = {"type": "http", "method": "GET", "path": "/quick", "query_string": b"model=" + b"x" * 2**20}

    async def tell(message):
        told.append(message)

    asyncio.run(application(SECRET)(scope | {"headers": [(b"host", b"127.0.0.1:1")]}, None, tell))
    assert told[0]["status"] == 414


@pytest.mark.parametrize(
    "query",
    [
        {"model": "<script>alert(1)</script>"},
        {"model": "/etc/passwd"},
        {"config": "-"},
        {"unknown": "1"},
        {"batch": "99999999", "length": "999999999"},
        {"length": "1000000"},
        {"gpu": "t4\x00\x1b[31m"},
        {"model": "qwen3-8b", "stack": "torchtitan", "config": "tier1"},
    ],
    ids=str,
)
def test_what_cannot_be_answered_is_one_line(asked, query):
    answer = asked("/quick", {**SMALL, **query})
    assert (answer.status_code, set(answer.json())) == (422, {"refused"})
    assert not re.search(r"[\x00-\x08\x1b]", answer.json()["refused"])
    assert answer.headers["content-type"] == "application/json"


def test_a_page_that_cannot_be_answered_is_plain_text(client):
    answer = client.get("/", params={"token": SECRET, "model": "<script>"})
    assert (answer.status_code, answer.headers["content-type"]) == (422, "text/plain; charset=utf-8")


# ------------------------------------------------------------------ the command
def test_a_missing_server_is_one_line_that_says_how_to_install_it(refused, monkeypatch):
    monkeypatch.setattr(serve, "find_spec", lambda name: None)
    assert ".[ui]" in refused("ui", code=3)


def test_a_port_that_is_taken_is_one_line(refused):
    with serve._listener(0) as taken:
        taken.listen()
        assert "--port" in refused("ui", "--port", taken.getsockname()[1])


def test_only_loopback_is_listened_on():
    with serve._listener(0) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
