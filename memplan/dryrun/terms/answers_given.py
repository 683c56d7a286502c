"""What a script was told where nobody knows, and the exceptions that end one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Answer:
    """A value that a script asked for and nobody knows."""

    line: str  # Of the script, as ``folder/file:line``
    question: str  # What was asked
    value: str  # What it was told first


class StepsDoneError(BaseException):
    """Ends a script that has taken the steps that it was to take; no handler of exceptions is to hold it."""


class RefusedError(BaseException):
    """Ends a script that does what cannot be pretended."""
