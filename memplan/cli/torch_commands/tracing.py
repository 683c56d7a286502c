"""What ``memplan trace`` does: trace, replay through the allocator, and set the formula beside it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import memplan
from memplan.catalog.catalog import Catalog
from memplan.documents.escaping import json_text
from memplan.documents.writing import say, write_file
from memplan.errors import CannotAnswerError, InvalidFileError
from memplan.library.lookup import Overrides, Shapes, find_device, find_model, find_setup
from memplan.plan.allowances import context_bytes, library_workspace_bytes
from memplan.plan.components import COMPONENTS
from memplan.plan.memory_plan import Device, MemoryPlan
from memplan.plan.planner import CompiledPlan
from memplan.report.document import Block, Document, Table
from memplan.training.resolved_keys import resolved_keys
from memplan.units import format_bytes

if TYPE_CHECKING:
    from memplan.allocator.results import AllocatorResult
    from memplan.trace.recording.trace_result import Trace
    from memplan.training.resolved import TrainingSetup

STEPS = 3
"""Steps of the reference model: on an H200 the allocator's segments grew by up to 4 % in the third, and not after."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """What was asked for on the command line."""

    model: str | None
    shapes: Shapes
    hf: Path | None
    module: str | None
    history: Path | None
    config: str
    overrides: Overrides
    gpu: str | None
    gpu_memory: str | None
    alloc_conf: str
    timeline: Path | None
    largest: int
    quiet: bool


@dataclass(frozen=True, slots=True)
class _Traced:
    """A trace, the allocator's replay of it, and the formula's answer where there is one."""

    title: str
    trace: Trace
    setup: TrainingSetup
    replayed: AllocatorResult
    on_device: AllocatorResult | None
    plan: MemoryPlan | None
    device: Device | None
    context_bytes: int


def trace_document(request: TraceRequest, catalog: Catalog, unit: str) -> Document:
    """Return the answer of ``memplan trace``.

    Raises:
        CannotAnswerError: torch is missing, or something cannot be traced.
        InvalidFileError: More than one thing to trace, or a file that cannot be read or written.
    """
    chosen = [v for v in (request.model, request.hf, request.module, request.history) if v is not None]
    if len(chosen) > 1 or (chosen and request.shapes.given()):
        raise InvalidFileError(
            ["give one thing to trace: MODEL, shapes, --hf DIR, --module PKG.MOD:FACTORY or --history FILE"]
        )
    if request.history is not None:
        return _history_document(request.history, request.alloc_conf, unit)
    _require_torch()
    if request.timeline is not None and request.timeline.suffix not in (".svg", ".json"):
        raise InvalidFileError([f"--timeline {request.timeline}: expected a name that ends in .svg or .json"])
    traced = _traced(request, catalog)
    if request.timeline is not None:
        _write_timeline(traced, request.timeline)
    return _document(traced, request, unit)


def _require_torch() -> None:
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise CannotAnswerError("tracing needs torch, which is not installed: pip install 'memplan[torch]'")


def _note(request: TraceRequest, text: str) -> None:
    if not request.quiet:
        say(text)


