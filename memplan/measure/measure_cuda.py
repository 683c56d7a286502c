"""Measure training steps on a CUDA device by the allocator's own counters."""

import gc
import json
import os
from dataclasses import asdict, replace
from typing import Any

import torch

from memplan.host.this_machine import driver_version, nvidia_smi_rows
from memplan.measure.measure_cpu import GradientCounter
from memplan.measure.measured import Measurement, Progress
from memplan.measure.storage_bytes import component_bytes
from memplan.measure.task import Task
from memplan.trace.jobs.reference_job import Session
from memplan.trace.recording.workspaces import cublas_workspace_bytes
from memplan.units import MIB

PEAKS = {
    "requested": "requested_bytes.all.peak",
    "allocated": "allocated_bytes.all.peak",
    "reserved": "reserved_bytes.all.peak",
}
HISTORY_ENTRIES = 1_000_000


class PeakReader(GradientCounter):
    """Reads the allocator's peaks of each instant, and those of all steps but the first."""

    def __init__(self) -> None:
        super().__init__()
        self.totals: dict[str, int] = dict.fromkeys(PEAKS, 0)
        self.instants: dict[str, int] = {}
        self._now = ""

    def instant(self, name: str, *, backward: bool = False) -> None:
        """Begin a part of the step."""
        super().instant(name, backward=backward)
        self.read()
        self._now = name

    def read(self) -> None:
        """Record the peaks since the last call, and reset the counters."""
        stats = torch.cuda.memory_stats()
        for name, key in PEAKS.items():
            self.totals[name] = max(self.totals[name], int(stats[key]))
        if self._now:
            requested = int(stats[PEAKS["requested"]])
            self.instants[self._now] = max(self.instants.get(self._now, 0), requested)
        torch.cuda.reset_peak_memory_stats()

    def forget(self) -> None:
        """Discard what was read: only the last step is reported."""
        self.read()
        self._now = ""
        self.instants = {}

    def forget_totals(self) -> None:
        """Discard the first step, which creates persistent tensors."""
        self.forget()
        self.totals = dict.fromkeys(PEAKS, 0)


def measure_cuda(task: Task, progress: Progress) -> Measurement:
    """Return what some steps take of a CUDA device's memory; the first, which creates persistent tensors, does not count."""
    torch.manual_seed(0)
    if task.history:
        torch.cuda.memory._record_memory_history(context=None, max_entries=HISTORY_ENTRIES)
    progress("creating a CUDA context")
    others = used_bytes()
    _, total = torch.cuda.mem_get_info()
    reader = PeakReader()
    if task.capacity_bytes:
        progress("loading kernels, so that the context has its full size")
        _load_kernels(task)
        left = max(0, task.capacity_bytes - context_bytes(others))
        torch.cuda.set_per_process_memory_fraction(min(1.0, left / total))
    progress("building the model")
    session = reader.session = Session(task.model.spec, task.setup, device="cuda", target="cuda")
    session.watch(reader)
    for step in range(task.steps):
        progress(f"step {step + 1} of {task.steps}")
        session.step(reader)
        torch.cuda.synchronize()
        if step == 0:
            reader.forget_totals()
        elif step + 1 < task.steps:
            reader.forget()
    reader.read()
    return _measurement(task, session, reader, others)


def _load_kernels(task: Task) -> None:
    """Run a step of the first layer alone: CUDA loads kernels when they first run, outside the allocator."""
    first = task.model.spec.runs[0]
    spec = replace(task.model.spec, runs=(replace(first, count=1),))
    config = replace(task.setup.config, micro_batch_size=1)
    session = Session(spec, replace(task.setup, config=config), device="cuda", target="cuda")
    reader = PeakReader()
    session.watch(reader)
    session.step(reader)
    torch.cuda.synchronize()
    states = (tensor for _, update in session.updates for tensor, _ in update.states())
    weights = (*session.model.parameters(), *session.model.buffers(), *session.masters, *session.average)
    for tensor in (tensor for tensor in (*weights, *states) if tensor.is_cuda):
        tensor.untyped_storage().resize_(0)  # hooks of parameters keep them alive beyond any collection
    for item in session.trained:
        item.release(fill=False)
    del session, reader
    gc.collect()
    torch.cuda.empty_cache()


def _measurement(task: Task, session: Session, reader: PeakReader, others: int) -> Measurement:
    """Return the counters of a finished run; what the driver shows beyond the segments is context and libraries."""
    outside = context_bytes(others)
    properties = torch.cuda.get_device_properties(0)
    counters: dict[str, Any] = {
        "context_bytes": outside,
        "others_bytes": others,
        "total_bytes": torch.cuda.mem_get_info()[1],
        "compute_capability": f"{properties.major}.{properties.minor}",
        "cublas_workspace_bytes": _cublas_workspace_bytes(f"{properties.major}.{properties.minor}"),
        "driver_version": driver_version(),
        "cuda_version": str(torch.version.cuda),
        "attention": task.setup.profile.attention,
        "allocator_backend": torch.cuda.get_allocator_backend(),
        "retries": int(torch.cuda.memory_stats()["num_alloc_retries"]),
    }
    if task.history:
        counters["history"] = _replayed_history(task)
    return Measurement(
        status="measured",
        device=properties.name,
        torch_version=torch.__version__,
        components={**component_bytes(session), "gradients": reader.gradient_bytes},
        instants=reader.instants,
        totals={**reader.totals, "device": reader.totals["reserved"] + outside},
        counters=counters,
    )


def _cublas_workspace_bytes(capability: str) -> int:
    """Return the size of one cuBLAS workspace; torch before 2.13 does not say, and has the documented one."""
    ask = getattr(torch.backends.cuda, "cublas_workspace_size", None)
    return cublas_workspace_bytes(capability) if ask is None else int(ask())


def _replayed_history(task: Task) -> dict[str, Any]:
    """Return how far the simulated allocator follows this run, event by event."""
    from memplan.allocator.history_comparison import compare_history
    from memplan.allocator.memory_history import parse_history
    from memplan.allocator.settings import parse_alloc_conf

    text = json.dumps(torch.cuda.memory._snapshot(), default=str)
    history = parse_history(text, "this run's memory history", 0)
    result = compare_history(history, parse_alloc_conf(task.alloc_conf or history.alloc_conf))
    figures = {key: value for key, value in asdict(result).items() if isinstance(value, int)}
    return {**figures, "simulated_reserved_peak_bytes": result.simulated.reserved_peak_bytes}


def used_bytes() -> int:
    """Return what is taken of the first device, in whole MiB; before a context is made that is others' memory."""
    rows = _numbers("--query-gpu=memory.used")
    return rows[0][0] * MIB if rows else 0


def context_bytes(others: int) -> int:
    """Return what this process takes beyond the allocator's segments.

    The driver lists memory by process. Where it does not (another container, or Windows), all that
    is taken of the device counts, less what was taken before.

    Args:
        others: What ``used_bytes`` said before this process had a context.
    """
    segments = torch.cuda.memory_reserved()
    own = [size * MIB for process, size in _numbers("--query-compute-apps=pid,used_memory") if process == os.getpid()]
    free, total = torch.cuda.mem_get_info()
    return max(0, (own[0] if own else total - free - others) - segments)


def _numbers(query: str) -> list[tuple[int, ...]]:
    """Return the rows of numbers that the driver answers; those with something else are left out."""
    return [tuple(map(int, row)) for row in nvidia_smi_rows(query) or () if all(part.isdigit() for part in row)]
