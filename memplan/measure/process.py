"""Run a measurement in a fresh process, and leave nothing behind, whatever happens."""

from __future__ import annotations

import json
import os
import pickle
import selectors
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import memplan
from memplan.measure.measured import Measurable, Measurement, Progress, measurement_of

SILENCE_SECONDS = 600
"""How long a measurement may say nothing before it is taken for hung: longer than any one step should take."""

CHILD = "memplan.measure.child"


def cuda_is_usable() -> bool:
    """Tell whether this build of torch can use a CUDA device."""
    import torch

    return bool(torch.cuda.is_available())


def measure(
    task: Measurable, progress: Progress, silence_seconds: float = SILENCE_SECONDS, module: str = CHILD
) -> Measurement:
    """Return what a fresh process measured, or how it failed; the process is gone when this returns.

    Args:
        progress: Called with a line for each stage of the measurement.
        silence_seconds: After so long without a line the process is killed and reported as hung.
    """
    with TemporaryFile() as complaints, _process(task, complaints, module) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(pickle.dumps(task))
            process.stdin.flush()
            outcome = _read(process.stdout, progress, silence_seconds)
        except BrokenPipeError:
            outcome = None
        if isinstance(outcome, Measurement):
            return outcome
        if outcome == "hung":
            return Measurement("hung", f"no progress for {silence_seconds:.0f} s; the process was killed")
        return _ended(process.wait(), complaints)


@contextmanager
def _process(task: Measurable, complaints: IO[bytes], module: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process, and kill it at the end if it still runs."""
    root = str(Path(memplan.__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])}
    if task.alloc_conf:
        environment["PYTORCH_CUDA_ALLOC_CONF"] = task.alloc_conf
    command = [sys.executable, "-P", "-m", module]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=complaints, env=environment
    )
    try:
        yield process
    finally:
        process.kill()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()
        process.wait()


def _read(stream: IO[bytes], progress: Progress, silence_seconds: float) -> Measurement | str | None:
    """Return the measurement in what a process says, ``hung``, or None where it ends without one."""
    waiting = b""
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        deadline = time.monotonic() + silence_seconds
        while True:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                return "hung"
            chunk = os.read(stream.fileno(), 1 << 16)
            if not chunk:
                return None
            deadline = time.monotonic() + silence_seconds
            *lines, waiting = (waiting + chunk).split(b"\n")
            for line in lines:
                message: dict[str, Any] = json.loads(line)
                if "measurement" in message:
                    return measurement_of(message["measurement"], "the measuring process")
                progress(str(message.get("progress", "")))


def _ended(code: int, complaints: IO[bytes]) -> Measurement:
    """Return why a process ended without a measurement."""
    complaints.seek(0)
    lines = [line for line in complaints.read().decode(errors="replace").splitlines() if line.strip()]
    last = lines[-1][:300] if lines else "no message"
    if code < 0:
        from signal import Signals

        why = "the system may have run out of memory" if code == -9 else last
        return Measurement("killed", f"ended by {Signals(-code).name}: {why}")
    return Measurement("failed", f"exit code {code}: {last}")
