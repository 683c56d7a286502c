"""What is asked of a dry run, and what comes of it; both pass between two processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from memplan.trace.recording.trace_result import Trace

Ending = Literal["done", "ended", "failed", "refused"]


@dataclass(frozen=True, slots=True)
class Card:
    """The pretended GPU."""

    name: str  # As the driver calls it
    compute_capability: str  # Such as ``9.0``
    total_bytes: int  # As CUDA reports it
    capacity_bytes: int  # What torch's allocator can have of it


GPUS_PER_NODE = 8
"""GPUs of a machine, where a script runs on more."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """The processes of a job that runs on several GPUs, of which one runs here."""

    count: int  # How many there are
    rank: int = 0  # Number of the one that runs

    @property
    def per_node(self) -> int:
        """Processes of a machine."""
        return min(self.count, GPUS_PER_NODE)

    @property
    def local_rank(self) -> int:
        """Number of the GPU on its machine."""
        return self.rank % self.per_node

    @property
    def environment(self) -> dict[str, str]:
        """Variables that ``torchrun`` sets (torch/distributed/elastic/agent/server/local_elastic_agent.py, v2.13.0)."""
        numbers = {
            "RANK": self.rank,
            "LOCAL_RANK": self.local_rank,
            "GROUP_RANK": self.rank // self.per_node,
            "ROLE_RANK": self.rank,
            "WORLD_SIZE": self.count,
            "LOCAL_WORLD_SIZE": self.per_node,
            "GROUP_WORLD_SIZE": -(-self.count // self.per_node),
            "ROLE_WORLD_SIZE": self.count,
            "MASTER_PORT": 29500,
            "TORCHELASTIC_MAX_RESTARTS": 0,
            "TORCHELASTIC_RESTART_COUNT": 0,
        }
        return {"MASTER_ADDR": "localhost", **{name: str(number) for name, number in numbers.items()}}


@dataclass(frozen=True, slots=True)
class Request:
    """A script to run."""

    script: str  # Path of the script, or the name of a module
    card: Card  # The GPU that it is to find
    arguments: tuple[str, ...] = ()  # What follows it
    is_module: bool = False  # Whether it is a module, as ``python -m`` takes it
    steps: int = 3  # Training steps to take
    timeout: float = 600.0  # Seconds
    worst: bool = False  # Whether masks hold everything, and all tokens go to the same experts
    allow_writes: bool = False  # Whether files that the script writes are written
    kernels: Literal["cuda", "cpu"] = "cuda"  # Whether operators run as CUDA's, or as those of torch's CPU build
    alloc_conf: str = ""  # As ``PYTORCH_CUDA_ALLOC_CONF``
    ranks: Ranks | None = None  # The processes of a job on several GPUs, or nothing for a script that joins no group
    # Tokens of the rows that data loaders give in the place of their own, or nothing for their own.
    synthetic: int | None = None
    scratch: str = ""  # Folder for what the script writes
    steady: bool = False  # Whether the last step is reported, and not the one that needs most, which may be the first


@dataclass(frozen=True, slots=True)
class RunsOut:
    """Where a script would run out of memory."""

    step: int  # Number of the step, from 1; 0 before the first
    instant: str  # Part of the step
    operation: str  # Operator whose request fails
    line: str  # Of the script, as ``folder/file:line``
    requested_bytes: int  # What it requests
    message: str  # What torch would say


@dataclass(frozen=True, slots=True)
class CalledJob:
    """What a trainer that a script calls runs."""

    words: tuple[str, ...]  # A command that would start the same, the model aside
    model: str  # The model's ``config.json``
    tokens: int  # Of the longest row


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a dry run."""

    ending: Ending  # Whether it took its steps, ended by itself before, failed by a fault of its own, or was stopped
    message: str = ""  # Why it failed or was stopped
    trace: Trace | None = None  # The step that needs most, or nothing where none was taken
    reported_step: int = 0  # Number of that step; 0 for what comes before the first
    steps: int = 0  # Steps that were taken
    persistent_bytes: int = 0  # Weights, gradients kept and optimizer states of the last step
    model: str = ""  # Class of the first module that was called
    runs_out: RunsOut | None = None  # Where memory ends, or nothing
    handled: tuple[RunsOut, ...] = ()  # Where it ends and the script goes on by its own handler
    answers: tuple[Answer, ...] = ()  # Values that were asked for and are not known
    skipped: tuple[tuple[str, int], ...] = ()  # What was not written, as (file, bytes)
    seconds: float = 0.0  # What it took
    peaks: tuple[int, ...] = ()  # Peak of what comes before the first step, and of every step
    notes: tuple[str, ...] = ()  # What stood for a library or a compiler, and what is not known of it
    told: CalledJob | None = None  # The job of a trainer that is known, or nothing


@dataclass(frozen=True, slots=True)
class Answer:
    """A value that a script asked for and nobody knows."""

    line: str  # Of the script, as ``folder/file:line``
    question: str  # What was asked
    value: str  # What it was told first


class StepsDoneError(BaseException):
    """Ends a script that has taken the steps that it was to take; no handler of exceptions is to hold it."""


class RefusedError(BaseException):
    """Ends a script that does what cannot be pretended."""
