"""What formula, trace and simulated allocator say of a task."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction

from memplan.allocator.caching_allocator import replay
from memplan.allocator.results import AllocatorResult
from memplan.allocator.settings import parse_alloc_conf
from memplan.catalog.entries import Gpu
from memplan.measure.measured import Measurement
from memplan.measure.task import Task
from memplan.plan.memory_plan import Device, MemoryPlan
from memplan.plan.planner import CompiledPlan
from memplan.trace.recording.trace_result import Trace
from memplan.trace.recording.workspaces import LIBRARIES
from memplan.trace.tracer import trace_training

DEFAULT_CAPABILITY = "9.0"

CAPACITY_SLACK = Fraction(1, 100)
"""Of a card's memory: which segments are broken up depends on addresses that the driver chooses."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Formula and trace of a task, under the same names."""

    # What the formula says is held between steps, ``host`` where states lie there, and the gradients kept.
    components: Mapping[str, int]
    traced_components: Mapping[str, int]  # The same as traced
    instants: Mapping[str, int]  # The formula's, and ``traced_instants`` the trace's
    traced_instants: Mapping[str, int]
    # The formula's four totals and upper end, and ``traced_totals`` those of the trace and the simulator.
    totals: Mapping[str, int]
    traced_totals: Mapping[str, int]
    peak_instant: str  # Where the trace has its peak
    notes: tuple[str, ...]  # What the trace leaves out
    # Whether the simulated allocator lives with the capacity that the task was given, less or more ``CAPACITY_SLACK``
    # in favour of what was measured.
    survives: bool = True
    # Of several processes, which it is; the plan is of the first, which holds as much as any, and a later one of uneven
    # shards may hold less.
    rank: int = 0
    holds_less: bool = False


def predict(task: Task, measurement: Measurement, rank: int = 0) -> Prediction:
    """Return what is predicted for a task on the device that it was measured on.

    Args:
        measurement: Says which card it was, and how large its context.
        rank: Which of several processes is traced.
    """
    counters = measurement.counters
    cuda = task.device == "cuda"
    capability = str(counters.get("compute_capability", DEFAULT_CAPABILITY))
    plan = planned(task, capability, int(counters.get("total_bytes", 0)))
    trace = trace_training(
        task.model,
        task.setup,
        target="cuda" if cuda else "cpu",
        compute_capability=capability if cuda else None,
        steps=task.steps,
        rank=rank,
    )
    workspaces = plan.allowances.library_bytes if cuda else 0
    components = _components(plan, task)
    # The CPU's allocator counts what stands for host memory with the rest.
    beside, traced_beside = (workspaces, workspaces) if cuda else (components.get("host", 0), trace.host_bytes)
    context = int(counters.get("context_bytes", plan.allowances.context_bytes))
    traced_totals, survives = {"requested": trace.peak_bytes + traced_beside}, True
    if cuda:
        traced_totals = _simulated(trace, task, context, measurement.totals.get("reserved"))
        survives = _survives(trace, task, context, ran=measurement.status == "measured")
    return Prediction(
        components=components,
        traced_components={**_component_peaks(trace), "host": trace.host_bytes},
        instants={name: size + beside for name, size in plan.instants},
        traced_instants={name: size + traced_beside for name, size in trace.instant_bytes.items()},
        totals=_planned(plan, beside),
        traced_totals=traced_totals,
        peak_instant=trace.peak_instant,
        notes=tuple(trace.notes),
        survives=survives,
        rank=rank,
        holds_less=rank > 0 and _is_uneven(task),
    )


def planned(task: Task, capability: str = DEFAULT_CAPABILITY, total_bytes: int = 0) -> MemoryPlan:
    """Return the formula's plan for a task on a card of that compute capability and memory."""
    return CompiledPlan(task.model, task.setup).evaluate(measured_device(capability, total_bytes))


