"""Text to train on that every machine has: the sources of Python's own library, as bytes."""

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from memplan.documents.opening import files_in, read_bytes
from memplan.errors import CannotAnswerError

VOCABULARY = 256
"""Tokens are bytes."""

TRAINING_BYTES = 4 << 20
VALIDATION_BYTES = 1 << 18
VALIDATION_EVERY = 10
"""Every tenth file is for validation: no file is in both parts."""


@dataclass(frozen=True, slots=True)
class Text:
    """Two disjoint parts of one text."""

    training: Tensor  # Bytes (tokens,), uint8
    validation: Tensor  # Likewise
    source: str  # Where it is from
    digest: str  # First digits of the SHA-256 of both parts, since Python releases differ


def library_text(folder: Path | None = None) -> Text:
    """Return the top-level modules of Python's library, in the order of their names.

    Args:
        folder: Where the ``.py`` files are; by default where this Python keeps its own.

    Raises:
        CannotAnswerError: There is too little text to train on.
    """
    where = folder or Path(sysconfig.get_paths()["stdlib"])
    files = files_in(where, "*.py")
    training_sources = [read_bytes(path) for index, path in enumerate(files) if index % VALIDATION_EVERY]
    validation_sources = [read_bytes(path) for path in files[::VALIDATION_EVERY]]
    training, validation = b"".join(training_sources)[:TRAINING_BYTES], b"".join(validation_sources)[:VALIDATION_BYTES]
    if min(len(training), len(validation)) < 1 << 14:
        raise CannotAnswerError(f"no text to train on: {where} holds too few Python sources")
    digest = hashlib.sha256(training + validation).hexdigest()[:16]
    return Text(_tensor(training), _tensor(validation), "top-level modules of Python's standard library", digest)


def _tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def random_windows(text: Tensor, batch: int, tokens: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, (batch, tokens) int64, from random places of ``text``."""
    starts = torch.randint(0, text.numel() - tokens - 1, (batch,), generator=generator)
    return windows_at(text, starts, tokens)


def windows_at(text: Tensor, starts: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets that begin at ``starts``."""
    windows = text[starts[:, None] + torch.arange(tokens + 1)].long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def even_windows(text: Tensor, count: int, batch: int, tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield ``count`` windows spread evenly over ``text``, ``batch`` at a time; always the same ones."""
    starts = torch.linspace(0, text.numel() - tokens - 2, count).long()
    for part in torch.split(starts, batch):
        yield windows_at(text, part, tokens)
