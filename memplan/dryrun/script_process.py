"""Starts the process that a script runs in, waits for what comes of it, and leaves nothing behind."""

import os
import pickle
import selectors
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import memplan
from memplan.dryrun.terms.outcome import Outcome, Request

GRACE_SECONDS = 10.0
"""After its timeout a script may take so long to be stopped from inside, and to be summed up."""
CHILD = "memplan.dryrun.script_child"
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_DEACTIVATE_ASYNC_LOAD": "1",
    "WANDB_MODE": "disabled",
    "TOKENIZERS_PARALLELISM": "false",
}
"""What the libraries read before they fetch or send anything."""


def run_script(request: Request, *, quiet: bool = False) -> Outcome:
    """Run a script in a process of its own; it, and all that it started, is gone when this returns.

    What the script prints goes to standard error.
    """
    with TemporaryDirectory(prefix="memplan-run-") as scratch:
        read, write = os.pipe()
        process = _started(replace(request, scratch=scratch), write, quiet=quiet)
        os.close(write)
        try:
            data = _read(read, time.monotonic() + request.timeout + GRACE_SECONDS)
        finally:
            os.close(read)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
    if data is None:
        return Outcome("refused", f"still running after {request.timeout:g} s (see: --timeout)")
    if not data:
        why = f"ended by {signal.Signals(-code).name}" if code < 0 else f"its process ended with {code}"
        return Outcome("failed", f"{why} before its steps were taken")
    outcome: Outcome = pickle.loads(data)
    return outcome


def _started(request: Request, descriptor: int, *, quiet: bool) -> subprocess.Popen[bytes]:
    root = str(Path(memplan.__file__).parent.parent)
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", CHILD, str(descriptor), str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL if quiet else sys.__stderr__,
        stderr=subprocess.DEVNULL if quiet else None,
        env={**os.environ, **OFFLINE, "PYTHONPATH": path, "TMPDIR": request.scratch},
        pass_fds=(descriptor,),
        start_new_session=True,
    )
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin as pipe:
        pickle.dump(request, pipe)
    return process


def _read(descriptor: int, deadline: float) -> bytes | None:
    """Return all that a process writes, or None where it is late."""
    parts: list[bytes] = []
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while selector.select(max(0.0, deadline - time.monotonic())):
            part = os.read(descriptor, 1 << 20)
            if not part:
                return b"".join(parts)
            parts.append(part)
    return None