def _components(plan: MemoryPlan, task: Task) -> dict[str, int]:
    """Return what the formula says is held between steps, and the gradients kept."""
    states = plan.states
    whole_step = task.setup.config.gradients.lifetime == "step"
    components = {
        "weights": states.weight_bytes,
        "master_weights": states.master_bytes,
        "gradients": states.gradient_bytes if whole_step else 0,
        "optimizer_states": states.state_bytes,
        "buffers": plan.buffer_bytes,
    }
    offloaded = plan.host_bytes if task.setup.offloads_states else 0
    return {**components, "host": offloaded} if offloaded else components


def _is_uneven(task: Task) -> bool:
    """Tell whether the rows of a tensor are no multiple of the processes that divide them."""
    ranks = task.setup.config.parallel.shards
    return any(tensor.shape[0] % ranks for tensor in task.model.inventory)


def _component_peaks(trace: Trace) -> dict[str, int]:
    """Return the traced components that do not change within a step."""
    peaks: dict[str, int] = {}
    for moment in trace.instants.values():
        for name in ("weights", "master_weights", "optimizer_states", "buffers"):
            peaks[name] = max(peaks.get(name, 0), moment.components.get(name, 0))
    return peaks


def _planned(plan: MemoryPlan, beside: int) -> dict[str, int]:
    """Return a plan's totals; the counter of requested bytes includes libraries' workspaces, or host memory."""
    return {
        "requested": plan.requested_bytes + beside,
        "allocated": plan.allocated_bytes,
        "reserved": plan.reserved_bytes,
        "device": plan.device_bytes,
        "upper": plan.upper_bytes,
    }


def _simulated(trace: Trace, task: Task, context_bytes: int, measured_bytes: int | None) -> dict[str, int]:
    """Return the totals that the simulated allocator has for a trace; its requested peak has the workspaces.

    Where the driver put segments is not recorded: of segments below and above those before, those count that are nearer to
    what was measured.
    """
    result = _replayed(trace, task, None)
    if measured_bytes not in (None, result.reserved_peak_bytes):
        other = _replayed(trace, task, None, place=_rising())
        result = min(result, other, key=lambda one: abs(one.reserved_peak_bytes - measured_bytes))
    return {
        "requested": result.requested_peak_bytes,
        "allocated": result.allocated_peak_bytes,
        "reserved": result.reserved_peak_bytes,
        "device": result.reserved_peak_bytes + context_bytes,
    }


def _survives(trace: Trace, task: Task, context_bytes: int, *, ran: bool) -> bool:
    """Return whether the simulated allocator lives with the task's capacity."""
    if not task.capacity_bytes:
        return True
    share = 1 + CAPACITY_SLACK if ran else 1 - CAPACITY_SLACK
    capacity = task.capacity_bytes * share.numerator // share.denominator
    return _replayed(trace, task, max(0, capacity - context_bytes)).survives


def _rising() -> Callable[[int], int]:
    """Return a driver that puts each segment above those before."""
    ends = [0]

    def place(size_bytes: int) -> int:
        ends.append(ends[-1] + size_bytes)
        return ends[-2]

    return place


def _replayed(
    trace: Trace, task: Task, capacity_bytes: int | None, place: Callable[[int], int] | None = None
) -> AllocatorResult:
    """Return what the simulated allocator does with a trace.

    A run on limited memory has loaded its kernels first (``measure_cuda``), and holds the workspaces
    of libraries from then on: later they would be cut out of the middle of a larger block.
    """
    events = [(1 if event.allocates else -1, event.storage, event.bytes) for event in trace.events]
    if task.capacity_bytes:
        early = {event.storage for event in trace.events if event.operation in LIBRARIES}
        events = [e for e in events if e[1] in early] + [e for e in events if e[1] not in early]
    return replay(events, parse_alloc_conf(task.alloc_conf), capacity_bytes, place=place)


def measured_device(capability: str, total_bytes: int) -> Device:
    """Return a card of which compute capability and memory are known."""
    name = "the measured device"
    return Device(Gpu.of_memory(name, total_bytes, "measured", capability), name)
