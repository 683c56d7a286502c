"""The page on a loopback port, until it is interrupted."""

import gc
import secrets
import socket
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path

from memplan.cli.ui.answers import Question, quick_answer
from memplan.errors import CannotAnswerError, InvalidFileError

LOOPBACK = "127.0.0.1"
NEEDED = ("starlette", "uvicorn")


def require_server() -> None:
    """Refuse where there is no server.

    Raises:
        CannotAnswerError: Its library is not installed.
    """
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise CannotAnswerError(
            f"the page needs {' and '.join(missing)}, not installed: pip install '.[ui]' in a checkout of memplan"
        )


def serve(port: int, catalog_path: Path | None, tell: Callable[[str], None]) -> None:
    """Serve the page on this machine alone until the process is interrupted.

    Args:
        port: The port; 0 for one that is free.
        catalog_path: A catalog of one's own, added to the shipped one.
        tell: Is told the page's address, which carries the token.

    Raises:
        CannotAnswerError: The server's library is missing.
        InvalidFileError: The port is taken, or may not be used.
    """
    require_server()
    import uvicorn

    from memplan.cli.ui.application import application

    listener = _listener(port)
    token = secrets.token_urlsafe(24)
    quick_answer(Question(), catalog_path)  # what it imports is there when the first page is asked for
    gc.freeze()
    with listener, ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
        app = application(token, catalog_path, executor)
        config = uvicorn.Config(
            app,
            log_level="critical",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            lifespan="off",
            ws="none",
        )
        tell(f"http://{LOOPBACK}:{listener.getsockname()[1]}/?token={token}")
        uvicorn.Server(config).run(sockets=[listener])


def _listener(port: int) -> socket.socket:
    """Return a socket on loopback."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind((LOOPBACK, port))
    except OSError as error:
        listener.close()
        raise InvalidFileError([f"--port {port}: {error.strerror}"]) from None
    return listener
