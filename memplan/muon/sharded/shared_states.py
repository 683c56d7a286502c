"""States of shards in checkpoints: as DTensors, which torch.distributed.checkpoint saves once and divides anew for any ranks.

In the optimizer they are plain tensors. Rows of a shard are whole blocks, so that codes and scales have rows as well.
"""

from __future__ import annotations

from fractions import Fraction
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from memplan.muon.sharded.divisions import is_divided, local_part

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

State = dict[str, "Tensor"]


def shared_state(state: State, parameter: Any, entries: Mapping[str, Fraction]) -> State:
    """Return the state of a DTensor's shard with every tensor of it as a DTensor that is divided alike; ``step`` stays.

    Args:
        state: The tensors by their names, as the optimizer keeps them.
        parameter: The DTensor.
        entries: Of tensors that hold codes or scales, how many entries stand for an element; one elsewhere.
    """
    if not is_divided(parameter):
        return state
    return {
        name: tensor if name == "step" else _shared(tensor, parameter, entries.get(name, Fraction(1)))
        for name, tensor in state.items()
    }


def _shared(tensor: Tensor, parameter: Any, entries: Fraction) -> Tensor:
    """Return a DTensor of a state that has, for each row of the parameter, a row of ``entries`` times its length."""
    from torch.distributed.tensor import DTensor

    *rows, last = local_part(parameter).shape
    shape = (*parameter.shape[:-1], int(parameter.shape[-1] * entries))
    strides = tuple(prod(shape[n + 1 :]) for n in range(len(shape)))
    own = tensor.view(*rows, int(last * entries))
    placed: Tensor = DTensor.from_local(
        own, parameter.device_mesh, parameter.placements, run_check=False, shape=torch.Size(shape), stride=strides
    )
    return placed


def local_state(saved: Any, state: State) -> Any:
    """Return the state of a checkpoint with this rank's part of every DTensor, in the shapes of ``state``."""
    if not isinstance(saved, dict):
        return saved
    parts = {name: local_part(tensor) if is_divided(tensor) else tensor for name, tensor in saved.items()}
    return {
        name: part.view(state[name].shape)
        if is_divided(saved[name]) and name in state and part.numel() == state[name].numel()
        else part
        for name, part in parts.items()
    }
