"""The update of one parameter as its group asks for it: by Muon, by Muon in a projected space, or by AdamW."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from memplan.muon.group_options import adamw_options, muon_options
from memplan.muon.updates.offload import stager_of
from memplan.muon.updates.projection import projected_step_
from memplan.muon.updates.steps import adamw_chunk_length, adamw_step_, chunk_length, muon_step_

if TYPE_CHECKING:
    import torch

    from memplan.muon.stores.rounding_noise import Phases
    from memplan.muon.updates.handles import Handle
    from memplan.muon.updates.steps import State


def update_parameter_(
    handle: Handle,
    group: dict[str, Any],
    state: State,
    generator: torch.Generator,
    phases: Phases | None,
    buffers: int,
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
    if group["algorithm"] == "adamw":
        moments = replace(adamw_options(group, elements), phases=phases)
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
