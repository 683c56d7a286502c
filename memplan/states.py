"""Model states: weights, master weights, gradients and optimizer states, exact to the byte."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from memplan.catalog.entries import Optimizer, StateSlot, StorageFormat
from memplan.model.inventory import Inventory, ParameterTensor, Role
from memplan.setup import FLOAT_BYTES, TrainingSetup
from memplan.sharding import held
from memplan.units import ceil_div


@dataclass(frozen=True, slots=True)
class TensorStates:
    """What training keeps for one parameter tensor; times ``tensor.count`` for all layers.

    Attributes:
        tensor: The parameter.
        format_name: How its weight is stored.
        trainable: Whether it has a gradient and an optimizer.
        weight_bytes: Stored weight.
        master_bytes: Second copy that the optimizer updates.
        formed_bytes: Gradient as backward forms it.
        gradient_bytes: Gradient as it is kept.
        state_bytes: Optimizer states on the device.
        host_bytes: Optimizer states on the host: step counters, and all where they are offloaded.
        element_bytes: Bytes of an element as operations read it: its own, or decoded.
        copy_bytes: Copy of the weight in the compute dtype that a product needs; 0 for none.
        optimizer_name: Optimizer that takes it.
        optimizer: The same, as its catalog entry.
    """

    tensor: ParameterTensor
    format_name: str
    trainable: bool
    weight_bytes: int
    master_bytes: int
    formed_bytes: int
    gradient_bytes: int
    state_bytes: int
    host_bytes: int
    element_bytes: int
    copy_bytes: int
    optimizer_name: str
    optimizer: Optimizer

    def of(self, tensor: ParameterTensor) -> TensorStates:
        """Return the states of another tensor of the same role and shape; ``replace`` takes four times as long."""
        return TensorStates(
            tensor,
            self.format_name,
            self.trainable,
            self.weight_bytes,
            self.master_bytes,
            self.formed_bytes,
            self.gradient_bytes,
            self.state_bytes,
            self.host_bytes,
            self.element_bytes,
            self.copy_bytes,
            self.optimizer_name,
            self.optimizer,
        )

    @property
    def quantized(self) -> bool:
        """Whether a product decodes the weight first."""
        return self.format_name not in FLOAT_BYTES


def stored_format(setup: TrainingSetup, tensor: ParameterTensor) -> tuple[str, StorageFormat]:
    """Return the format of a tensor: that of its role, where its rows divide into blocks.

    Rows that do not divide, and tensors of one dimension, stay in the compute dtype.
    """
    name, chosen = setup.format_names[tensor.role], setup.formats[tensor.role]
    fits = chosen.block_elements == 1 or (
        len(tensor.shape) > 1 and (chosen.blocking == "tensor" or tensor.shape[-1] % chosen.block_elements == 0)
    )
    if fits:
        return name, chosen
    compute = setup.config.compute_dtype
    return compute, StorageFormat(compute, 1, setup.compute_bytes, "", ())


def tensor_states(setup: TrainingSetup, tensor: ParameterTensor, frozen: bool) -> TensorStates:
    """Return the bytes that training keeps for one tensor.

    Formula:
        weight: ``ceil(n / block_elements) * block_bytes + tensor_bytes`` of its format;
        gradient: ``n * element_bytes + tensor_bytes``; states: the sum over the optimizer's slots.
    """
    elements = tensor.elements
    name, layout = stored_format(setup, tensor)
    own_bytes = FLOAT_BYTES.get(name, setup.compute_bytes)
    computed = min(own_bytes, setup.compute_bytes) if tensor.role not in ("norm", "embedding") else own_bytes
    formed = elements * computed
    stored = elements * own_bytes
    if setup.gradient is not None:
        stored = elements * setup.gradient.element_bytes + setup.gradient.tensor_bytes
    optimizer = setup.optimizers[tensor.role]
    device, host = (0, 0) if frozen else _placed_bytes(setup, optimizer, tensor.shape, own_bytes)
    return TensorStates(
        tensor=tensor,
        format_name=name,
        trainable=not frozen,
        weight_bytes=layout.tensor_storage_bytes(elements),
        master_bytes=0 if frozen else elements * FLOAT_BYTES.get(setup.config.master_weights, 0),
        formed_bytes=0 if frozen else formed,
        gradient_bytes=0 if frozen else stored,
        state_bytes=device,
        host_bytes=host,
        element_bytes=own_bytes,
        copy_bytes=_copy_bytes(setup, tensor, name),
        optimizer_name=setup.optimizer_names[tensor.role],
        optimizer=optimizer,
    )


def _copy_bytes(setup: TrainingSetup, tensor: ParameterTensor, name: str) -> int:
    """Return the bytes of the copy in the compute dtype that a product makes, or 0."""
    if FLOAT_BYTES.get(name) == setup.compute_bytes or tensor.role == "norm":
        return 0
    return tensor.elements * setup.compute_bytes


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


def state_bytes(optimizer: Optimizer, shape: tuple[int, ...], own_bytes: int, fused: bool) -> tuple[int, int]:
    """Return the optimizer's state bytes for one tensor: (on the device, on the host).

    Args:
        optimizer: Catalog entry.
        shape: Dimensions of the parameter.
        own_bytes: Bytes of an element of the parameter, for slots stored like it.
        fused: Whether a fused kernel keeps step counters on the device.
    """
    elements = 1
    for size in shape:
        elements *= size
    exempt = elements < optimizer.exempt_below or elements % optimizer.exempt_unless_multiple
    return _slots_bytes(optimizer.exempt_slots if exempt else optimizer.slots, shape, own_bytes, fused)


def _placed_bytes(
    setup: TrainingSetup, optimizer: Optimizer, shape: tuple[int, ...], own_bytes: int
) -> tuple[int, int]:
    """Return the state bytes of one tensor under a setup: (on the device, on the host)."""
    device, host = state_bytes(optimizer, shape, own_bytes, setup.profile.optimizer == "fused")
    return (0, device + host) if setup.offloads_states else (device, host)


def slot_bytes(slot: StateSlot, shape: tuple[int, ...], own_bytes: int) -> int:
    """Return the bytes of one state tensor.

    Formula:
        ``ceil(n / block_elements) * block_bytes + tensor_bytes``, where n counts parameters,
        rows, columns, or is 1, as the slot's layout says.

    Example:
        >>> slot_bytes(StateSlot("momentum", 128, 132), (4096, 4096), 2)
        17301504
    """
    elements = 1
    for size in shape:
        elements *= size
    if slot.layout == "rows":
        elements //= shape[-1]
    elif slot.layout == "columns":
        elements //= shape[-2] if len(shape) > 1 else 1
    elif slot.layout == "scalar":
        elements = 1
    if slot.as_parameter:
        return elements * own_bytes
    return ceil_div(elements, slot.block_elements) * slot.block_bytes + slot.tensor_bytes


@dataclass(frozen=True, slots=True)
class ModelStates:
    """States of all tensors, and their sums.

    Attributes:
        tensors: One entry per distinct tensor, base model first, adapters after it.
    """

    tensors: tuple[TensorStates, ...]
    weight_bytes: int
    master_bytes: int
    gradient_bytes: int
    state_bytes: int
    host_bytes: int
    average_bytes: int


def model_states(setup: TrainingSetup, inventory: Inventory, adapters: Iterable[ParameterTensor]) -> ModelStates:
    """Return the states that one rank has of a model under a setup; with adapters, its own tensors are frozen."""
    frozen = setup.config.adapter is not None
    alike: dict[tuple[Role, tuple[int, ...]], TensorStates] = {}
    tensors = []
    for tensor in held(inventory, setup.config.parallel):
        known = alike.get((tensor.role, tensor.shape))
        found = tensor_states(setup, tensor, frozen) if known is None else known.of(tensor)
        alike[tensor.role, tensor.shape] = found
        tensors.append(found)
    tensors += [_adapter_states(setup, tensor) for tensor in adapters]
    shared = {t.optimizer_name: t.optimizer.shared_bytes for t in tensors if t.trainable}
    average = FLOAT_BYTES.get(setup.config.weight_average, 0)
    return ModelStates(
        tensors=tuple(tensors),
        weight_bytes=sum(t.weight_bytes * t.tensor.count for t in tensors),
        master_bytes=sum(t.master_bytes * t.tensor.count for t in tensors),
        gradient_bytes=sum(t.gradient_bytes * t.tensor.count for t in tensors),
        state_bytes=sum(t.state_bytes * t.tensor.count for t in tensors) + sum(shared.values()),
        host_bytes=sum(t.host_bytes * t.tensor.count for t in tensors),
        average_bytes=sum(average * t.tensor.elements * t.tensor.count for t in tensors if t.trainable),
    )


def _adapter_states(setup: TrainingSetup, tensor: ParameterTensor) -> TensorStates:
    """Return the states of an adapter's matrix, which has its own dtype."""
    adapter = setup.config.adapter
    assert adapter is not None
    width = FLOAT_BYTES[adapter.dtype]
    role: Role = "hidden_matrix" if len(tensor.shape) > 1 else "norm"
    optimizer = setup.optimizers[role]
    device, host = _placed_bytes(setup, optimizer, tensor.shape, width)
    size = tensor.elements * width
    cast = setup.autocast and adapter.dtype != setup.config.compute_dtype
    return TensorStates(
        tensor,
        adapter.dtype,
        True,
        size,
        0,
        size,
        size,
        device,
        host,
        width,
        tensor.elements * setup.compute_bytes if cast else 0,
        setup.optimizer_names[role],
        optimizer,
    )
