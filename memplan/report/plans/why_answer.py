"""The answer of ``memplan why``: what an out-of-memory message says, and what to change."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memplan.failure.out_of_memory_message import Diagnosis
from memplan.report.document import Document, Table
from memplan.report.plans.plan_answer import stack_data, stack_words, suggestions_table
from memplan.units import format_bytes

if TYPE_CHECKING:
    from memplan.plan.memory_plan import MemoryPlan

EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


def why_document(diagnosis: Diagnosis, unit: str) -> Document:
    """Return why a run was out of memory: the cause and what to do first, then the figures."""
    plan = diagnosis.plan
    answer = f"{_cause(diagnosis, unit)} {_advice(diagnosis)}"
    blocks: list[Any] = [answer, _head(diagnosis), _figures(diagnosis, unit)]
    if plan is not None:
        blocks += [_instants(diagnosis, plan, unit), _against_plan(diagnosis, plan, unit)]
        if plan.suggestions and diagnosis.cause != "fragmentation":
            blocks.append(suggestions_table(plan.suggestions, plan.usable_bytes, unit))
    return Document(_data(diagnosis, answer), tuple(block for block in blocks if block))


def _head(diagnosis: Diagnosis) -> str:
    message = diagnosis.message
    places = {"unknown": "", "loading": " while loading", "optimizer step": " in the optimizer step"}
    where = places.get(message.phase, f" in {message.phase}")
    when = "" if message.step is None else f", after {message.step:,} steps" if message.step else ", in the first step"
    stack = "" if diagnosis.plan is None else f"; planned for {stack_words([diagnosis.plan.setup])}"
    return f"Out of memory{where}{when}{stack}"


def _figures(diagnosis: Diagnosis, unit: str) -> Table:
    message = diagnosis.message
    rows = [
        ("tried to allocate", message.tried, "what failed"),
        ("allocated", message.allocated, "in use by tensors and kernels"),
        ("reserved, unallocated", message.unallocated, "cached by torch, in pieces"),
        ("outside torch", message.outside, "CUDA context and other libraries of this process"),
        ("other processes", message.others, "on the same GPU"),
        ("free", message.free, "taken by nobody"),
        ("capacity", message.capacity, "of the GPU, as CUDA has it"),
    ]
    if message.allowed is not None:
        rows.append(("allowed", message.allowed, "for this process"))
    return Table(
        ("figure", ">bytes", "meaning"), tuple((name, format_bytes(size, unit), what) for name, size, what in rows)
    )


def _instants(diagnosis: Diagnosis, plan: MemoryPlan, unit: str) -> Table:
    besides = plan.allocated_bytes - plan.requested_bytes
    room = diagnosis.message.available
    rows = []
    for name, size in plan.instants:
        marks = ["peak"] if name == plan.peak.name else []
        marks += ["more than torch could have"] if size + besides > room else []
        marks += ["where it likely ran out"] if name == diagnosis.instant else []
        rows.append((name, format_bytes(size + besides, unit), ", ".join(marks)))
    return Table(("instant of the plan", ">allocated", ""), tuple(rows))


def _against_plan(diagnosis: Diagnosis, plan: MemoryPlan, unit: str) -> str:
    """Return how the run's need compares with the plan's, in a sentence."""
    message = diagnosis.message
    needed, peak = format_bytes(message.needed, unit), format_bytes(plan.allocated_bytes, unit)
    if diagnosis.states_missing:
        states = format_bytes(diagnosis.states_missing, unit)
        return (
            f"The run needed {needed} then, and the plan {peak} at its peak; the optimizer states of {states} were not there "
            "yet, since the first optimizer step makes them: cure this failure alone, and the next is there."
        )
    if diagnosis.beyond:
        return (
            f"The run needed {needed} then, {format_bytes(diagnosis.beyond, unit)} beyond the plan's peak of {peak}: it does "
            "something that this config does not say. Look for a larger batch or a longer sequence, another stack (--stack), "
            "checkpointing that is off, a second model, evaluation with its logits kept, or tensors that outlive their step."
        )
    return f"The run needed {needed} then; the plan of the job comes to {peak} at its peak ({plan.peak.name})."


def _cause(diagnosis: Diagnosis, unit: str) -> str:
    message, short = diagnosis.message, format_bytes(diagnosis.short, unit)
    tried, pieces = format_bytes(message.tried, unit), format_bytes(message.unallocated, unit)
    return {
        "one allocation": f"ONE ALLOCATION: a single tensor of {tried} is more than this process could ever have here.",
        "a limit": f"A LIMIT: {tried} were free, but the process is allowed {format_bytes(message.allowed or 0, unit)}.",
        "fragmentation": (
            f"FRAGMENTATION: torch held {pieces} unused and {format_bytes(message.free, unit)} of the GPU were free, together "
            f"enough for {tried}, but in no one piece."
        ),
        "other processes": (
            f"OTHER PROCESSES: they held {format_bytes(message.others, unit)}, and {short} were missing; alone on the GPU "
            "the allocation would have succeeded."
        ),
        "the job": f"THE JOB: it needs more than this GPU has; {short} were missing at that moment, and more may be at its peak.",
    }[diagnosis.cause]


def _advice(diagnosis: Diagnosis) -> str:
    """Return what to do first."""
    cause, plan = diagnosis.cause, diagnosis.plan
    if cause == "fragmentation":
        return f"Set the environment variable {EXPANDABLE}; if that is not enough, the job is too close to the card's limit."
    if cause == "other processes":
        return "End them (nvidia-smi lists them), or keep their share free in the plan: --set 'reserve=SIZE'."
    if cause == "a limit":
        return "Raise it (torch.cuda.set_per_process_memory_fraction), or plan with --gpu-memory and the allowed size."
    if plan is None:
        return (
            "Name the job to see at which instant and what to change: memplan why MODEL --config CONFIG --message FILE"
        )
    if plan.suggestions:
        first = plan.suggestions[0]
        return f"First change: {first.change} (saves {format_bytes(first.saves_bytes)}; cost: {first.cost})."
    if plan.verdict == "no":
        return "No single change makes the plan fit: memplan suggest searches combinations."
    return "By the plan it fits; what the run does besides has to be found first."


def _data(diagnosis: Diagnosis, answer: str) -> dict[str, Any]:
    message, plan = diagnosis.message, diagnosis.plan
    return {
        "schema": "memplan/why/1",
        "answer": answer,
        "cause": diagnosis.cause,
        "phase": message.phase,
        "step": message.step,
        "tried_bytes": message.tried,
        "allocated_bytes": message.allocated,
        "unallocated_bytes": message.unallocated,
        "outside_bytes": message.outside,
        "other_processes_bytes": message.others,
        "free_bytes": message.free,
        "capacity_bytes": message.capacity,
        "allowed_bytes": message.allowed,
        "short_bytes": diagnosis.short,
        "plan": None
        if plan is None
        else {
            "stack": stack_data(plan.setup.stack),
            "verdict": plan.verdict,
            "allocated_bytes": plan.allocated_bytes,
            "peak_instant": plan.peak.name,
            "instant": diagnosis.instant or None,
            "beyond_bytes": diagnosis.beyond,
            "states_missing_bytes": diagnosis.states_missing,
            "changes": [suggestion.change for suggestion in plan.suggestions],
        },
    }
