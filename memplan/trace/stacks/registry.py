"""The stacks whose own code can be traced, what their programs are given and offer, and the tracing of one."""

from __future__ import annotations

import logging
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from memplan.catalog.stacks import Stack
from memplan.errors import CannotAnswerError, MemplanError
from memplan.model.model import Model
from memplan.step.states.parallel_shards import is_sharded, runs_engine
from memplan.trace.recording.assembly import assembled
from memplan.trace.recording.recorder import Recorder
from memplan.trace.recording.trace_result import Trace
from memplan.trace.recording.workspaces import cublas_workspace_bytes
from memplan.training.resolved import TrainingSetup
from memplan.training.second_models import as_it_runs

AttentionImplementation = Literal["sdpa", "eager", "flash_attention_2"]
"""What transformers calls the ways in which attention can run."""

STEPS = 3
"""Steps of a program: the first makes what stays, the second what a loop still has names for, the third is reported."""


@dataclass(frozen=True, slots=True)
class StackDetails:
    """Settings of a stack's own that a training setup has no key for."""

    attention: AttentionImplementation = "sdpa"  # How attention runs; ``sdpa`` is torch's choice on the card
    reentrant: bool = False  # Whether layers are computed again by the older, reentrant kind of checkpointing
    adapter_dropout: float = 0.0  # Probability of dropout in front of adapters
    modules_to_save: tuple[str, ...] = ()  # Modules beside the adapters that are trained whole
    rank: int = 0  # Which of several ranks is traced, where they differ


def details_of(setup: TrainingSetup) -> StackDetails:
    """Return what a setup's stack says of itself."""
    attention: AttentionImplementation = "eager" if setup.profile.attention == "eager" else "sdpa"
    if setup.runs_flash_attn:
        attention = "flash_attention_2"
    adapter = setup.config.adapter
    dropout = 0.0 if adapter is None else adapter.dropout or 0.0
    modules = () if adapter is None else adapter.modules_to_save
    reentrant = setup.stack.checkpointing.reentrant
    return StackDetails(attention, reentrant, dropout, modules_to_save=modules)


@dataclass(frozen=True, slots=True)
class StackInputs:
    """A job for a stack."""

    model: Model  # The model, as memplan knows it
    keys: Mapping[str, Any]  # The same model, as the keys of its ``config.json``, ``model_type`` among them
    setup: TrainingSetup  # How it is trained
    compute_capability: str = "9.0"  # Of the card whose kernels are chosen, such as ``8.6``
    details: StackDetails = StackDetails()  # What the setup does not say
    device: str = "meta"  # What it runs on: ``meta`` in a trace, else a device on which it really trains
    card_bytes: int = 0  # Memory of the card, by which some code chooses; 0 where nothing says which card it is
    # Those of the ``config.json`` of each model of its own beside the one that is trained, by what it is.
    second_keys: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def is_traced(self) -> bool:
        """Whether tensors have no memory."""
        return self.device == "meta"

    def beside(self, role: str) -> StackInputs:
        """Return the same for a model beside the one that is trained, which is loaded as any model is."""
        second = self.setup.seconds[role]
        setup = as_it_runs(second.setup)
        return replace(self, model=second.model, keys=self.second_keys[role], setup=setup, details=details_of(setup))


class StackProgram(Protocol):
    """A module of this folder, or of one in here: how one library trains."""

    PACKAGES: tuple[str, ...]  # Packages that it imports, by the names that they are installed under

    def run(self, inputs: StackInputs, recorder: Recorder) -> StackRun:
        """Build the job and run ``STEPS`` steps of it, told to ``recorder``, the last of which is reported.

        Raises:
            CannotAnswerError: The library cannot do what the setup asks for.
        """


@dataclass(frozen=True, slots=True)
class StackRun:
    """What a program says of the job that it ran."""

    title: str  # What was run, in words
    vocab_size: int  # Width of tensors that count as logits
    notes: tuple[str, ...] = ()  # What is left out or assumed, one sentence each


PROGRAMS: Mapping[str, str] = {
    "plain-loop": "memplan.trace.stacks.huggingface.plain_loop",
    "transformers": "memplan.trace.stacks.huggingface.trainer_loop",
    "sentence-transformers": "memplan.trace.stacks.own_trainers.sentence_loop",
    "trl": "memplan.trace.stacks.huggingface.sft_loop",
    "axolotl": "memplan.trace.stacks.huggingface.axolotl_loop",
    "torchtitan": "memplan.trace.stacks.titan.torchtitan_trainer",
    "torchtune": "memplan.trace.stacks.torchtune_recipe",
    "litgpt": "memplan.trace.stacks.litgpt_finetune",
    "llama-factory": "memplan.trace.stacks.huggingface.llamafactory_loop",
    "llama-factory-v1": "memplan.trace.stacks.own_trainers.v1_trainer",
    "ms-swift": "memplan.trace.stacks.own_trainers.swift_trainers",
    "nanochat": "memplan.trace.stacks.nanochat_train",
    "nanogpt": "memplan.trace.stacks.nanogpt_train",
}
"""Stack -> the module of its program (:class:`memplan.trace.stacks.registry.StackProgram`)."""

OLDER: Mapping[str, tuple[str, str]] = {"torchtitan": ("0.3", "memplan.trace.stacks.titan.torchtitan_older")}
"""Stack -> the version from which on its program is the one above, and that of the versions before."""

