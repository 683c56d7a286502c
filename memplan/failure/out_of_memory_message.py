"""Torch's out-of-memory message, read from whatever it stands in, and which of a few causes the plan of its job gives it."""

import re
from collections.abc import Mapping, Sequence
from typing import Literal

from memplan.catalog.catalog import data_directory
from memplan.catalog.entries import Source
from memplan.catalog.shipped_tables import table_of
from memplan.documents.frozen_values import dataclass
from memplan.errors import CannotAnswerError, InvalidFileError
from memplan.plan.memory_plan import MemoryPlan
from memplan.units import GIB, format_bytes, parse_bytes

Phase = Literal["loading", "forward", "backward", "optimizer step", "evaluation", "unknown"]

_SIZE = r"([0-9]+(?:\.[0-9]+)? ?(?:bytes|[KMGT]iB))"
_TRIED = re.compile(rf"(?:CUDA|HIP|XPU|NPU|MUSA) out of memory\. Tried to allocate {_SIZE}")
_SINCE_2_1 = {
    "capacity": re.compile(rf"has a total capaci?ty of {_SIZE}"),
    "free": re.compile(rf"of which {_SIZE} is free"),
    "own": re.compile(rf"this process has {_SIZE} memory in use"),
    "allowed": re.compile(rf"{_SIZE} allowed"),
    "allocated": re.compile(rf"Of the allocated memory {_SIZE} is allocated by PyTorch"),
    "unallocated": re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated"),
}
_BEFORE_2_1 = re.compile(
    rf"\(GPU \d+; {_SIZE} total capacity; {_SIZE} already allocated; {_SIZE} free; {_SIZE} (?:reserved in total by PyTorch|cached)"
)
_METAL = re.compile(
    r"MPS backend out of memory \(MPS allocated: ([\d.]+ \w+), other allocations: ([\d.]+ \w+), max allowed: ([\d.]+ \w+)\)\. "
    r"Tried to allocate ([\d.]+ \w+)"
)
"""Metal's, whose MB and GB are of 1,024 (aten/src/ATen/mps/MPSAllocator.mm, ``format_size``)."""
_PROCESS = re.compile(rf"Process \d+ has {_SIZE} memory in use")
_STEP = re.compile(r"(?<![\d/.])(\d{1,9})/(\d{1,9}) \[\d")
"""A progress bar's count, as tqdm prints it: ``3/1000 [00:05<27:41``."""

_PHASES: tuple[tuple[Phase, re.Pattern[str]], ...] = (
    (
        "optimizer step",
        re.compile(r"optimizer\.step\(|\bopt\.step\(|_multi_tensor_\w+\(|/torch/optim/|/bitsandbytes/optim/"),
    ),
    ("backward", re.compile(r"\.backward\(|run_backward|_engine_run_backward")),
    ("evaluation", re.compile(r"evaluation_loop|prediction_step|\.evaluate\(")),
    ("loading", re.compile(r"from_pretrained\(|load_state_dict\(|_load_state_dict_into|load_checkpoint")),
    ("forward", re.compile(r"\bforward\(|in forward\b|_call_impl|compute_loss")),
)
"""What a traceback names, the most telling first."""

MAXIMUM_TEXT = 16 * 2**20
_COLOUR = re.compile(r"\x1b\[[0-9;]{0,40}m")


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """What one message says, in bytes; torch prints two decimals."""

    tried: int  # Bytes of the allocation that failed
    capacity: int  # What the device has by CUDA
    free: int  # What no process held
    allocated: int  # What torch had handed out
    unallocated: int  # What torch held besides, in pieces
    own: int | None  # What this process held in all; None where the message does not say
    others: int  # What other processes held
    allowed: int | None  # What the process was allowed, or None
    phase: Phase  # Where in a step the traceback says it was
    step: int | None  # The last step that a progress bar had counted, or None where there is none

    @property
    def needed(self) -> int:
        """Bytes that torch would have handed out had it succeeded."""
        return self.allocated + self.tried

    @property
    def outside(self) -> int:
        """Bytes of this process outside torch's allocator: context, libraries, other frameworks."""
        resident = self.own if self.own is not None else self.capacity - self.free - self.others
        return max(0, resident - self.allocated - self.unallocated)

    @property
    def available(self) -> int:
        """Bytes that torch's allocator could have had on this device, as things stood."""
        most = self.capacity if self.allowed is None else min(self.capacity, self.allowed)
        return max(0, min(most, self.capacity - self.others - self.outside))


