"""A measurement runs in a process of its own, and however it ends, that is a result and nothing is left."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from memplan.measure.process import measure
from memplan.measure.records.comparison_rows import rows_of
from memplan.measure.records.measurement_plans import cpu_task
from memplan.measure.records.prediction import predict

pytestmark = pytest.mark.thorough

ENDINGS = {
    "hung": "import time; time.sleep(60)",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "failed": "raise ValueError('no such kernel')",
}


@pytest.mark.parametrize("status", ENDINGS)
@pytest.mark.one_in(3)
def test_a_process_that_ends_without_figures_is_reported_with_its_reason(status, catalog, tmp_path, monkeypatch):
    (tmp_path / "ending.py").write_text(f"import sys; sys.stdin.buffer.read(1); {ENDINGS[status]}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = measure(cpu_task("llama-3.2-1b", "fp32-adamw", catalog), lambda _: None, 1.5, "ending")
    assert found.status == status
    expected = {"hung": "no progress", "killed": "SIGKILL", "failed": "no such kernel"}
    assert expected[status] in found.reason


def test_a_small_llama_takes_what_is_predicted_in_fp32(catalog):
    task = cpu_task("llama-3.2-1b", "fp32-adamw", catalog)
    said: list[str] = []
    found = measure(task, said.append)
    assert found.status == "measured"
    assert "step 3 of 3" in said
    rows = rows_of(task, predict(task, found), found)
    assert all(row.agrees for row in rows)
    peak = next(row for row in rows if row.component == "requested")
    assert abs(peak.difference_bytes) <= peak.measured_bytes // 10_000


def children(pid: int) -> list[int]:
    try:
        found = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return found + [other for child in found for other in children(child)]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


HEARING = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
"""Lets interrupts reach a process, also where the tests themselves run in the background of a shell."""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="looks for processes in /proc")
@pytest.mark.parametrize(
    "moment",
    [pytest.param(0.3, marks=pytest.mark.slow), pytest.param("loading torch", marks=pytest.mark.slow), "step 1 of 3"],
)
@pytest.mark.parametrize("how", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
@pytest.mark.parametrize("processes", [1, 2])
def test_an_interrupt_leaves_no_process_and_no_file(moment, how, processes, tmp_path):
    record = tmp_path / "out" / "record.json"
    record.parent.mkdir()
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    program = HEARING + "from memplan.cli.main import run; run()"
    command = [sys.executable, "-c", program, "validate", "--config", "fp32-adamw"]
    several = ["--processes", str(processes)] if processes > 1 else ["--record", str(record)]
    process = subprocess.Popen(
        [*command, *several],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "TMPDIR": str(scratch)},
    )
    try:
        wait_for(process, moment)
        below = children(process.pid)
        process.send_signal(how)
        process.communicate(timeout=30)
    finally:
        process.kill()
    deadline = time.monotonic() + 10
    while any(map(alive, below)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, below))
    assert process.returncode in (130, -signal.SIGINT, -how, 1)
    left = [path.name for path in scratch.iterdir() if not path.name.startswith("torchinductor_")]  # torch's own cache
    assert left == []
    assert list(record.parent.iterdir()) == []


def wait_for(process: subprocess.Popen[str], moment: float | str) -> None:
    if isinstance(moment, float):
        time.sleep(moment)
        return
    assert process.stderr is not None
    for line in process.stderr:
        if moment in line:
            return
    raise AssertionError(f"never said {moment!r}")


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="limits address space as Linux does")
def test_out_of_memory_is_a_result(catalog):
    import resource

    task = cpu_task("llama-3.2-1b", "fp32-adamw", catalog)
    config = replace(task.setup.config, micro_batch_size=4096, sequence_length=512)  # the first activation is too much
    large = replace(task, setup=replace(task.setup, config=config))
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (9 * 2**29, before[1]))
    try:
        found = measure(large, lambda _: None)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert found.status == "out of memory"
    assert "memory" in found.reason
