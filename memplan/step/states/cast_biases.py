"""Biases that a layer of codes has cast for good to the dtype of what it was given first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from memplan.step.states.model_states import ModelStates
from memplan.step.tensors.tensor_states import TensorStates

CastBias = tuple[str, int, int, int]
"""A bias of several layers: its name, the first layer, how many there are, and the bytes of an element afterwards."""


def with_cast_biases(states: ModelStates, casts: Iterable[CastBias], narrow: str) -> ModelStates:
    """Return states with biases as they are once forward has run; one whose layers differ is told run by run.

    Args:
        states: Those of a model as it is loaded.
        narrow: Name of the dtype of 16 bits.

    Source:
        ``Linear8bitLt.forward`` in bitsandbytes/nn/modules.py (0.50.2): ``self.bias.data = self.bias.data.to(x.dtype)``.
    """
    by_name: dict[str, list[CastBias]] = {}
    for cast in casts:
        by_name.setdefault(cast[0], []).append(cast)
    tensors = [one for entry in states.tensors for one in _runs(entry, by_name.get(entry.tensor.name, []), narrow)]
    before, after = (sum(e.weight_bytes * e.tensor.count for e in kinds) for kinds in (states.tensors, tensors))
    return replace(states, tensors=tuple(tensors), weight_bytes=states.weight_bytes + after - before)


def _runs(entry: TensorStates, casts: Iterable[CastBias], narrow: str) -> Iterator[TensorStates]:
    """Yield a tensor's states, apart for each run of layers that is cast alike."""
    tensor = entry.tensor
    own = [cast for cast in casts if tensor.first <= cast[1] < tensor.first + tensor.count]
    if {cast[3] for cast in own} <= {entry.element_bytes}:
        yield entry
        return
    for _, first, count, width in own:
        yield replace(
            entry,
            tensor=replace(tensor, first=first, count=count),
            format_name="fp32" if width == 4 else narrow,
            weight_bytes=tensor.elements * width,
            element_bytes=width,
        )
