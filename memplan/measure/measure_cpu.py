"""Measure training steps on the CPU by allocation events."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from memplan.measure.measured import Measurement, Progress
from memplan.measure.storage_bytes import component_bytes, gradient_bytes
from memplan.trace.cpu_events import MARK, NEXT_STEP, Marker, peaks_of
from memplan.trace.jobs.reference_job import Session

if TYPE_CHECKING:
    from memplan.measure.task import Task


class GradientCounter(Marker):
    """Marks instants, and counts the gradients when the first update is about to begin."""

    def __init__(self) -> None:
        super().__init__()
        self.session: Session | None = None
        self.gradient_bytes = 0

    def instant(self, name: str, *, backward: bool = False) -> None:
        """Begin a part of the step."""
        if name in ("gradient clipping", "optimizer step") and self.session is not None:
            self.gradient_bytes = max(self.gradient_bytes, gradient_bytes(self.session))
        super().instant(name, backward=backward)


def measure_cpu(task: Task, progress: Progress) -> Measurement:
    """Return what some steps take of the CPU's memory, counted from before the first weight.

    Source:
        Resident sets exceed allocations by 7 to 25 % (retention in malloc), so they are not looked at.
    """
    torch.manual_seed(0)
    torch.set_num_threads(1)
    # oneDNN's products in 16 bits copy operands on some processors and not on others.
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    marker = GradientCounter()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        progress("building the model")
        session = marker.session = Session(task.model.spec, task.setup, device="cpu", target="cpu")
        session.watch(marker)
        for step in range(task.steps):
            progress(f"step {step + 1} of {task.steps}")
            with record_function(MARK + NEXT_STEP):
                pass
            session.step(marker)
    progress("adding up allocation events")
    assert recorded.profiler is not None
    instants = peaks_of(recorded.profiler.kineto_results.experimental_event_tree())
    components = {**component_bytes(session), "gradients": marker.gradient_bytes}
    return Measurement(
        status="measured",
        device="cpu",
        torch_version=torch.__version__,
        components=components,
        instants=instants,
        totals={"requested": max(instants.values())},
        counters={"threads": torch.get_num_threads(), "attention": task.setup.profile.attention, "onednn": False},
    )
