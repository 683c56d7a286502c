"""Runs on both sides of what fits on smaller cards: the records in tests/records/boundary, and what test_cuda.py tries."""

from collections.abc import Iterator
from dataclasses import replace

from memplan.catalog.catalog import Catalog
from memplan.measure.records.measurement_plans import WHOLE, cuda_task
from memplan.measure.records.prediction import measured_device
from memplan.measure.task import Task, scaled_model
from memplan.plan.memory_plan import Device
from memplan.plan.planner import CompiledPlan
from memplan.training.resolution.resolve_config import resolve
from memplan.units import GIB

BOUNDARY_CARDS = (8 * GIB, 12 * GIB, 16 * GIB, 24 * GIB)
BOUNDARY_CASES = (
    ("smollm2-135m", "bf16-adamw"),
    ("smollm2-360m", "mixed-adamw"),
    ("qwen2.5-0.5b", "bf16-adamw"),
    ("qwen3-0.6b", "muon"),
    ("llama-3.2-1b", "tier1"),
    ("llama-3.2-1b", "lora"),
)


def boundary_tasks(catalog: Catalog, capability: str, card_bytes: int) -> Iterator[tuple[Task, bool]]:
    """Yield (task, whether it must run) on both sides of what fits on smaller cards.

    On each card the largest micro-batch that FITS has to run, and the smallest that is NO has to
    run out of memory; a model of which even one sequence is NO is left out of the first.
    """
    for capacity in BOUNDARY_CARDS:
        if capacity > card_bytes:
            continue
        for model, config in BOUNDARY_CASES:
            setup = resolve(replace(catalog.configs[config], sequence_length=1024), catalog, config)
            compiled = CompiledPlan(scaled_model(model, WHOLE, catalog), setup)
            device = measured_device(capability, capacity)
            fits = _largest_batch(compiled, device, ("fits",))
            tight = _largest_batch(compiled, device, ("fits", "tight"))
            for batch, runs in ((fits, True), (tight + 1, False)):
                if batch:
                    task = cuda_task(model, config, catalog, micro_batch_size=batch, sequence_length=1024)
                    yield replace(task, capacity_bytes=capacity, history=False, steps=2), runs


def _largest_batch(compiled: CompiledPlan, device: Device, verdicts: tuple[str, ...]) -> int:
    """Return the largest micro-batch with one of the verdicts, 0 for none; more batch never needs less."""
    low, high = 0, 1
    while compiled.evaluate(device, high).verdict in verdicts:
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if compiled.evaluate(device, middle).verdict in verdicts else (low, middle)
    return low
