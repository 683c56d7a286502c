"""Updates as groups ask for them: by Muon, by Muon in a projected space, or by AdamW; one by one, or in batches.

How many matrices go together is bounded by the bytes that they take beside weights, gradients and states
(``batch_bytes`` of a group); what cannot be handled so, and a matrix that is alone, is updated by itself.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch

from memplan.muon.group_options import adamw_options, muon_options
from memplan.muon.sharded.divisions import is_divided, matrix_divisions, world_size
from memplan.muon.stores.rounding_noise import Phases
from memplan.muon.updates.batches import batch_step_bytes, muon_batch_step_
from memplan.muon.updates.handles import FloatHandle, Handle, coded_elements
from memplan.muon.updates.offload import staged_bytes, stager_of
from memplan.muon.updates.projection import projected_step_
from memplan.muon.updates.rounds import replicas_bytes, round_bytes, whole_bytes
from memplan.muon.updates.steps import State, adamw_chunk_length, adamw_step_, chunk_length, muon_step_

Group = dict[str, Any]
_ALONE = ("offload", "projection_rank", "low_rank", "ns_gram_format")
"""Options with which every matrix is updated by itself."""


def update_parameter_(
    handle: Handle, group: dict[str, Any], state: State, generator: torch.Generator, phases: Phases | None, buffers: int
) -> None:
    """Update one parameter that has a gradient, and its state.

    Args:
        handle: The parameter.
        group: Its group's options.
        state: Its state.
        generator: Of stochastic rounding.
        phases: Of the weight's rounding, where its group asks for them.
        buffers: How many stretches of offloaded state pass through at a time; 0 where the state is on the device.
    """
    gradient = handle.gradient(group["reuse_gradient"])
    assert gradient is not None
    elements = handle.shape.numel()
    if not elements:  # a rank that has no rows of a parameter
        state["step"] += 1
        return
    if group["algorithm"] == "adamw":
        moments = replace(adamw_options(group, coded_elements(handle)), phases=phases)
        stager = stager_of(handle, state, moments.codecs[0], adamw_chunk_length(handle, moments), buffers)
        adamw_step_(handle, gradient, state, moments, generator, stager)
        return
    options = replace(muon_options(group), phases=phases)
    length = chunk_length(elements, options.chunk_elements, options.codec.block_elements)
    stager = stager_of(handle, state, options.codec, length, buffers)
    if group["projection_rank"]:
        projected_step_(handle, gradient, state, options, generator, stager, group)
    else:
        muon_step_(handle, gradient, state, options, generator, stager)
    state["step"] += 1


def batches_of(ready: Sequence[tuple[Handle, Group]]) -> list[tuple[list[Handle], Group]]:
    """Return the parameters in batches that are updated together, each where its first one stands."""
    batches: list[tuple[list[Handle], Group]] = []
    open_batches: dict[tuple[Any, ...], list[Handle]] = {}
    for handle, group in ready:
        most = batch_size(handle, group)
        key = (id(group), handle.shape, handle.key.dtype, handle.key.device, _gradient_dtype(handle))
        together = open_batches.get(key)
        if most == 1 or together is None or len(together) == most:
            together = []
            batches.append((together, group))
            if most > 1:
                open_batches[key] = together
        together.append(handle)
    return batches


def batch_size(handle: Handle, group: Group) -> int:
    """Return how many matrices like that one go together: as many as ``batch_bytes`` holds, at least one."""
    if not _can_share(handle, group):
        return 1
    return max(1, int(group["batch_bytes"]) // batch_bytes([handle], group))


def batch_bytes(handles: Sequence[Handle], group: Group) -> int:
    """Return what updating matrices of one shape together allocates."""
    return batch_step_bytes(handles, muon_options(group))


def needs_exchange(handle: Handle, group: Group) -> bool:
    """Tell whether a parameter is a matrix for Muon that no rank has whole, or that one orthogonalises for all."""
    return group["algorithm"] == "muon" and (bool(matrix_divisions(handle.key)) or shares_replicas(group))


def shares_replicas(group: Group) -> bool:
    """Tell whether ranks share the work on matrices that all of them have; one rank has nobody to share with."""
    return bool(group["share_replicas"]) and world_size() > 1


def rounds_of(ready: Sequence[tuple[Handle, Group]]) -> list[tuple[list[Handle], Group]]:
    """Return the divided or shared matrices of Muon in rounds, the same on every rank whose parameters have gradients.

    Matrices of a round have one group, shape, dtype and division.
    """
    rounds: list[tuple[list[Handle], Group]] = []
    open_rounds: dict[tuple[Any, ...], list[Handle]] = {}
    for handle, group in ready:
        if not needs_exchange(handle, group):
            continue
        whole: Any = handle.key
        place = (whole.device_mesh, tuple(whole.placements)) if is_divided(whole) else whole.device
        key = (id(group), whole.shape, whole.dtype, place)
        together = open_rounds.get(key)
        if together is None or len(together) == round_size(handle, group):
            together = open_rounds[key] = []
            rounds.append((together, group))
        together.append(handle)
    return rounds


def round_size(handle: Handle, group: Group) -> int:
    """Return how many matrices make a round: one for each rank, or as many each as ``batch_bytes`` holds."""
    ranks = world_size() if shares_replicas(group) else prod(one.ranks for one in matrix_divisions(handle.key))
    return ranks * max(1, int(group["batch_bytes"]) // whole_bytes(handle, muon_options(group)))


def bytes_of_round(handles: Sequence[Handle], group: Group) -> int:
    """Return what updating a round of matrices allocates on this rank."""
    first, options = handles[0], muon_options(group)
    length = chunk_length(first.shape.numel(), options.chunk_elements, options.codec.block_elements)
    staged = staged_bytes(first, group, (options.codec,), length, first.key.device.type)
    size = replicas_bytes if shares_replicas(group) else round_bytes
    return size(first, options, len(handles), staged)


def update_together_(
    handles: Sequence[Handle],
    group: Group,
    states: Sequence[State],
    generators: Sequence[torch.Generator],
    phases: Sequence[Phases | None],
) -> None:
    """Update a batch of matrices that have gradients, and their states; of each its sources of rounding, as alone."""
    noises = [own or drawn for own, drawn in zip(phases, generators, strict=True)]
    muon_batch_step_(handles, muon_options(group), states, generators, noises)


def _can_share(handle: Handle, group: Group) -> bool:
    """Tell whether a parameter is a matrix of floats with a gradient of its own, and whole blocks of momentum."""
    if not group["batch_bytes"] or group["algorithm"] != "muon" or any(group[key] for key in _ALONE):
        return False
    plain = (
        type(handle) is FloatHandle and handle.store is None and len(handle.shape) == 2 and not is_divided(handle.key)
    )
    return plain and handle.shape.numel() % muon_options(group).codec.block_elements == 0


def _gradient_dtype(handle: Handle) -> torch.dtype | None:
    return None if handle.key.grad is None else handle.key.grad.dtype
