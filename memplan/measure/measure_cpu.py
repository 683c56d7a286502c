"""Measure training steps on the CPU by allocation events."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

from memplan.measure.measured import Measurement, Progress
from memplan.measure.storage_bytes import component_bytes, gradient_bytes
from memplan.measure.task import Task
from memplan.trace.jobs.reference_job import Session
from memplan.trace.recording.trace_result import LATER_MICRO_STEP

MARK = "memplan instant: "
NEXT_STEP = "next step"
COLLECTIVES = ("c10d::", "gloo:")
"""Operators of gloo, whose own copies of what it sends are no part of a job: NCCL makes none of them."""


class Marker:
    """Writes each instant into the profile, and books nothing."""

    def __init__(self) -> None:
        self._backward = False
        self.now = ""

    def next_step(self) -> None:
        """Begin a step; the last one is reported."""
        self.instant(NEXT_STEP)

    def instant(self, name: str, *, backward: bool = False) -> None:
        """Begin a part of the step."""
        self._backward, self.now = backward, name
        with record_function(MARK + name):
            pass

    def backward_reaches(self, tensor: Tensor, instant: str) -> None:
        """Begin ``instant`` when the gradient of ``tensor`` is known; a later micro-step is one instant."""
        if tensor.requires_grad and not self._backward and self.now != LATER_MICRO_STEP:
            tensor.register_hook(lambda _: self.instant(instant, backward=True))  # type: ignore[no-untyped-call]

    def mark(self, *_: Any, **__: Any) -> None:
        """Do nothing; nor can the CPU's allocator tell host from device."""

    forward_begins = forward_ends = section = recomputing = weight_copy = on_host = mark


def peaks_of(tree: list[Any]) -> dict[str, int]:
    """Return the largest sum of allocations by instant, of the last step."""
    total, instant = 0, NEXT_STEP
    peaks: dict[str, int] = {}
    for _, what in moments(tree):
        if isinstance(what, int):
            total += what
        else:
            instant = what
            if instant == NEXT_STEP:
                peaks = {}
        peaks[instant] = max(peaks.get(instant, 0), total)
    peaks.pop(NEXT_STEP, None)
    return peaks


def moments(tree: list[Any]) -> Iterator[tuple[int, int | str]]:
    """Yield (time, bytes allocated or freed) and (time, name of the instant that begins) in order; gloo's copies are left out."""
    copies: set[int] = set()
    for event, by_gloo in sorted(_events(tree), key=lambda pair: pair[0].start_time_ns):
        if event.tag != _EventType.Allocation:
            yield event.start_time_ns, event.name.removeprefix(MARK)
            continue
        size, address = event.extra_fields.alloc_size, event.extra_fields.ptr
        if size > 0 and by_gloo:
            copies.add(address)
        elif size < 0 and address in copies:
            copies.remove(address)
        else:
            copies.discard(address)  # what is freed by a thread that ends is not told
            yield event.start_time_ns, size


def _events(tree: list[Any]) -> Iterator[tuple[Any, bool]]:
    """Yield each allocation and each mark, and whether it is within one of gloo's operators."""
    waiting = [(event, False) for event in tree]
    while waiting:
        event, by_gloo = waiting.pop()
        if event.tag == _EventType.Allocation:
            yield event, by_gloo
            continue
        if event.name.startswith(MARK):
            yield event, by_gloo
        within = by_gloo or event.name.startswith(COLLECTIVES)
        waiting.extend((child, within) for child in event.children)


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


def measure_cpu(task: Task, progress: Progress, built: Callable[[Task], Session] | None = None) -> Measurement:
    """Return what some steps take of the CPU's memory, counted from before the first weight.

    Args:
        built: Makes the model and its job; None is of one device.

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
        session = marker.session = (built or _alone)(task)
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


def _alone(task: Task) -> Session:
    return Session(task.model.spec, task.setup, device="cpu", target="cpu")
