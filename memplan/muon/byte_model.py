"""What the optimizer holds and allocates, in bytes, from shapes and options alone.

State, stores and gradients follow layouts (elements and bytes of a block, bytes of a tensor), which
the planner's catalog has as well: any object with those three attributes can be passed in, so that
the planner's own entries are what is compared with measurement. Temporaries follow ``steps``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from memplan.muon.group_options import DEFAULTS, adamw_options, checked_keys, checked_options, muon_options
from memplan.muon.parameter_updates import batch_bytes, batches_of, bytes_of_round, needs_exchange, rounds_of
from memplan.muon.stores.gradient_stores import GRADIENT_FORMATS
from memplan.muon.stores.optimizer_errors import OptimizerError
from memplan.muon.updates.handles import FloatHandle, Handle, coded_elements
from memplan.muon.updates.offload import staged_bytes
from memplan.muon.updates.steps import (
    FIRST,
    MOMENTUM,
    SECOND,
    accumulate_bytes,
    adamw_bytes,
    adamw_chunk_length,
    apply_bytes,
    chunk_length,
    orthogonalise_bytes,
)
from memplan.units import ceil_div

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from memplan.muon.optimizer import Muon
    from memplan.muon.state_codecs.codecs import Codec

STEP_BYTES = 4
"""The step counter of each parameter: one fp32 number on the host."""


class Layout(Protocol):
    """``ceil(elements / block_elements) * block_bytes + tensor_bytes``; the catalog's formats and slots are such."""

    @property
    def block_elements(self) -> int:
        """Elements in a block."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""

    @property
    def tensor_bytes(self) -> int:
        """Bytes once for each tensor."""


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The plainest ``Layout``."""

    block_elements: int
    block_bytes: int
    tensor_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PredictedBytes:
    """Bytes of one parameter, or of many together, by the planner's component names."""

    weights: int = 0  # The parameter
    master_weights: int = 0  # The other 16 bits of split weights
    gradients: int = 0  # The gradient between backward and step
    optimizer_states: int = 0  # Codes, scales and floats on the device
    host_states: int = 0  # The same where they are offloaded
    step_counters: int = 0  # ``step``, on the host
    temporaries: int = 0  # Most that a step allocates beyond all of these

    def __add__(self, other: PredictedBytes) -> PredictedBytes:
        """Add what stays, and take the larger of what does not: parameters are updated one by one."""
        return PredictedBytes(
            self.weights + other.weights,
            self.master_weights + other.master_weights,
            self.gradients + other.gradients,
            self.optimizer_states + other.optimizer_states,
            self.host_states + other.host_states,
            self.step_counters + other.step_counters,
            max(self.temporaries, other.temporaries),
        )


def layout_bytes(layout: Layout, elements: int) -> int:
    """Return the bytes of a tensor in ``layout``: whole blocks, and what it has once."""
    return ceil_div(elements, layout.block_elements) * layout.block_bytes + layout.tensor_bytes


def state_layouts(group: Mapping[str, Any], elements: int) -> dict[str, Layout]:
    """Return the layout of each state slot of a parameter of ``elements``, ``step`` left out.

    Args:
        group: Options of the group; keys that are missing take their defaults.
        elements: Elements of the parameter.
    """
    full = _full(group)
    if full["algorithm"] == "adamw":
        first, second = adamw_options(full, elements).codecs
        return {FIRST: _layout(first), SECOND: _layout(second)}
    return {MOMENTUM: _layout(muon_options(full).codec)}


