"""A command in this process, and what has to hold of whatever it is given."""

import contextlib
import gc
import io
import os
import re
import resource
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from unittest import mock

from memplan.cli.completion import run
from memplan.errors import GuessedNameWarning, MemplanError

SECONDS = 5.0
"""Of processor time, as the machine may be shared."""
BLOCKED_SECONDS = 60.0
"""By the clock: nothing is waited for."""
TOO_SLOW = 124
BYTES = 2**30
LONGEST_LINE = 3_000

_LINE = re.compile(r"memplan: \S.*|Usage: .*|warning: .*|\s.*")


class TooSlowError(BaseException):
    """A case took longer than any may; no handler of memplan's catches it."""


@dataclass(frozen=True)
class Outcome:
    """What one command left behind."""

    arguments: tuple[str, ...]
    exit_code: int
    out: str
    err: str
    seconds: float


def outcome(arguments: Sequence[str], stdin: bytes = b"", variables: Mapping[str, str] | None = None) -> Outcome:
    """Run the entry point as if piped, with variables of the environment, stopping it after a few seconds."""
    out, err = io.StringIO(), io.StringIO()
    started = time.process_time()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(sys, "argv", ["memplan", *arguments]))
        stack.enter_context(mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin))))
        stack.enter_context(mock.patch.dict(os.environ, {**(variables or {}), "PATH": "/nonexistent"}))
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        stack.enter_context(_alarm(SECONDS))
        try:
            run()
        except SystemExit as left:
            code = left.code
        except TooSlowError:
            code = TOO_SLOW
    gc.enable()
    exit_code = code if isinstance(code, int) else int(code is not None)
    return Outcome(tuple(arguments), exit_code, out.getvalue(), err.getvalue(), time.process_time() - started)


def called(read: Callable[[], object], name: str) -> Outcome:
    """Call a reader as the entry point does, which turns errors into lines and exit codes."""
    started = time.process_time()
    code, lines = 0, ""
    try:
        with _alarm(SECONDS), warnings.catch_warnings():
            warnings.simplefilter("ignore", GuessedNameWarning)  # what a program is told, and the entry point writes
            read()
    except MemplanError as error:
        code, lines = error.exit_code, "".join(f"memplan: {line}\n" for line in str(error).splitlines())
    except TooSlowError:
        code = TOO_SLOW
    except Exception:
        code, lines = 70, traceback.format_exc()
    return Outcome((name,), code, "", lines, time.process_time() - started)


@contextlib.contextmanager
def _alarm(most: float):
    def stop(*_):
        raise TooSlowError

    timers = ((signal.SIGPROF, signal.ITIMER_PROF, most), (signal.SIGALRM, signal.ITIMER_REAL, BLOCKED_SECONDS))
    before = [signal.signal(number, stop) for number, _, _ in timers]
    for _, timer, seconds in timers:
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for (number, timer, _), handler in zip(timers, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)


def peak_bytes() -> int:
    """Return the most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def check(ran: Outcome, peak_before: int) -> None:
    """Assert that a command answered or refused, in time, in little memory and in readable lines."""
    said = f"{ran.arguments!r:.2000}\nexit {ran.exit_code}\n{ran.err[-4000:]}"
    assert ran.exit_code in (0, 1, 2, 3), said
    assert "Traceback" not in ran.err, said
    assert peak_bytes() - peak_before < BYTES, said
    lines = ran.err.split("\n")
    assert lines.pop() == "", said
    if ran.exit_code in (2, 3):
        assert ran.out == "" or ran.exit_code == 3 or "import" in ran.arguments, said
        assert lines or ran.out, said
        assert all(line.startswith(("memplan: ", "Usage: ")) or ran.err.startswith("Usage:") for line in lines), said
    assert all(line.isprintable() for line in lines), said
    assert all(len(line) <= LONGEST_LINE for line in lines), said
