"""Time of the solver in process, as ratios to evaluating one plan; run with ``python tests/benchmarks/bench_solver.py``.

Process time of this process alone, so that what else the machine does hardly counts. A search
starts afresh each time: nothing is kept between searches.
"""

from collections.abc import Callable
from dataclasses import replace
from statistics import median

import pytest
from timing import samples

from memplan.catalog.catalog import Catalog, data_directory
from memplan.library.lookup import catalog_model
from memplan.plan.memory_plan import Device
from memplan.plan.planner import CompiledPlan
from memplan.solver.batch_frontier import frontier
from memplan.solver.largest_per_device import largest_values
from memplan.solver.search.axes import BATCHES, full_space
from memplan.solver.search.suggested_settings import Request, suggestions
from memplan.training.resolution.resolve_config import resolve

JOBS = (
    ("llama-3.1-8b", "rtx4090", True),
    ("llama-3.1-8b", "h100-sxm-80gb", False),
    ("llama-3.1-8b", "h100-sxm-80gb", True),
    ("qwen3-30b-a3b", "b200", True),
    ("llama-3.1-70b", "rtx4090", True),
)
SAMPLES = 5


def seconds(call: Callable[[], object], count: int = SAMPLES) -> float:
    """Return the median process time of a call."""
    return median(samples(call, count))


def report() -> str:
    """Return a line for each question."""
    catalog = Catalog(data_directory())
    model = catalog_model("llama-3.1-8b", catalog)
    setup = resolve(catalog.configs["bf16-adamw-8bit"], catalog, "bf16-adamw-8bit")
    h100 = Device(catalog.gpus["h100"], "h100-sxm-80gb")
    plan = CompiledPlan(model, setup)
    one = seconds(lambda: [plan.evaluate(h100, 2, 4096) for _ in range(1000)]) / 1000
    lines = [f"one plan evaluated: {one * 1e6:.0f} us"]

    def line(name: str, took: float, more: str = "") -> None:
        lines.append(f"{name:50} {took * 1e3:8.1f} ms {took / one:9,.0f} plans{more}")

    batches, lengths = tuple(range(1, 21)), tuple(512 * step for step in range(1, 21))
    line("frontier, 20 x 20 cells", seconds(lambda: frontier(plan, h100, batches, lengths)))
    devices = [Device(gpu, name) for name, gpu in catalog.gpus.entries.items()]
    for what in ("batch", "sequence", "layers"):
        took = seconds(lambda what=what: largest_values(what, model, setup, devices))
        line(f"largest {what} on {len(devices)} GPUs", took)
    base = replace(catalog.configs["bf16-adamw"], sequence_length=2048)
    size = full_space(base, catalog, BATCHES).size
    for name, gpu, experimental in JOBS:
        chosen, device = catalog_model(name, catalog), Device(catalog.gpus[gpu], gpu)
        request = Request(base, experimental=experimental)
        compiled = suggestions(chosen, request, device, catalog).outcome.compiled
        took = seconds(lambda c=chosen, r=request, d=device: suggestions(c, r, d, catalog), 3)
        label = f"suggest {name} on {gpu}{' --experimental' if experimental else ''}"
        line(label, took, f", {compiled} compiled of {size:,} combinations")
    return "\n".join(lines)


@pytest.mark.benchmark
def test_solver_speed():
    print("\n" + report())


if __name__ == "__main__":
    print(report())
