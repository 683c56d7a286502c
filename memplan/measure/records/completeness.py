"""What a record has to contain: all that is compared, so that nothing can be left out of a comparison."""

from collections.abc import Container, Iterator

from memplan.measure.measured import Measurement
from memplan.measure.records.prediction import Prediction
from memplan.measure.task import Task

COMPONENTS = ("weights", "buffers", "master_weights", "optimizer_states", "gradients")
CUDA_COUNTERS = ("context_bytes", "total_bytes", "compute_capability")
"""Counters that predictions for a card are made with."""
TOTALS = {"cpu": ("requested",), "cuda": ("requested", "allocated", "reserved", "device")}
"""Kind of device -> totals that its allocator can be asked for."""


def missing_figures(task: Task, measurement: Measurement) -> Iterator[str]:
    """Yield the key of each figure that a run of a task gives and a measurement lacks.

    A run that ended for want of memory has none: that it ended so is what is compared. The memory
    history is recorded on CUDA unless memory is limited or coded weights are trained, whose events are
    too many (``memplan.measure.records.measurement_plans``).
    """
    if measurement.status == "out of memory":
        return
    cuda = task.device == "cuda"
    host = ("host",) if task.setup.offloads_states else ()
    yield from _missing("components", (*COMPONENTS, *host), measurement.components)
    yield from _missing("totals", TOTALS[task.device], measurement.totals)
    history = ("history",) if not (task.capacity_bytes or task.setup.trains_codes) else ()
    yield from _missing("counters", (*CUDA_COUNTERS, *history) if cuda else (), measurement.counters)
    if not measurement.instants:
        yield "instants"


def other_instants(prediction: Prediction, measurement: Measurement) -> Iterator[str]:
    """Yield the instants that only the trace has, or only a measurement of a whole run."""
    if measurement.status != "out of memory":
        yield from sorted(prediction.traced_instants.keys() ^ measurement.instants.keys())


def _missing(section: str, names: tuple[str, ...], present: Container[str]) -> Iterator[str]:
    return (f"{section}.{name}" for name in names if name not in present)