def predict_bytes(
    shape: Iterable[int],
    group: Mapping[str, Any] | None = None,
    *,
    parameter_dtype: torch.dtype = torch.float32,
    gradient_format: str | None = None,
    handle: Handle | None = None,
    states: Sequence[Layout] | None = None,
    weight: Layout | None = None,
    gradient: Layout | None = None,
    device: str = "cpu",
) -> PredictedBytes:
    """Return what one parameter takes under ``Muon`` with the options of ``group``.

    Args:
        shape: Shape of the parameter.
        group: Options of its group; keys that are missing take their defaults.
        parameter_dtype: Of a float parameter.
        gradient_format: Of a gradient store, which takes the place of ``.grad``.
        handle: Of a weight that is no float parameter.
        states: Layouts of the state slots, as the catalog has them; by default the codecs'.
        weight: Layout of the weight; by default that of ``parameter_dtype``.
        gradient: Layout of the gradient; by default that of its dtype or store.
        device: Type of the device of the parameter, which decides how offloaded state passes through it.

    Raises:
        OptimizerError: If the group projects gradients, splits momentum or quantises products, whose
            temporaries are not modelled.
    """
    full = _full(group or {})
    size = torch.Size(shape)
    elements = size.numel()
    handle = handle or FloatHandle(torch.empty(size, dtype=parameter_dtype, device="meta"))
    dtype = GRADIENT_FORMATS[gradient_format] if gradient_format else parameter_dtype
    weight = weight or BlockLayout(1, parameter_dtype.itemsize)
    gradient = gradient or BlockLayout(1, dtype.itemsize, 4 if dtype.itemsize == 1 else 0)
    slots = states if states is not None else tuple(state_layouts(full, elements).values())
    state_bytes = sum(layout_bytes(slot, elements) for slot in slots)
    return PredictedBytes(
        weights=layout_bytes(weight, elements),
        master_weights=2 * elements if full["master"] == "split" else 0,
        gradients=layout_bytes(gradient, elements),
        optimizer_states=0 if full["offload"] else state_bytes,
        host_states=state_bytes if full["offload"] else 0,
        step_counters=STEP_BYTES,
        temporaries=step_temporary_bytes(handle, full, dtype, device),
    )


def step_temporary_bytes(
    handle: Handle, group: Mapping[str, Any], gradient_dtype: torch.dtype, device: str = "cpu"
) -> int:
    """Return the most that the update of one parameter allocates.

    Formula:
        Muon: ``own + max(accumulate, orthogonalise, apply)``, phases that follow one another;
        ``own`` is the update, ``n`` elements of ``ns_dtype``, unless it overwrites a gradient of that dtype.
        AdamW: one fp32 chunk, and the scratch of both moments and of the weight. Offloaded state adds
        the buffers that its stretches pass through, in Muon to ``accumulate``. A matrix that ranks divide
        is updated in a round with others, of which ``round_bytes`` tells; alone it takes nothing.
    """
    full = _full(group)
    if needs_exchange(handle, full) or not handle.shape.numel():
        return 0
    if full["algorithm"] == "adamw":
        moments = adamw_options(full, coded_elements(handle))
        staged = staged_bytes(handle, full, moments.codecs, adamw_chunk_length(handle, moments), device)
        return adamw_bytes(handle, moments) + staged
    if full["projection_rank"] or full["low_rank"] or full["ns_gram_format"]:
        raise OptimizerError("temporaries of projections, low-rank momentum and quantised products are not modelled")
    options = muon_options(full)
    elements = handle.shape.numel()
    reused = options.reuse_gradient and gradient_dtype == options.dtype
    length = chunk_length(elements, options.chunk_elements, options.codec.block_elements)
    staged = staged_bytes(handle, full, (options.codec,), length, device)
    phases = (
        accumulate_bytes(elements, options.chunk_elements, options.codec) + staged,
        orthogonalise_bytes(handle.shape, options),
        apply_bytes(handle, options),
    )
    return (0 if reused else elements * options.dtype.itemsize) + max(phases)


def predict_optimizer_bytes(optimizer: Muon) -> PredictedBytes:
    """Return what all parameters of ``optimizer`` take together, as if each had a gradient of its dtype."""
    total = PredictedBytes()
    ready = list(optimizer.handles())
    for handle, group in ready:
        dtype = handle.key.dtype
        slots = state_layouts({key: group[key] for key in DEFAULTS}, coded_elements(handle))
        total += predict_bytes(
            handle.shape,
            {key: group[key] for key in DEFAULTS},
            parameter_dtype=dtype if dtype.is_floating_point else torch.bfloat16,
            gradient_format=optimizer.gradient_format,
            handle=handle,
            states=tuple(slots.values()),
            weight=handle.layout,
            device=handle.key.device.type,
        )
    for handles, group in rounds_of(ready):
        total += PredictedBytes(temporaries=bytes_of_round(handles, group))
    for handles, group in batches_of([entry for entry in ready if not needs_exchange(*entry)]):
        if len(handles) > 1:
            total += PredictedBytes(temporaries=batch_bytes(handles, group))
    return total


def _layout(codec: Codec) -> BlockLayout:
    return BlockLayout(codec.block_elements, codec.block_bytes)


def _full(group: Mapping[str, Any]) -> dict[str, Any]:
    checked_keys(group)
    full = {**DEFAULTS, **group}
    checked_options(full)
    return full
