"""Run a measurement in a fresh process, and leave nothing behind, whatever happens."""

import json
import os
import pickle
import selectors
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
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
    return measure_together([task], progress, silence_seconds, module)[0]


def measure_together(
    tasks: Sequence[Measurable], progress: Progress, silence_seconds: float = SILENCE_SECONDS, module: str = CHILD
) -> list[Measurement]:
    """Return what fresh processes measured that run side by side; all of them are gone when this returns.

    Args:
        tasks: One for each process.
        progress: Called with each line of the first process; those of others only tell that they live.
        silence_seconds: After so long without a line of any, all are killed and reported as hung.

    Returns:
        What each measured; or how the first that failed did, alone, as all others end with it.
    """
    with ExitStack() as stack, selectors.DefaultSelector() as selector:
        for number, task in enumerate(tasks):
            complaints = stack.enter_context(TemporaryFile())
            child = _Child(number, stack.enter_context(_process(task, complaints, module)), complaints)
            selector.register(child.stdout, selectors.EVENT_READ, child)
        measured: dict[int, Measurement] = {}
        deadline = time.monotonic() + silence_seconds
        while len(measured) < len(tasks):
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                return [Measurement("hung", f"no progress for {silence_seconds:.0f} s; the process was killed")]
            deadline = time.monotonic() + silence_seconds
            for key, _ in ready:
                child = key.data
                outcome = child.read(progress if child.number == 0 else _unsaid)
                if outcome is not None and outcome.status != "measured":
                    return [outcome]
                if outcome is not None:
                    measured[child.number] = outcome
                    selector.unregister(child.stdout)
        return [measured[number] for number in range(len(tasks))]


def _unsaid(_: str) -> None:
    """Say nothing."""


@contextmanager
def _process(task: Measurable, complaints: IO[bytes], module: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process, give it its task, and kill it at the end if it still runs."""
    root = str(Path(memplan.__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])}
    if task.alloc_conf:
        environment["PYTORCH_CUDA_ALLOC_CONF"] = task.alloc_conf
    command = [sys.executable, "-P", "-m", module]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=complaints, env=environment
    )
    try:
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, and says why
            process.stdin.write(pickle.dumps(task))
            process.stdin.flush()
        yield process
    finally:
        process.kill()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()
        process.wait()


@dataclass(slots=True)
class _Child:
    """A process that measures, and what it says, line by line."""

    number: int  # Which of several it is
    process: subprocess.Popen[bytes]
    complaints: IO[bytes]
    waiting: bytes = b""  # Of a line that has not ended

    @property
    def stdout(self) -> IO[bytes]:
        """Where it writes its lines."""
        assert self.process.stdout is not None
        return self.process.stdout

    def read(self, progress: Progress) -> Measurement | None:
        """Return the measurement in what there is to read, or why it ended without one; None where it goes on."""
        chunk = os.read(self.stdout.fileno(), 1 << 16)
        if not chunk:
            return _ended(self.process.wait(), self.complaints)
        *lines, self.waiting = (self.waiting + chunk).split(b"\n")
        for line in lines:
            message: dict[str, Any] = json.loads(line)
            if "measurement" in message:
                return measurement_of(message["measurement"], "the measuring process")
            progress(str(message.get("progress", "")))
        return None


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
