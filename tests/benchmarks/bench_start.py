"""Cold starts of commands against their floor; run with ``python tests/benchmarks/bench_start.py``.

The floor is a process that imports typer, rich.table and yaml and defines one pydantic model. All are started in turn, so
that they meet the same machine, and what is compared are medians of processor time and of elapsed time. They have
their bytecode written beforehand, as an installed package has.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import pytest

ROUNDS = 9
MEMPLAN = [sys.executable, "-m", "memplan"]
FLOOR = "the floor"
MESSAGE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1002.00 MiB. GPU 0 has a total capacity of 23.65 GiB of "
    "which 341.00 MiB is free. Including non-PyTorch memory, this process has 23.31 GiB memory in use. Of the allocated "
    "memory 22.64 GiB is allocated by PyTorch, and 210.06 MiB is reserved by PyTorch but unallocated."
)
BUDGET = "version: 1\nbudgets: [{name: a, model: llama-3.1-8b, config: lora, gpus: [h100-sxm-80gb, rtx4090], limit: 90 GiB}]\n"
COMMANDS = {
    FLOOR: [
        sys.executable,
        "-c",
        "import typer, rich.table, yaml, pydantic\nclass Model(pydantic.BaseModel):\n    name: str\n    size: int\n",
    ],
    "a completed name": MEMPLAN,
    "fit --qlora": [*MEMPLAN, "fit", "llama-8b", "--gpu", "rtx4090", "--qlora"],
    "fit, the table of methods": [*MEMPLAN, "fit", "llama-8b", "--gpu", "rtx4090"],
    "why, a message and its job": [*MEMPLAN, "why", "llama-8b", "--lora", "--message", "oom.txt"],
    "check, a job on two GPUs": [*MEMPLAN, "check"],
    "recommend, one GPU": [*MEMPLAN, "recommend", "--gpu", "rtx4090"],
    "max, every model and GPU": [*MEMPLAN, "max"],
}
COMPLETING = {"_MEMPLAN_COMPLETE": "complete_bash", "COMP_WORDS": "memplan fit lla", "COMP_CWORD": "2"}


def seconds(name: str, folder: Path) -> tuple[float, float]:
    """Return the processor time, user and system, and the elapsed time of one run."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    environment |= COMPLETING if name == "a completed name" else {}
    start = time.perf_counter()
    with subprocess.Popen(
        COMMANDS[name], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=environment, cwd=folder
    ) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode in (0, 1), name
    return usage.ru_utime + usage.ru_stime, time.perf_counter() - start


def report(rounds: int = ROUNDS) -> str:
    """Return medians, and medians of the rounds' ratios to the floor, over so many interleaved rounds."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "oom.txt").write_text(MESSAGE, encoding="utf-8")
        (folder / "memplan-budget.yaml").write_text(BUDGET, encoding="utf-8")
        for name in COMMANDS:
            seconds(name, folder)
        runs = [{name: seconds(name, folder) for name in COMMANDS} for _ in range(rounds)]
    lines = [
        f"cold start, medians of {rounds} interleaved rounds: processor time, elapsed time, processor time by the floor's"
    ]
    for name in COMMANDS:
        processor, elapsed = (median(run[name][index] for run in runs) for index in (0, 1))
        ratio = median(run[name][0] / run[FLOOR][0] for run in runs)
        lines.append(f"{name:28}  {processor * 1e3:7.1f} ms  {elapsed * 1e3:7.1f} ms  {ratio:5.2f}")
    return "\n".join(lines)


@pytest.mark.benchmark
def test_cold_start():
    print("\n" + report())


if __name__ == "__main__":
    print(report())
