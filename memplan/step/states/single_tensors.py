"""Single tensors of a model, in the order in which it has them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from memplan.step.states.update_algorithms import run_of
from memplan.step.tensors.tensor_states import TensorStates

Named = tuple[str, TensorStates]
"""A single tensor: its name, with the number of its layer, and its states."""


def numbered(name: str, number: object) -> str:
    """Return a tensor's name with the number of its layer."""
    return name.replace("{}", str(number))


def in_layers(tensors: Sequence[TensorStates]) -> Iterator[Named]:
    """Yield every single tensor layer by layer, as a model has them."""
    for (first, count), group in groupby(tensors, key=run_of):
        entries = list(group)
        for number in range(first, first + count):
            for entry in entries:
                yield numbered(entry.tensor.name, number), entry