def read_message(text: str, where: str) -> OutOfMemory:
    """Return what the last out-of-memory message in a text says.

    Args:
        text: A log, a traceback, or the message alone; line breaks and a terminal's colours within it do not matter.
        where: What errors call it.

    Raises:
        InvalidFileError: There is none, one that is cut off, or one that contradicts itself.
    """
    text = _COLOUR.sub("", text[-MAXIMUM_TEXT:])
    flat = " ".join(text.split())
    matches = list(_TRIED.finditer(flat))
    if not matches:
        if metal := list(_METAL.finditer(flat)):
            return _of_metal(metal[-1], text)
        _refuse_others(text, where)
        raise InvalidFileError(
            [
                f"{where}: no out-of-memory message with torch's figures in it; expected the whole of "
                "'CUDA out of memory. Tried to allocate ...' (--message FILE, or on standard input)"
            ]
        )
    last = matches[-1]
    before, said = text[: text.rfind("out of memory")], flat[last.start() : last.start() + 4000]
    sizes = _sizes(said)
    missing = [name for name in ("capacity", "free", "allocated", "unallocated") if name not in sizes]
    if missing:
        raise InvalidFileError([f"{where}: the message is cut off: it does not say {', '.join(missing)}"])
    own, others = _processes(sizes, [_bytes(size) for size in _PROCESS.findall(said)])
    message = OutOfMemory(
        tried=_bytes(last[1]),
        capacity=sizes["capacity"],
        free=sizes["free"],
        allocated=sizes["allocated"],
        unallocated=sizes["unallocated"],
        own=own,
        others=others,
        allowed=sizes.get("allowed"),
        phase=_phase(before),
        step=_step(before),
    )
    _refuse_contradictions(message, where)
    return message


def _processes(sizes: Mapping[str, int], all_sizes: Sequence[int]) -> tuple[int | None, int]:
    """Return what this process has on the device, where the message says it, and what others have."""
    own, others = sizes.get("own"), sum(all_sizes)
    if own is not None:
        return own, others
    # Before torch 2.2 this process is among them, under a number of its own.
    reserved = sizes["allocated"] + sizes["unallocated"]
    own = min((size for size in all_sizes if size >= reserved), default=None)
    return own, others - (own or 0)


def _refuse_contradictions(message: OutOfMemory, where: str) -> None:
    """Refuse figures that no device can have had; torch's own may exceed the capacity, where a driver pages to the host."""
    if message.capacity <= 0 or message.free > message.capacity:
        free, capacity = format_bytes(message.free), format_bytes(message.capacity)
        raise InvalidFileError([f"{where}: the message contradicts itself: {free} free, of a capacity of {capacity}"])


def _sizes(said: str) -> dict[str, int]:
    """Return the figures of a message, by what they are."""
    old = _BEFORE_2_1.search(said)
    if old is not None:
        capacity, allocated, free, reserved = map(_bytes, old.groups())
        return {"capacity": capacity, "allocated": allocated, "free": free, "unallocated": max(0, reserved - allocated)}
    hits = {name: pattern.search(said) for name, pattern in _SINCE_2_1.items()}
    return {name: _bytes(hit[1]) for name, hit in hits.items() if hit is not None}


def _bytes(size: str) -> int:
    return parse_bytes(size)


def _of_metal(match: re.Match[str], text: str) -> OutOfMemory:
    """Return what Metal's message says: of one pool, which torch's cache and what else the process holds share."""
    allocated, others, allowed, tried = (
        _bytes(size.replace("KB", "KiB").replace("MB", "MiB").replace("GB", "GiB")) for size in match.groups()
    )
    before = text[: text.rfind("out of memory")]
    free, own = max(0, allowed - allocated - others), allocated + others
    return OutOfMemory(tried, allowed, free, allocated, 0, own, 0, None, _phase(before), _step(before))


@dataclass(frozen=True, slots=True)
class Wording:
    """An out-of-memory message that has none of torch's figures."""

    pattern: str  # A regular expression
    text: str  # What is said of it; {0} is its first group
    sources: tuple[Source, ...]


def _refuse_others(text: str, where: str) -> None:
    """Say of the messages of other programs what they mean.

    Raises:
        CannotAnswerError: There is one.
    """
    for wording in table_of(data_directory(), "wordings", Wording).values():
        match = re.search(wording.pattern, text)
        if match:
            raise CannotAnswerError(f"{where}: {wording.text.format(*match.groups())}")


def _step(before: str) -> int | None:
    """Return the last step that a progress bar counted before a message."""
    steps = [int(count) for count, total in _STEP.findall(before) if int(count) <= int(total)]
    return steps[-1] if steps else None


def _phase(before: str) -> Phase:
    traceback = before[before.rfind("Traceback") :] if "Traceback" in before else ""
    return next((phase for phase, pattern in _PHASES if pattern.search(traceback)), "unknown")


def capacity_text(message: OutOfMemory) -> str:
    """Return the device's capacity as ``--gpu-memory`` takes it."""
    return f"{message.capacity / GIB:.2f}GiB"


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
    during = [(name, size) for name, size in instants if _phase_of(name) == message.phase] or instants
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


def _phase_of(instant: str) -> str:
    """Return which part of a step an instant of a plan belongs to, as tracebacks tell them apart."""
    if instant in ("forward", "evaluation", "optimizer step"):
        return instant
    return "backward" if "backward" in instant else ""


def _states_missing(message: OutOfMemory, plan: MemoryPlan) -> int:
    """Return the optimizer states that are not there yet: they are made in the first optimizer step."""
    if message.step != 0 or message.phase == "optimizer step":
        return 0
    return sum(line.bytes for line in plan.components if line.name == "optimizer_states")