def _traced(request: TraceRequest, catalog: Catalog) -> _Traced:
    overrides = request.overrides
    if request.hf is not None and not any(setting.startswith("kernels") for setting in overrides.settings):
        overrides = replace(overrides, settings=("kernels.preset=hf-transformers", *overrides.settings))
    device = None
    if request.gpu is not None or request.gpu_memory is not None:
        device = find_device(request.gpu, request.gpu_memory, 1, catalog)
    capability = (device.gpu.compute_capability if device else None) or "9.0"
    model = None
    if request.module is None:
        source = str(request.hf) if request.hf is not None else request.model
        try:
            model = find_model(source, request.shapes, catalog)
        except CannotAnswerError:
            if request.hf is None:
                raise
    setup = find_setup(request.config, overrides, catalog, model)
    if setup.config.parallel.data > 1 and (request.module is not None or request.hf is not None):
        raise CannotAnswerError(
            "parallel.data: several GPUs are traced with models of the catalog only, not with --hf or --module"
        )
    _note(request, "loading torch")
    if request.module is not None:
        from memplan.trace.modules import trace_module

        _note(request, f"tracing {request.module}")
        sys.path.insert(0, "")
        trace, title = trace_module(request.module, setup), request.module
    elif request.hf is not None:
        from memplan.trace.modules import trace_huggingface

        _note(request, f"tracing transformers' implementation of {request.hf}")
        trace, title = trace_huggingface(request.hf, setup), f"transformers' implementation of {request.hf}"
    else:
        from memplan.trace.tracer import trace_training

        assert model is not None
        _note(request, f"tracing {STEPS} steps of {model.spec.name}")
        trace, title = trace_training(model, setup, compute_capability=capability, steps=STEPS), model.spec.name
    _note(request, f"replaying {len(trace.events):,} events through the allocator")
    against = device or Device(catalog.gpus["h100-sxm-80gb"], "h100-sxm-80gb")
    plan = CompiledPlan(model, setup).evaluate(against) if model is not None else None
    alloc_conf = request.alloc_conf or ("expandable_segments:True" if setup.config.allocator == "expandable" else "")
    replayed = _replayed(trace, alloc_conf, None)
    on_device = None
    if device is not None:
        capacity = max(0, device.usable_bytes(setup.reserve_bytes) - context_bytes(device.gpu))
        on_device = _replayed(trace, alloc_conf, capacity)
    return _Traced(title, trace, setup, replayed, on_device, plan, device, context_bytes(against.gpu))


def _replayed(trace: Trace, alloc_conf: str, capacity: int | None) -> AllocatorResult:
    """Return what the allocator does with the trace, with so many bytes to be had, or without a limit."""
    from memplan.allocator.caching_allocator import replay
    from memplan.allocator.settings import parse_alloc_conf

    events = ((1 if event.allocates else -1, event.storage, event.bytes) for event in trace.events)
    return replay(events, parse_alloc_conf(alloc_conf), capacity)


def _write_timeline(traced: _Traced, path: Path) -> None:
    from memplan.trace.recording.timeline import timeline_json, timeline_svg

    svg = path.suffix == ".svg"
    title = f"{traced.title}, {traced.setup.name}"
    text = timeline_svg(traced.trace, title) if svg else json_text(timeline_json(traced.trace), indent=1)
    write_file(path, text)


# ------------------------------------------------------------------ the document
def _formula_parts(plan: MemoryPlan) -> dict[str, int]:
    """Return the requested components of a plan at its peak."""
    outside = ("library_workspaces", "allocator_reserve", "device_context", "nccl_buffers")
    return {c.name: c.bytes for c in plan.components if c.name not in outside}


def _document(traced: _Traced, request: TraceRequest, unit: str) -> Document:
    trace, plan = traced.trace, traced.plan
    formula = _formula_parts(plan) if plan else {}
    blocks: list[Block] = [_heading(traced)]
    blocks.append(_component_table(trace, formula, unit))
    blocks.append(_instant_table(trace, plan, unit))
    blocks.append(_totals_table(traced, unit))
    if request.largest:
        blocks.append(_largest_table(trace, request.largest, unit))
    if trace.notes:
        blocks.append(tuple(f"Note: {note}" for note in trace.notes))
    blocks.append(_sentence(traced))
    fails = traced.on_device is not None and not traced.on_device.survives
    return Document(_data(traced, request), tuple(blocks), 1 if fails else 0)