ON_SEVERAL_GPUS = (
    "transformers",
    "trl",
    "axolotl",
    "torchtitan",
    "torchtune",
    "litgpt",
    "llama-factory-v1",
    "nanochat",
)
"""Stacks whose own code is traced as one rank of several."""

IN_THE_EXTRA = ("plain-loop", "transformers", "trl")
"""Those whose packages ``memplan[stacks]`` installs; others need an environment of their own (tests/stacks/environments.yaml)."""


def trace_stack(name: str, inputs: StackInputs, *, workspaces: bool = True) -> tuple[Trace, str]:
    """Return the trace of a stack's own training step, and what was run, in words.

    Args:
        workspaces: Whether what CUDA's libraries hold is added to the events; it is in no requested figure.

    Raises:
        CannotAnswerError: There is no program for that stack, a package is missing, or the library cannot do the job.
    """
    program = program_of(name)
    parallel = inputs.setup.config.parallel
    if parallel.data > 1 and name not in ON_SEVERAL_GPUS:
        raise CannotAnswerError(f"parallel.data: the code of stack {name} is traced on one GPU only")
    if runs_engine(parallel) and name not in ON_SEVERAL_GPUS:
        raise CannotAnswerError(
            f"parallel.engine: the code of stack {name} is traced without DeepSpeed; use --stack transformers"
        )
    cublas = cublas_workspace_bytes(inputs.compute_capability) if workspaces else 0
    recorder = _recorder(inputs.setup)("meta", _own_files(), cublas_bytes=cublas)
    if is_sharded(inputs.setup.config.parallel):
        recorder.rank = inputs.details.rank  # type: ignore[attr-defined]
    with _explained(name):
        run = program.run(inputs, recorder)
    ran = versions(name)
    packages = ", ".join(f"{package} {number}" for package, number in ran.items())
    notes = (*run.notes, *_other_versions(inputs.setup.stack, ran))
    return assembled(recorder, run.vocab_size, notes), f"{run.title} ({packages})"


def _other_versions(stack: Stack, ran: Mapping[str, str]) -> Iterator[str]:
    """Yield that what ran is not what a stack describes: its library, or transformers, of another version."""
    for package in dict.fromkeys((next(iter(stack.versions)), "transformers")):
        read, there = stack.versions.get(package, ""), ran.get(package, "")
        if read and there and _numbers(read)[:2] != _numbers(there)[:2]:
            yield f"{package} {there} ran here, and the formula is that of {package} {read}; differences may be theirs"


def _recorder(setup: TrainingSetup) -> type[Recorder]:
    """Return the recorder that a setup's ranks need; distributed tensors take a second to import."""
    if not is_sharded(setup.config.parallel) and setup.config.parallel.tensor == 1 and not setup.steps_on_host:
        return Recorder
    from memplan.trace.ranks.fully_shard import ShardedRecorder

    return ShardedRecorder


def versions(name: str) -> dict[str, str]:
    """Return the versions of the packages that a stack's program imports, and of torch."""
    return {package: version(package) for package in program_of(name).PACKAGES} | {"torch": torch.__version__}


def program_of(name: str) -> Any:
    """Return the module of a stack's program.

    Raises:
        CannotAnswerError: There is none, or a package that it needs is missing.
    """
    if name not in PROGRAMS:
        known = ", ".join(PROGRAMS)
        raise CannotAnswerError(f"the code of stack {name} cannot be traced; stacks that can: {known}")
    logging.disable(logging.WARNING)  # of kernels that a machine without a GPU has no use for
    try:
        program: Any = import_module(_module(name))
    except ImportError as error:
        raise _missing(name, (error.name or str(error)).partition(".")[0]) from None
    finally:
        logging.disable(logging.NOTSET)
    for package in program.PACKAGES:
        try:
            version(package)
        except PackageNotFoundError:
            raise _missing(name, package) from None
    return program


def _module(name: str) -> str:
    """Return the module of the program of a stack at the version that is installed."""
    since, older = OLDER.get(name, ("", ""))
    try:
        return older if older and _numbers(version(name)) < _numbers(since) else PROGRAMS[name]
    except PackageNotFoundError:
        return PROGRAMS[name]


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdigit())


def _missing(name: str, package: str) -> CannotAnswerError:
    """Return why a stack's code cannot be traced here, and what makes an environment in which it can."""
    command = "pip install '.[stacks]'" if name in IN_THE_EXTRA else f"python tests/stacks/survey.py {name} --jobs 1"
    return CannotAnswerError(f"tracing stack {name} needs {package}: {command} in a checkout of memplan")


def _own_files() -> tuple[str, ...]:
    """Return the files whose lines explain nothing about a model."""
    own = Path(__file__).parent.parent
    return tuple(str(path) for path in own.rglob("*.py"))


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Turn a failure of a library's code into one line."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except MemplanError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        theirs = [frame for frame in frames if not frame.filename.startswith((torch.__path__[0], "<"))]
        place = f" at {Path(theirs[-1].filename).name}:{theirs[-1].lineno}" if theirs else ""
        text = " ".join(str(error).split())[:200] or "no message"
        raise CannotAnswerError(f"the code of stack {name} failed{place}: {type(error).__name__}: {text}") from error
