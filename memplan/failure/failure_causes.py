"""Which of a few causes an out-of-memory error has, and what the plan of the job says to it."""

from typing import Literal

from memplan.documents.frozen_values import dataclass
from memplan.failure.out_of_memory_message import OutOfMemory
from memplan.plan.memory_plan import MemoryPlan

Cause = Literal["one allocation", "other processes", "fragmentation", "a limit", "the job"]

PRINTED_GRAIN = 2**30 // 200
"""Torch prints GiB with two decimals, so that each figure may be off by half of a hundredth."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Why a run was out of memory."""

    message: OutOfMemory  # What torch said
    cause: Cause  # What kept the allocation from succeeding
    short: int  # Bytes that were missing
    plan: MemoryPlan | None = None  # The plan of the job, or None where none was named
    instant: str = ""  # The instant of the plan that comes to what torch needed, or nothing
    beyond: int = 0  # Bytes that the run needed beyond the plan's peak; 0 where the plan accounts for it
    states_missing: int = 0  # Optimizer states that the plan counts and the run had not made yet


def diagnose(message: OutOfMemory, plan: MemoryPlan | None) -> Diagnosis:
    """Return why a run was out of memory.

    Args:
        plan: The plan of its job on the same device, if there is one.
    """
    cause, short = _cause(message), max(0, message.tried - message.free)
    if plan is None:
        return Diagnosis(message, cause, short)
    instants = _instants(plan)
    missing = _states_missing(message, plan)
    needed = message.needed + missing - 2 * PRINTED_GRAIN
    during = [(name, size) for name, size in instants if _phase(name) == message.phase] or instants
    return Diagnosis(
        message=message,
        cause=cause,
        short=short,
        plan=plan,
        instant=next((name for name, size in during if size >= needed), ""),
        beyond=max(0, needed - max(size for _, size in instants)),
        states_missing=missing,
    )


def _cause(message: OutOfMemory) -> Cause:
    """Return what kept the allocation from succeeding, the simplest first."""
    if message.tried > message.capacity - message.outside:
        return "one allocation"
    if message.allowed is not None and message.tried <= message.free:
        return "a limit"
    if message.tried <= message.free + message.unallocated:
        return "fragmentation"
    if message.others and message.tried <= message.free + message.unallocated + message.others:
        return "other processes"
    return "the job"


def _instants(plan: MemoryPlan) -> list[tuple[str, int]]:
    """Return the plan's instants in the order of a step, each with what the allocator has handed out by then."""
    besides = plan.allocated_bytes - plan.requested_bytes
    return [(name, size + besides) for name, size in plan.instants]


def _phase(instant: str) -> str:
    """Return which part of a step an instant of a plan belongs to, as tracebacks tell them apart."""
    if instant in ("forward", "evaluation", "optimizer step"):
        return instant
    return "backward" if "backward" in instant else ""


def _states_missing(message: OutOfMemory, plan: MemoryPlan) -> int:
    """Return the optimizer states that are not there yet: they are made in the first optimizer step."""
    if message.step != 0 or message.phase == "optimizer step":
        return 0
    return sum(line.bytes for line in plan.components if line.name == "optimizer_states")