def _heading(traced: _Traced) -> tuple[str, str]:
    config = traced.setup.config
    of = f" of one GPU of {config.parallel.data}" if config.parallel.data > 1 else ""
    return (
        f"{traced.title}, {traced.setup.name}: one steady-state step{of}, traced on tensors without memory",
        f"micro-batch {config.micro_batch_size}, sequence {config.sequence_length}, accumulation "
        f"{config.gradient_accumulation_steps}, checkpointing {config.activation_checkpointing}",
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


def _totals_table(traced: _Traced, unit: str) -> Table:
    replayed = traced.replayed
    rows = [
        (
            "requested",
            format_bytes(traced.trace.peak_bytes, unit),
            "live tensors, and what kernels allocate inside themselves",
        ),
        (
            "allocated",
            format_bytes(replayed.allocated_peak_bytes, unit),
            "in blocks, with library workspaces (simulated)",
        ),
        (
            "reserved",
            format_bytes(replayed.reserved_peak_bytes, unit),
            f"in {replayed.segments:,} segments (simulated)",
        ),
        ("device", format_bytes(replayed.reserved_peak_bytes + traced.context_bytes, unit), "with the CUDA context"),
    ]
    if traced.setup.offloads_states:
        rows.append(("host", format_bytes(traced.trace.host_bytes, unit), "optimizer states in pinned host memory"))
    return Table(("total", ">bytes", "meaning"), tuple(rows))


def _largest_table(trace: Trace, count: int, unit: str) -> Table:
    rows = tuple(
        (
            format_bytes(s.bytes, unit),
            s.component,
            "x".join(map(str, s.shape)),
            s.name or s.operation,
            s.line or s.instant,
        )
        for s in trace.largest_at_peak(count)
    )
    return Table((">bytes", "component", "shape", "made by", "where"), rows, "Largest tensors alive at the peak")


def _place(line: str) -> str:
    """Return a line of model code; what the command itself set up has none."""
    return "" if line.startswith("cli/") else line


def _sentence(traced: _Traced) -> str:
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


def _data(traced: _Traced, request: TraceRequest) -> dict[str, Any]:
    """Return the JSON: a plan's components, instants, peak and persistent bytes, as traced."""
    trace, replayed, plan = traced.trace, traced.replayed, traced.plan
    found = {str(name): size for name, size in trace.peak.components.items()}
    workspaces = 0
    if traced.plan is not None:
        workspaces = library_workspace_bytes(traced.plan.device.gpu)
    data: dict[str, Any] = {
        "schema": "memplan/trace/1",
        "memplan_version": memplan.__version__,
        "model": traced.title,
        "config": traced.setup.name,
        "training": plan.training if plan else resolved_keys(traced.setup),
        "components": [
            {"name": name, "bytes": size}
            for name, size in sorted(found.items(), key=lambda item: COMPONENTS.index(item[0]))
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
        "largest": [asdict(s) | {"shape": list(s.shape)} for s in trace.largest_at_peak(request.largest)],
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


# ------------------------------------------------------------------ memory histories
def _history_document(path: Path, alloc_conf: str, unit: str) -> Document:
    """Return how far the simulated allocator follows a real run's memory history."""
    from memplan.allocator.history_comparison import compare_history
    from memplan.allocator.memory_history import load_history
    from memplan.allocator.settings import parse_alloc_conf

    history = load_history(path)
    result = compare_history(history, parse_alloc_conf(alloc_conf or history.alloc_conf))
    rows = (
        ("reserved peak", result.measured_reserved_peak_bytes, result.simulated.reserved_peak_bytes),
        ("reserved at the end", result.measured_reserved_bytes, result.simulated_reserved_bytes),
        ("allocated at the end", result.measured_allocated_bytes, result.simulated_allocated_bytes),
    )
    table = Table(
        ("figure", ">measured", ">simulated", ">difference"),
        tuple(
            (n, format_bytes(m, unit), format_bytes(s, unit), f"{s - m:+,} B" if s != m else "0") for n, m, s in rows
        ),
    )
    first = result.first_difference
    text = f"{result.allocations:,} allocations replayed, {result.differences:,} events differ"
    if first is not None:
        text += f"; the first is event {first.index} ({first.event}): measured {first.measured}, simulated {first.simulated}"
    data = {
        "schema": "memplan/history/1",
        **asdict(result),
        "agrees": result.differences == 0,
    }
    return Document(data, (f"Memory history {path}", table, text + "."), 0 if result.differences == 0 else 1)
