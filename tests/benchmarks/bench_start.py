"""Cold start of ``memplan fit`` against its floor; run with ``python tests/benchmarks/bench_start.py``.

The floor is a process that imports typer, rich.table and yaml and defines one pydantic model. Both are started in turn,
so that both meet the same machine, and what is compared are medians of processor time and of elapsed time. Both have
their bytecode written beforehand, as an installed package has.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import pytest

PAIRS = 25
FIT = [sys.executable, str(Path(sys.executable).parent / "memplan"), "fit", "llama-8b", "--gpu", "rtx4090"]
ASKED = {"fit, the table of methods": FIT, "fit --qlora": [*FIT, "--qlora"]}
FLOOR = [
    sys.executable,
    "-c",
    "import typer, rich.table, yaml, pydantic\nclass Model(pydantic.BaseModel):\n    name: str\n    size: int\n",
]


def seconds(command: list[str]) -> tuple[float, float]:
    """Return the processor time, user and system, and the elapsed time of one run."""
    start = time.perf_counter()
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=environment) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, command
    return usage.ru_utime + usage.ru_stime, time.perf_counter() - start


def report(pairs: int = PAIRS) -> str:
    """Return medians and ratios over so many interleaved rounds."""
    for command in (*ASKED.values(), FLOOR):
        seconds(command)
    runs = [([seconds(command) for command in ASKED.values()], seconds(FLOOR)) for _ in range(pairs)]
    lines = [f"cold start, medians of {pairs} interleaved rounds"]
    for place, name in enumerate(ASKED):
        for index, kind in enumerate(("processor", "elapsed")):
            ours, floor = median(fits[place][index] for fits, _ in runs), median(base[index] for _, base in runs)
            paired = median(fits[place][index] / base[index] for fits, base in runs)
            lines.append(
                f"{name:26}  {kind:9}  {ours * 1e3:6.1f} ms  floor {floor * 1e3:6.1f} ms  ratio {ours / floor:.2f}  "
                f"median of the rounds' ratios {paired:.2f}"
            )
    return "\n".join(lines)


@pytest.mark.benchmark
def test_cold_start():
    print("\n" + report())


if __name__ == "__main__":
    print(report())
