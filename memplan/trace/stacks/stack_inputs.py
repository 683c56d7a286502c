"""What a stack's program is given, and what it has to offer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from memplan.model.model import Model
from memplan.trace.recording.recorder import Recorder
from memplan.training.resolved import TrainingSetup

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

    @property
    def is_traced(self) -> bool:
        """Whether tensors have no memory."""
        return self.device == "meta"


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
