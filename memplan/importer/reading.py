"""What is known of a job while its files are read: results with who said them, keys used and refused, and what is missing."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from memplan.importer.sources.given_keys import MISSING

SECTIONS = ("method", "model", "launcher", "let")
"""Results that are no keys of a training config."""

MODEL = "model.given"
"""The result that names a model, by its id, path or entry."""

NEEDED = {MODEL: "the model", "micro_batch_size": "--micro-batch-size N", "sequence_length": "--sequence-length N"}
"""Results that have an argument of their own."""

DEFAULTED, LAUNCHED, STATED, OVERRIDDEN = range(4)
"""Ranks of a result: a default, said by a launcher's file, by the trainer's file or flags, done whatever they say; the higher counts."""


@dataclass(frozen=True, slots=True)
class Result:
    """A value of memplan's keys and where it comes from."""

    value: Any
    rank: int  # How strongly it was said
    key: str = ""  # The trainer's key that said it, or nothing
    source: str = ""  # The file of that key
    why: str = ""  # Why it is so, where no key says it


@dataclass(slots=True)
class UsedKey:
    """A key that was understood."""

    key: str
    source: str
    line: int
    value: Any
    effects: list[str] = field(default_factory=list)  # What it set, each as ``key = value``


@dataclass(frozen=True, slots=True)
class Refusal:
    """A key, or a combination of keys, whose effect on memory nothing follows."""

    key: str
    source: str
    line: int
    value: Any
    why: str


@dataclass(slots=True)
class Reading:
    """What is known of a job while its files are read, one after the other."""

    inputs: Mapping[str, Any]  # What is no key: number of GPUs, version, program
    results: dict[str, Result] = field(default_factory=dict)  # memplan's keys so far
    used: dict[tuple[str, str], UsedKey] = field(default_factory=dict)
    refusals: list[Refusal] = field(default_factory=list)
    needs: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[tuple[str, str, str]] = field(default_factory=list)  # What else is assumed: of what, what, and why

    def result(self, name: str) -> Any:
        """Return what an input or a result is, or :data:`MISSING`."""
        value = self.inputs.get(name, MISSING)
        if value is not MISSING and value is not None:
            return value
        outcome = self.results.get(target(name))
        return MISSING if outcome is None else outcome.value

    def need(self, text: str) -> None:
        """Note something without which the job cannot be planned."""
        if text not in self.needs:
            self.needs.append(text)


def target(name: str) -> str:
    """Return a result's full name: one of a training config stands below ``training``."""
    head = name.partition(".")[0]
    return name if head in SECTIONS or head in ("training", "packing") else f"training.{name}"


def need_of(name: str) -> str:
    """Return what to give where a result is missing.

    Example:
        >>> need_of("micro_batch_size"), need_of("adapter.rank")
        ('--micro-batch-size N', '--set adapter.rank=VALUE')
    """
    key = name.removeprefix("training.")
    return NEEDED.get(key) or (f"the value of {key}" if key.partition(".")[0] in SECTIONS else f"--set {key}=VALUE")
