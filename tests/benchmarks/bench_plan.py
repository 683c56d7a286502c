"""Time of one plan in process; run with ``python tests/benchmarks/bench_plan.py``.

Compiling joins a model and a setup into closed forms; evaluating puts in a batch, a length and a device.
"""

import time
from collections.abc import Callable
from statistics import median

import pytest
from timing import samples

from memplan.catalog.catalog import Catalog, data_directory
from memplan.errors import CannotAnswerError
from memplan.library.lookup import catalog_model
from memplan.plan.memory_plan import Device
from memplan.plan.planner import CompiledPlan
from memplan.training.resolution.resolve_config import resolve

MODELS = ("gpt2", "llama-3.1-8b", "llama-3.1-405b", "qwen3-30b-a3b", "deepseek-v3")
CONFIGS = ("bf16-adamw", "tier3", "qlora")
SAMPLES = 15


def microseconds(call: Callable[[], object], count: int) -> float:
    """Return the median over samples of the mean time of ``count`` calls."""
    return median(samples(lambda: [call() for _ in range(count)], SAMPLES, time.perf_counter)) / count * 1e6


def report() -> str:
    """Return a line for each model and config."""
    catalog = Catalog(data_directory())
    device = Device(catalog.gpus["rtx4090"], "rtx4090")
    lines = [f"{'model':16} {'config':12} {'evaluate':>12} {'compile':>14}"]
    for name in MODELS:
        model = catalog_model(name, catalog)
        for config in CONFIGS:
            setup = resolve(catalog.configs[config], catalog, config)
            try:
                plan = CompiledPlan(model, setup)
            except CannotAnswerError:
                lines.append(f"{name:16} {config:12} refused")
                continue
            evaluated = microseconds(
                lambda plan=plan: plan.evaluate(device, 2, plan.model.spec.learned_positions or 4096), 100
            )
            compiled = microseconds(lambda model=model, setup=setup: CompiledPlan(model, setup), 1)
            lines.append(f"{name:16} {config:12} {evaluated:9.1f} us {compiled:11.1f} us")
    return "\n".join(lines)


@pytest.mark.benchmark
def test_plans_per_second():
    print("\n" + report())


if __name__ == "__main__":
    print(report())
