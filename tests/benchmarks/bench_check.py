"""Time of ``memplan check`` on 500 different jobs; run with ``python tests/benchmarks/bench_check.py``.

In process, from the budget's text to the answer, as after the program has started. Every job has its
own pair of model and config or GPU, so that little can be shared; a second figure has ten configs on fifty GPUs.
"""

import os
import tempfile
import time
from pathlib import Path
from statistics import median

import pytest
from timing import samples

from memplan.budget.budget_files import read_budget
from memplan.budget.evaluation import worst_first
from memplan.catalog.catalog import Catalog, data_directory
from memplan.library.budget_plans import Workshop
from memplan.report.checks.check_answer import check_data
from memplan.report.checks.forge_texts import markdown_text

JOBS = 500
SAMPLES = 5


def different() -> str:
    """Return a budget of different jobs."""
    catalog = Catalog(data_directory())
    models, configs, gpus = list(catalog.models), list(catalog.configs), list(catalog.gpus)
    return "version: 1\nbudgets:\n" + "".join(
        f"  - {{name: job-{i:03d}, model: {models[i % len(models)]}, config: {configs[(i // len(models) + i) % len(configs)]}, "
        f"gpu: {gpus[i % len(gpus)]}, limit: {20 + i % 60} GiB}}\n"
        for i in range(JOBS)
    )


def matrix() -> str:
    """Return a budget of ten jobs on fifty GPUs each."""
    catalog = Catalog(data_directory())
    gpus = ", ".join(list(catalog.gpus)[: JOBS // 10])
    return "version: 1\nbudgets:\n" + "".join(
        f"  - {{name: job-{i}, model: llama-8b, config: {config}, gpus: [{gpus}], limit: 40 GiB}}\n"
        for i, config in enumerate(list(catalog.configs)[:10])
    )


def check(path: Path) -> tuple[int, int]:
    """Return how many results a budget has, and the bytes of their Markdown."""
    results = worst_first(Workshop(catalog := Catalog(data_directory())).results(read_budget(path), None))
    check_data(results, str(path), catalog.hash)
    return len(results), len(markdown_text(results).encode())


def report() -> str:
    """Return a line for each kind of budget."""
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        for name, text in (("500 different jobs", different()), ("10 jobs on 50 GPUs", matrix())):
            path = Path(os.path.join(folder, "memplan-budget.yaml"))
            path.write_text(text, encoding="utf-8")
            number, size = check(path)
            wall, busy = (
                median(samples(lambda path=path: check(path), SAMPLES, clock))
                for clock in (time.perf_counter, time.process_time)
            )
            lines.append(f"{name:20} {number} results {wall:6.2f} s, {busy:6.2f} s of a core; Markdown {size:,} bytes")
    return "\n".join(lines)


@pytest.mark.benchmark
def test_seconds_for_500_jobs():
    print("\n" + report())


if __name__ == "__main__":
    print(report())
