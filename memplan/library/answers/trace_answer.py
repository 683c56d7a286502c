"""The answer of ``memplan trace``: what was alive in a traced step, the formula beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import memplan
from memplan.allocator.results import AllocatorResult
from memplan.documents.frozen_values import dataclass
from memplan.plan.allowances import library_workspace_bytes
from memplan.plan.components import COMPONENTS
from memplan.plan.memory_plan import Device, MemoryPlan
from memplan.plan.reserve.step_timeline import COLUMNS, STACKED, Timeline, fullest_columns
from memplan.report.document import Block, Document, Table
from memplan.report.pictures.step_figure import Limits, step_figure
from memplan.report.plans.plan_answer import stack_data, stack_words
from memplan.trace.recording.trace_result import Trace, TracedStorage
from memplan.training.resolution.resolved_keys import resolved_keys
from memplan.training.resolved import TrainingSetup
from memplan.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OWN_CODE = "answers/traced_step.py:"
"""How a trace names the lines of the module that starts it."""


@dataclass(frozen=True, slots=True)
class TracedStep:
    """A trace, the allocator's replay of it, and the formula's answer where there is one."""

    title: str  # What was traced
    trace: Trace
    setup: TrainingSetup
    replayed: AllocatorResult  # What the allocator does with memory to spare
    on_device: AllocatorResult | None  # What it does on the GPU that was named
    plan: MemoryPlan | None  # The formula's answer, where there is one
    device: Device | None
    context_bytes: int  # Memory outside the allocator
    most_listed: int  # Tensors at the peak to list


def _formula_parts(plan: MemoryPlan) -> dict[str, int]:
    """Return the requested components of a plan at its peak."""
    outside = ("library_workspaces", "allocator_reserve", "device_context", "nccl_buffers", "generation_engine")
    return {c.name: c.bytes for c in plan.components if c.name not in outside}


def trace_document(traced: TracedStep, unit: str) -> Document:
    """Return the answer of ``memplan trace``."""
    trace, plan = traced.trace, traced.plan
    formula = _formula_parts(plan) if plan else {}
    blocks: list[Block] = [_heading(traced)]
    blocks.append(_component_table(trace, formula, unit))
    blocks.append(_instant_table(trace, plan, unit))
    hosted = traced.setup.offloads_states
    blocks.append(totals_table(trace, traced.replayed, traced.context_bytes, unit, hosted=hosted))
    if traced.most_listed:
        blocks.append(largest_table(trace, traced.most_listed, unit, model_line))
    if trace.notes:
        blocks.append(tuple(f"Note: {note}" for note in trace.notes))
    blocks.append(_sentence(traced))
    fails = traced.on_device is not None and not traced.on_device.survives
    return Document(_data(traced), tuple(blocks), 1 if fails else 0)


def _heading(traced: TracedStep) -> tuple[str, str]:
    config = traced.setup.config
    of = f" of one GPU of {config.parallel.gpus}" if config.parallel.gpus > 1 else ""
    return (
        f"{traced.title}, {traced.setup.name}, {stack_words([traced.setup])}: one steady-state step{of}, traced on tensors without memory",
        f"micro-batch {config.micro_batch_size}, sequence {config.sequence_length}, accumulation "
        f"{config.gradient_accumulation_steps}, checkpointing {config.checkpointing_words}",
    )


def _component_table(trace: Trace, formula: Mapping[str, int], unit: str) -> Table:
    rows = []
    traced = {str(name): size for name, size in trace.peak.components.items()}
    for name in COMPONENTS:
        if name in traced or name in formula:
            rows.append(_compared(name, formula.get(name), traced.get(name, 0), unit, bool(formula)))
    rows.append(
        _compared("requested", sum(formula.values()) if formula else None, trace.peak_bytes, unit, bool(formula))
    )
    title = f"At the peak: {trace.peak_instant} ({trace.peak.operation})"
    return Table(("component", ">formula", ">trace", ">difference"), tuple(rows), title)


def _compared(name: str, formula: int | None, traced: int, unit: str, known: bool) -> tuple[str, str, str, str]:
    if not known:
        return (name, "", format_bytes(traced, unit), "")
    difference = (formula or 0) - traced
    return (
        name,
        format_bytes(formula or 0, unit),
        format_bytes(traced, unit),
        f"{difference:+,} B" if difference else "0",
    )


def _instant_table(trace: Trace, plan: MemoryPlan | None, unit: str) -> Table:
    """Return every instant, with formula beside trace where the formula has it."""
    formula = dict(plan.instants) if plan else {}
    rows = []
    for name, moment in trace.instants.items():
        if plan and name not in formula and name.startswith("layer"):
            continue
        known = name in formula
        rows.append(
            (
                name,
                format_bytes(formula[name], unit) if known else "",
                format_bytes(moment.bytes, unit),
                f"{formula[name] - moment.bytes:+,} B"
                if known and formula[name] != moment.bytes
                else "0"
                if known
                else "",
                moment.operation + (" (peak)" if name == trace.peak_instant else ""),
            )
        )
    return Table(("instant", ">formula", ">trace", ">difference", "operation"), tuple(rows))


def totals_table(
    trace: Trace, replayed: AllocatorResult, context_bytes: int, unit: str, *, hosted: bool = False
) -> Table:
    """Return the totals of a step with the simulated allocator, and what lies in host memory where something does.

    Args:
        context_bytes: Memory outside the allocator.
    """
    rows = [
        ("requested", trace.peak_bytes, "live tensors and what kernels allocate while they run"),
        ("allocated", replayed.allocated_peak_bytes, "in blocks, with library workspaces (simulated)"),
        ("reserved", replayed.reserved_peak_bytes, f"in {replayed.segments:,} segments (simulated)"),
        ("device", replayed.reserved_peak_bytes + context_bytes, "with the CUDA context"),
        *([("host", trace.host_bytes, "optimizer states in pinned host memory")] if hosted else []),
    ]
    cells = tuple((name, format_bytes(size, unit), meaning) for name, size, meaning in rows)
    return Table(("total", ">bytes", "meaning"), cells)


def largest_table(trace: Trace, most: int, unit: str, line: Callable[[str], str]) -> Table:
    """Return the largest tensors at the peak.

    Args:
        line: What is said of the line that made one; nothing for the instant in its place.
    """
    rows = tuple(
        (
            format_bytes(s.bytes, unit),
            s.component,
            "x".join(map(str, s.shape)),
            s.name or s.operation,
            line(s.line) or s.instant,
        )
        for s in trace.largest_at_peak(most)
    )
    return Table((">bytes", "component", "shape", "made by", "where"), rows, "Largest tensors alive at the peak")


def _sentence(traced: TracedStep) -> str:
    trace, plan = traced.trace, traced.plan
    text = f"The trace peaks at {format_bytes(trace.peak_bytes)} in {trace.peak_instant}"
    if plan is not None:
        difference = plan.requested_bytes - trace.peak_bytes
        text += (
            "; the formula agrees to the byte"
            if not difference
            else f"; the formula is off by {difference:+,} B ({_percent(difference, trace.peak_bytes)})"
        )
        if difference and plan.peak.name != trace.peak_instant:
            text += f" and has its peak at {plan.peak.name}"
    if traced.device is not None and traced.on_device is not None:
        name, result = traced.device.name, traced.on_device
        text += f"; it would survive on {name}" if result.survives else f"; on {name} it would run {result.oom}"
    return text + "."


def _percent(part: int, whole: int) -> str:
    thousandths = abs(part) * 100_000 // whole if whole else 0
    return f"{'-' if part < 0 else '+'}{thousandths // 1000}.{thousandths % 1000:03d} %"


def _data(traced: TracedStep) -> dict[str, Any]:
    """Return the JSON: a plan's components, instants, peak and persistent bytes, as traced."""
    trace, replayed, plan = traced.trace, traced.replayed, traced.plan
    sizes = {str(name): size for name, size in trace.peak.components.items()}
    workspaces = 0
    if traced.plan is not None:
        workspaces = library_workspace_bytes(traced.plan.device.gpu, traced.setup.hardware)
    data: dict[str, Any] = {
        "schema": "memplan/trace/1",
        "memplan_version": memplan.__version__,
        "model": traced.title,
        "config": traced.setup.name,
        "stack": stack_data(traced.setup.stack),
        "training": plan.training if plan else resolved_keys(traced.setup),
        "components": [
            {"name": name, "bytes": size}
            for name, size in sorted(sizes.items(), key=lambda item: COMPONENTS.index(item[0]))
        ],
        "instants": [
            {"name": n, "requested_bytes": m.bytes, "operation": m.operation} for n, m in trace.instants.items()
        ],
        "peak": {
            "instant": trace.peak_instant,
            "operation": trace.peak.operation,
            "requested_bytes": trace.peak_bytes,
            "allocated_bytes": replayed.allocated_peak_bytes,
            "reserved_bytes": replayed.reserved_peak_bytes,
            "device_bytes": replayed.reserved_peak_bytes + traced.context_bytes,
        },
        "library_workspace_bytes": workspaces,
        "persistent_bytes": trace.persistent_bytes,
        "host": {"bytes": trace.host_bytes},
        "events": len(trace.events),
        "survives": traced.on_device.survives if traced.on_device else None,
        "retries": traced.on_device.retries if traced.on_device else 0,
        "largest": [tensor_data(s) for s in trace.largest_at_peak(traced.most_listed)],
        "notes": list(trace.notes),
    }
    if plan is not None:
        data["formula"] = {
            "components": [{"name": n, "bytes": b} for n, b in _formula_parts(plan).items()],
            "instants": [{"name": n, "requested_bytes": b} for n, b in plan.instants],
            "peak": {"instant": plan.peak.name, "requested_bytes": plan.requested_bytes},
            "difference_bytes": plan.requested_bytes - trace.peak_bytes,
        }
    return data


