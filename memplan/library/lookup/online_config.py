"""``--online``: a repository's ``config.json`` from Hugging Face's hub, and nothing else, only where it is asked for."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from memplan.errors import CannotAnswerError, UnknownNameError, printable
from memplan.library.lookup.model_names import CONFIG, REPOSITORY

if TYPE_CHECKING:
    from http.client import HTTPResponse

SECONDS = 20
"""How long a download may take in all."""
MOST_BYTES = 2**20
"""The largest config that is read; released ones have a few thousand bytes."""

INSTEAD = "give its config.json"


def fetched_config(repository: str) -> Path:
    """Return a folder of this process alone with the ``config.json`` of a repository.

    Raises:
        UnknownNameError: It is no repository's id, or there is none of that id or without such a file.
        CannotAnswerError: The hub is out of reach, or wants a login.
    """
    if not REPOSITORY.fullmatch(repository):
        raise UnknownNameError(f"--online: {printable(repository)!r} is not a repository id such as Qwen/Qwen3-8B")
    text = _download(
        f"{os.environ.get('HF_ENDPOINT') or 'https://huggingface.co'}/{repository}/resolve/main/{CONFIG}", repository
    )
    folder = Path(tempfile.mkdtemp(prefix="memplan-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    own = folder / f"models--{repository.replace('/', '--')}"
    own.mkdir()
    (own / CONFIG).write_bytes(text)
    return own


def _download(url: str, repository: str) -> bytes:
    from http.client import HTTPException
    from urllib.error import HTTPError
    from urllib.request import urlopen

    try:
        with urlopen(url, timeout=SECONDS / 2) as response:
            return _read(response, repository)
    except HTTPError as error:
        if error.code in (401, 403):
            raise CannotAnswerError(
                f"{repository}: the hub wants a login for it (HTTP {error.code}): {INSTEAD}"
            ) from None
        if error.code == 404:
            raise UnknownNameError(f"{repository}: the hub has no such repository, or no {CONFIG} in it") from None
        raise CannotAnswerError(f"{repository}: the hub answered HTTP {error.code}: {INSTEAD}") from None
    except (OSError, HTTPException, ValueError) as error:
        reason = printable(str(getattr(error, "reason", error)) or type(error).__name__)
        raise CannotAnswerError(f"{repository}: --online cannot reach the hub ({reason}): {INSTEAD}") from None


def _read(response: HTTPResponse, repository: str) -> bytes:
    """Return a response's body within the limits of size and time."""
    until, text = time.monotonic() + SECONDS, b""
    while part := response.read(65_536):
        text += part
        if len(text) > MOST_BYTES:
            raise CannotAnswerError(f"{repository}: its {CONFIG} has more than {MOST_BYTES:,} bytes: {INSTEAD}")
        if time.monotonic() > until:
            raise CannotAnswerError(f"{repository}: --online gave up after {SECONDS} seconds: {INSTEAD}")
    return text
