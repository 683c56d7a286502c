"""What is asked of a dry run, and what comes of it; both pass between two processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from memplan.dryrun.terms.answers_given import Answer
from memplan.trace.recording.trace_result import Trace

Ending = Literal["done", "ended", "failed", "refused"]


@dataclass(frozen=True, slots=True)
class Card:
    """The pretended GPU.

    Attributes:
        name: As the driver calls it.
        compute_capability: Such as ``9.0``.
        total_bytes: As CUDA reports it.
        capacity_bytes: What torch's allocator can have of it.
    """

    name: str
    compute_capability: str
    total_bytes: int
    capacity_bytes: int


GPUS_PER_NODE = 8
"""GPUs of a machine, where a script runs on more."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """The processes of a job that runs on several GPUs, of which one runs here.

    Attributes:
        count: How many there are.
        rank: Number of the one that runs.
    """

    count: int
    rank: int = 0

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
    """A script to run.

    Attributes:
        script: Path of the script, or the name of a module.
        is_module: Whether it is a module, as ``python -m`` takes it.
        arguments: What follows it.
        card: The GPU that it is to find.
        steps: Training steps to take.
        timeout: Seconds.
        worst: Whether masks hold everything, and all tokens go to the same experts.
        allow_writes: Whether files that the script writes are written.
        kernels: Whether operators run as CUDA's, or as those of torch's CPU build.
        alloc_conf: As ``PYTORCH_CUDA_ALLOC_CONF``.
        ranks: The processes of a job on several GPUs, or nothing for a script that joins no group.
        synthetic: Tokens of the rows that data loaders give in the place of their own, or nothing for their own.
        scratch: Folder for what the script writes.
        steady: Whether the last step is reported, and not the one that needs most, which may be the first.
    """

    script: str
    card: Card
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    steps: int = 3
    timeout: float = 600.0
    worst: bool = False
    allow_writes: bool = False
    kernels: Literal["cuda", "cpu"] = "cuda"
    alloc_conf: str = ""
    ranks: Ranks | None = None
    synthetic: int | None = None
    scratch: str = ""
    steady: bool = False


@dataclass(frozen=True, slots=True)
class RunsOut:
    """Where a script would run out of memory.

    Attributes:
        step: Number of the step, from 1; 0 before the first.
        instant: Part of the step.
        operation: Operator whose request fails.
        line: Of the script, as ``folder/file:line``.
        requested_bytes: What it requests.
        message: What torch would say.
    """

    step: int
    instant: str
    operation: str
    line: str
    requested_bytes: int
    message: str


@dataclass(frozen=True, slots=True)
class ToldJob:
    """What a trainer that a script calls runs.

    Attributes:
        words: A command that would start the same, the model aside.
        model: The model's ``config.json``.
        tokens: Of the longest row.
    """

    words: tuple[str, ...]
    model: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a dry run.

    Attributes:
        ending: Whether it took its steps, ended by itself before, failed by a fault of its own, or was stopped.
        message: Why it failed or was stopped.
        trace: The step that needs most, or nothing where none was taken.
        reported_step: Number of that step; 0 for what comes before the first.
        steps: Steps that were taken.
        persistent_bytes: Weights, gradients kept and optimizer states of the last step.
        model: Class of the first module that was called.
        runs_out: Where memory ends, or nothing.
        answers: Values that were asked for and are not known.
        skipped: What was not written, as (file, bytes).
        seconds: What it took.
        peaks: Peak of what comes before the first step, and of every step.
        notes: What stood for a library or a compiler, and what is not known of it.
        told: The job of a trainer that is known, or nothing.
    """

    ending: Ending
    message: str = ""
    trace: Trace | None = None
    reported_step: int = 0
    steps: int = 0
    persistent_bytes: int = 0
    model: str = ""
    runs_out: RunsOut | None = None
    answers: tuple[Answer, ...] = ()
    skipped: tuple[tuple[str, int], ...] = ()
    seconds: float = 0.0
    peaks: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    told: ToldJob | None = None
