"""The stack of an answer: the loop that its figures are of, in words and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memplan.catalog.stacks import Stack
    from memplan.training.resolved import TrainingSetup

BY_SHARE = "The allocator's reserve is a share of the allocated bytes here; fit simulates it, and may differ by a few per cent."
"""What answers of a search say, which plan many jobs."""


def stack_data(stack: Stack) -> dict[str, str]:
    """Return a stack as answers name it in JSON."""
    return {"name": stack.name, "version": stack.version}


def stack_words(setups: Iterable[TrainingSetup]) -> str:
    """Return the stack that several setups share, or each with the setups that are of it, the most common first.

    Args:
        setups: At least one; one of a name counts once.
    """
    by_name = {setup.name: setup.stack for setup in setups}
    labels = [label for label, _ in Counter(stack.label for stack in by_name.values()).most_common()]
    if len(labels) == 1:
        return f"stack {labels[0]}"
    others = (
        f"{label} ({', '.join(name for name, stack in by_name.items() if stack.label == label)})"
        for label in labels[1:]
    )
    return f"stacks {', '.join((labels[0], *others))}"
