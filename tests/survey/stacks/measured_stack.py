"""Measure training steps that a library itself runs: transformers, TRL, PEFT and bitsandbytes, on a CUDA device or on the CPU."""

from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from memplan.host.this_machine import driver_version
from memplan.measure.measure_cpu import Marker, peaks_of
from memplan.measure.measure_cuda import PeakReader, context_bytes, used_bytes
from memplan.measure.measured import Measurement, Progress
from memplan.trace.stacks.registry import StackInputs, program_of, versions


@dataclass(frozen=True, slots=True)
class StackTask:
    """One measurement of a library's own loop."""

    stack: str  # Whose loop
    inputs: StackInputs  # The job, with the device that it runs on
    alloc_conf: str = ""  # As PYTORCH_CUDA_ALLOC_CONF
    capacity_bytes: int = 0  # Memory that the process may take on a CUDA device; 0 for all

    def measured(self, progress: Progress) -> Measurement:
        """Return what the library's steps take of the device's memory."""
        torch.manual_seed(0)
        return (_on_cpu if self.inputs.device == "cpu" else _on_cuda)(self, progress)


class _StepReader(PeakReader):
    """Reads the peaks of a loop that announces its steps; those of the first, which makes what stays, do not count."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress, self._steps = progress, 0

    def next_step(self) -> None:
        """Begin a step; the last one is reported, by instant."""
        self._steps += 1
        self._progress(f"step {self._steps}")
        if self._steps == 2:
            self.forget_totals()
        else:
            self.forget()


def _on_cpu(task: StackTask, progress: Progress) -> Measurement:
    """Return the sums of the allocator's events; kernels of the CPU are others than a card's."""
    torch.set_num_threads(1)
    program = program_of(task.stack)
    progress("training on the CPU")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        program.run(task.inputs, Marker())
    assert recorded.profiler is not None
    instants = peaks_of(recorded.profiler.kineto_results.experimental_event_tree())
    totals = {"requested": max(instants.values())}
    return Measurement("measured", "", "cpu", torch.__version__, instants=instants, totals=totals)


def _on_cuda(task: StackTask, progress: Progress) -> Measurement:
    """Return the counters of torch's allocator, and what the driver shows beyond its segments."""
    progress("creating a CUDA context")
    others = used_bytes()
    _, total = torch.cuda.mem_get_info()
    if task.capacity_bytes:
        left = max(0, task.capacity_bytes - context_bytes(others))
        torch.cuda.set_per_process_memory_fraction(min(1.0, left / total))
    reader = _StepReader(progress)
    program_of(task.stack).run(task.inputs, reader)
    torch.cuda.synchronize()
    reader.read()
    outside = context_bytes(others)
    properties = torch.cuda.get_device_properties(0)
    return Measurement(
        status="measured",
        device=properties.name,
        torch_version=torch.__version__,
        instants=reader.instants,
        totals={**reader.totals, "device": reader.totals["reserved"] + outside},
        counters={
            "context_bytes": outside,
            "others_bytes": others,
            "total_bytes": total,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "driver_version": driver_version(),
            "cuda_version": str(torch.version.cuda),
            "retries": int(torch.cuda.memory_stats()["num_alloc_retries"]),
            "packages": versions(task.stack),
        },
    )