def tensor_data(tensor: TracedStorage) -> dict[str, Any]:
    """Return a tensor as JSON has it."""
    return asdict(tensor) | {"shape": list(tensor.shape), "line": model_line(tensor.line)}


def model_line(line: str) -> str:
    """Return a line of the model's code; what was made before the model ran, by memplan itself, has none."""
    return "" if line.startswith(OWN_CODE) else line


# ------------------------------------------------------------------ the picture
def traced_figure(step: TracedStep) -> Figure:
    """Return what is alive over a traced step, by component, with what its GPU has where one was named."""
    trace, device = step.trace, step.device
    lines = {"segments, and context": step.replayed.reserved_peak_bytes + step.context_bytes}
    if device is not None:
        lines["usable"] = device.usable_bytes(step.setup.reserve_bytes)
    title = f"{step.title}, {step.setup.name}, traced{f' for {device.name}' if device else ''}"
    return step_figure(traced_timeline(trace), title, trace.peak_instant, Limits(step.context_bytes, lines))


def traced_timeline(trace: Trace) -> Timeline:
    """Return what is alive over the reported step of a trace."""
    return fullest_columns(STACKED, _moments(trace), COLUMNS, len(trace.events) - trace.steady_from)


def _moments(trace: Trace) -> Iterator[tuple[str, Sequence[int]]]:
    """Yield what the step does and the bytes of each component, after each event; layers are one phase."""
    for index, totals in trace.curve():
        name = trace.events[index].instant
        yield ("layers backward" if name.startswith("layer ") else name), list(totals.values())
