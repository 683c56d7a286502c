"""What an optimizer keeps for one parameter tensor, slot by slot."""

from __future__ import annotations

from functools import lru_cache
from math import prod

from memplan.catalog.entries import Optimizer, StateSlot
from memplan.errors import CannotAnswerError
from memplan.model.inventory import ParameterTensor
from memplan.step.tensors.update_kernels import Stepper, has_fused_kernel, slots_of_class
from memplan.training.resolved import TrainingSetup
from memplan.units import ceil_div


@lru_cache(maxsize=65536)
def _slots_bytes(slots: tuple[StateSlot, ...], shape: tuple[int, ...], own_bytes: int, fused: bool) -> tuple[int, int]:
    device = host = 0
    for slot in slots:
        if slot.dimensions == ("more" if len(shape) < 2 else "one"):
            continue
        size = slot_bytes(slot, shape, own_bytes)
        if slot.device == "host" or (slot.device == "device-if-fused" and not fused):
            host += size
        else:
            device += size
    return device, host


def state_bytes(
    optimizer: Optimizer,
    kind: Stepper,
    shape: tuple[int, ...],
    own_bytes: int,
    fused: bool,
    divided: tuple[int, ...] = (),
) -> tuple[int, int]:
    """Return the optimizer's state bytes for one tensor: (on the device, on the host).

    Args:
        shape: Dimensions of the tensor.
        own_bytes: Bytes of an element of the tensor that is updated, for slots stored like it.
        fused: Whether a fused kernel keeps step counters on the device.
        divided: Of a rank's shard, the dimensions of the whole.
    """
    slots = optimizer.exempt_slots if is_exempt(optimizer, shape, divided) else optimizer.slots
    return _slots_bytes(slots_of_class(kind, slots), shape, own_bytes, fused)


def is_exempt(optimizer: Optimizer, shape: tuple[int, ...], divided: tuple[int, ...] = ()) -> bool:
    """Tell whether a tensor keeps an optimizer's exempt slots: of a shard the whole decides, and whether its rows are whole blocks.

    Source:
        ``coded_elements`` in memplan/muon/updates/handles.py.
    """
    elements = prod(divided or shape)
    exempt = elements < optimizer.exempt_below or elements % optimizer.exempt_unless_multiple > 0
    if exempt or not divided or not optimizer.exempt_slots:
        return exempt
    block = max(slot.block_elements for slot in optimizer.slots if slot.layout == "elementwise")
    return any(length % block for length in (shape[-1], divided[-1]))


def placed_bytes(
    setup: TrainingSetup, optimizer: Optimizer, kind: Stepper, tensor: ParameterTensor, own_bytes: int
) -> tuple[int, int]:
    """Return the state bytes of one tensor under a setup: (on the device, on the host)."""
    fused = setup.profile.optimizer == "fused" and has_fused_kernel(optimizer, kind)
    device, host = state_bytes(optimizer, kind, tensor.shape, own_bytes, fused, tensor.divided)
    return (0, device + host) if setup.offloads_states or setup.steps_on_host else (device, host)


def slot_bytes(slot: StateSlot, shape: tuple[int, ...], own_bytes: int) -> int:
    """Return the bytes of one state tensor.

    Formula:
        ``ceil(n / block_elements) * block_bytes + tensor_bytes``, where n counts parameters,
        rows, columns, or is 1, as the slot's layout says.

    Example:
        >>> slot_bytes(StateSlot("momentum", 128, 132), (4096, 4096), 2)
        17301504
    """
    elements = prod(shape)
    if slot.layout == "rows":
        elements //= shape[-1]
    elif slot.layout == "columns":
        elements //= shape[-2] if len(shape) > 1 else 1
    elif slot.layout == "scalar":
        elements = 1
    elif slot.layout != "elementwise":
        raise CannotAnswerError(f"state {slot.name}: a layout by {slot.layout} is not known")
    if slot.as_parameter:
        return elements * own_bytes
    return ceil_div(elements, slot.block_elements) * slot.block_bytes + slot.tensor_bytes
