"""``--online`` fetches a config.json, nothing else, within limits, and says clearly where it cannot."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from memplan.library.lookup import online_config
from tests.library.test_model_names import LLAMA

BODIES = {
    "/me/mine/resolve/main/config.json": (200, json.dumps(LLAMA).encode()),
    "/me/gated/resolve/main/config.json": (401, b""),
    "/me/broken/resolve/main/config.json": (500, b""),
    "/me/large/resolve/main/config.json": (200, b" " * 3000),
}


@pytest.fixture
def hub(monkeypatch):
    asked = []

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            code, body = BODIES.get(self.path, (404, b""))
            self.send_response(code)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield asked
    server.shutdown()
    thread.join()
    server.server_close()


def test_one_config_is_fetched_and_named_like_its_repository(cli, hub):
    ran = cli("fit", "me/mine", "--online", "--gpu", "rtx4090", "--config", "qlora", "--json")
    assert (ran.exit_code, ran.data["model"]["name"]) == (0, "mine")
    assert hub == ["/me/mine/resolve/main/config.json"]


def test_what_is_known_here_is_not_asked_for(cli, hub):
    assert cli("fit", "meta-llama/Llama-3.1-8B", "--online", "--gpu", "rtx4090", "--config", "qlora").exit_code == 0
    assert hub == []


def test_nothing_is_asked_without_the_option(refused, hub):
    assert "unknown model" in refused("fit", "me/mine", "--gpu", "rtx4090")
    assert hub == []


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("me/gated", 3, "wants a login"),
        ("me/broken", 3, "HTTP 500"),
        ("me/none", 2, "no such repository"),
        ("me/large", 3, "more than 2,000 bytes"),
        ("me and you", 2, "is not a repository id"),
    ],
)
def test_what_the_hub_does_not_give(refused, hub, monkeypatch, name, code, message):
    monkeypatch.setattr(online_config, "MOST_BYTES", 2000)
    assert message in refused("fit", name, "--online", "--gpu", "rtx4090", code=code)


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9", "nonsense"])
def test_offline_is_said(refused, monkeypatch, endpoint):
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    assert "cannot reach the hub" in refused("fit", "me/mine", "--online", "--gpu", "rtx4090", code=3)
