"""Model states: weights, master weights, gradients and optimizer states, exact to the byte."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from math import prod

from memplan.catalog.entries import Optimizer, StateSlot, StorageFormat
from memplan.errors import CannotAnswerError
from memplan.model.inventory import Inventory, Kind, ParameterTensor, Role, merged
from memplan.step.states.parallel_shards import held
from memplan.step.states.update_kernels import Stepper, Updated, has_fused_kernel, kept_slots, stepper
from memplan.training.adapters import is_saved, libraries_inventory, originals, reference_tensors, stable_names
from memplan.training.resolved import FLOAT_BYTES, TrainingSetup
from memplan.units import ceil_div
from memplan.values import dataclass


@dataclass(frozen=True, slots=True)
class TensorStates:
    """What training keeps for one parameter tensor; times ``tensor.count`` for all layers.

    Attributes:
        tensor: The parameter.
        format_name: How its weight is stored.
        trainable: Whether it has a gradient.
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
        gradient_name: Dtype of its gradient as it is kept.
        stepper: The class that updates it; None where it is frozen, or no optimizer has it.
        coded_as: Format whose codec codes its weight again; None for floats, and for codes that stay.
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
    gradient_name: str
    stepper: Stepper | None
    coded_as: StorageFormat | None

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
            self.gradient_name,
            self.stepper,
            self.coded_as,
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
    if not tensor.used and setup.stack.vision == "frozen" and setup.autocast:
        name = min(name, setup.config.compute_dtype, key=lambda dtype: FLOAT_BYTES.get(dtype, 0))
        chosen = chosen if name == setup.format_names[tensor.role] else _float(name)
    fits = chosen.block_elements == 1 or (
        len(tensor.shape) > 1 and (chosen.blocking == "tensor" or tensor.shape[-1] % chosen.block_elements == 0)
    )
    if fits:
        return name, chosen
    compute = setup.config.compute_dtype
    return compute, _float(compute)


def _float(name: str) -> StorageFormat:
    return StorageFormat(name, 1, FLOAT_BYTES[name], "", (), "float")


def tensor_states(
    setup: TrainingSetup, tensor: ParameterTensor, frozen: bool, together: Stepper | None = None
) -> TensorStates:
    """Return the bytes that training keeps for one tensor.

    Args:
        setup: The training setup.
        tensor: The parameter.
        frozen: Whether it is not trained.
        together: The class that updates it together with others; by default what updates it alone.

    Formula:
        weight: ``ceil(n / block_elements) * block_bytes + tensor_bytes`` of its format;
        gradient: ``n * element_bytes + tensor_bytes``; states: the sum over the optimizer's slots.

    Raises:
        CannotAnswerError: Nothing updates the tensor as its optimizer would.
    """
    elements = tensor.elements
    name, layout = stored_format(setup, tensor)
    own_bytes = FLOAT_BYTES.get(name, setup.compute_bytes)
    wide = tensor.role in ("norm", "embedding") or setup.wide_floats or _read_uncast(setup, tensor, name)
    computed = own_bytes if wide else min(own_bytes, setup.compute_bytes)
    optimizer_name, optimizer = setup.optimizer_names[tensor.role], setup.optimizers[tensor.role]
    given = updated(setup, tensor)
    kind = None if frozen else together or stepper(setup, optimizer_name, optimizer, [given])
    master_bytes = FLOAT_BYTES.get(setup.config.master_weights, 0)
    device, host = _placed_bytes(setup, optimizer, kind, tensor.shape, master_bytes or own_bytes) if kind else (0, 0)
    return TensorStates(
        tensor=tensor,
        format_name=name,
        trainable=not frozen,
        weight_bytes=_stored_bytes(setup, layout, elements) + layout.row_bytes * tensor.shape[0],
        master_bytes=0 if frozen else elements * master_bytes,
        formed_bytes=0 if frozen else elements * computed,
        gradient_bytes=0 if frozen else _gradient_bytes(setup, elements, own_bytes),
        state_bytes=device,
        host_bytes=host,
        element_bytes=own_bytes,
        copy_bytes=_copy_bytes(setup, tensor, name),
        optimizer_name=optimizer_name,
        optimizer=optimizer,
        gradient_name=given.gradient,
        stepper=kind,
        coded_as=layout if layout.training == "coded" else None,
    )


def _stored_bytes(setup: TrainingSetup, layout: StorageFormat, elements: int) -> int:
    """Return the bytes of a stored weight: whole blocks, or each level of a format's own as its library stores them."""
    exact = setup.stack.projections.codes_result == "input"
    return layout.level_bytes(elements) if exact else layout.tensor_storage_bytes(elements)


def updated(setup: TrainingSetup, tensor: ParameterTensor) -> Updated:
    """Return what an update is given of a tensor."""
    name, layout = stored_format(setup, tensor)
    own = name if name in FLOAT_BYTES else setup.config.compute_dtype
    gradient = setup.config.gradients.dtype or own
    return Updated(name, gradient, len(tensor.shape), name not in FLOAT_BYTES, layout.codec)


def _gradient_bytes(setup: TrainingSetup, elements: int, own_bytes: int) -> int:
    """Return the bytes of a gradient as it is kept."""
    if setup.gradient is None:
        return elements * own_bytes
    return elements * setup.gradient.element_bytes + setup.gradient.tensor_bytes


def _copy_bytes(setup: TrainingSetup, tensor: ParameterTensor, name: str) -> int:
    """Return the bytes of the copy in the compute dtype that a product makes, or 0."""
    if (
        FLOAT_BYTES.get(name) == setup.compute_bytes
        or tensor.role == "norm"
        or (name in FLOAT_BYTES and setup.wide_floats)
        or _read_uncast(setup, tensor, name)
    ):
        return 0
    return tensor.elements * setup.compute_bytes


def _read_uncast(setup: TrainingSetup, tensor: ParameterTensor, name: str) -> bool:
    """Tell whether a tensor of stacked experts, a matrix or a bias, is read in its own dtype, under autocast too.

    Source:
        ``_grouped_mm`` in transformers/integrations/moe.py (5.23.0).
    """
    stacked = tensor.role == "expert_matrix" or (tensor.role == "bias" and len(tensor.shape) > 1)
    return name in FLOAT_BYTES and stacked and setup.stack.model_code == "transformers"


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
    optimizer: Optimizer, kind: Stepper, shape: tuple[int, ...], own_bytes: int, fused: bool
) -> tuple[int, int]:
    """Return the optimizer's state bytes for one tensor: (on the device, on the host).

    Args:
        optimizer: Catalog entry.
        kind: The class that updates the tensor.
        shape: Dimensions of the tensor.
        own_bytes: Bytes of an element of the tensor that is updated, for slots stored like it.
        fused: Whether a fused kernel keeps step counters on the device.
    """
    slots = optimizer.exempt_slots if is_exempt(optimizer, shape) else optimizer.slots
    return _slots_bytes(kept_slots(kind, slots), shape, own_bytes, fused)


def is_exempt(optimizer: Optimizer, shape: tuple[int, ...]) -> bool:
    """Tell whether a tensor keeps an optimizer's exempt slots."""
    elements = prod(shape)
    return elements < optimizer.exempt_below or elements % optimizer.exempt_unless_multiple > 0


def _placed_bytes(
    setup: TrainingSetup, optimizer: Optimizer, kind: Stepper, shape: tuple[int, ...], own_bytes: int
) -> tuple[int, int]:
    """Return the state bytes of one tensor under a setup: (on the device, on the host)."""
    fused = setup.profile.optimizer == "fused" and has_fused_kernel(optimizer, kind)
    device, host = state_bytes(optimizer, kind, shape, own_bytes, fused)
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
    """Return the states that one rank has of a model under a setup; with adapters, its own tensors are frozen.

    Raises:
        CannotAnswerError: The job's stack does what the formula does not follow.
    """
    if setup.unmodelled:
        raise CannotAnswerError(setup.unmodelled[0])
    frozen = setup.config.adapter is not None
    inventory = libraries_inventory(inventory, setup)
    own, added = held(inventory, setup), held(adapters, setup)
    narrow = _biases_beside_codes(own, setup) | _never_updated(own, setup)
    kinds_of_own = merged(tensor for tensor in own if tensor.name not in narrow)
    saved = {tensor.kind for tensor in own if is_saved(setup, tensor)}
    steppers = {} if frozen else _steppers(setup, [tensor for tensor in kinds_of_own if tensor.used])
    alike: dict[Kind, TensorStates] = {}
    for tensor in kinds_of_own:
        together = steppers.get(setup.optimizer_names[tensor.role])
        still = not tensor.used or (frozen and tensor.kind not in saved)
        alike[tensor.kind] = tensor_states(setup, tensor, still, together)
    alike_added = {tensor.kind: _adapter_states(setup, tensor) for tensor in merged(added)}
    beside = [
        tensor_states(setup, tensor, frozen=True) for tensor in (*originals(own, setup), *reference_tensors(own, setup))
    ]
    kinds = [*alike.values(), *narrow.values(), *beside, *alike_added.values()]
    average = FLOAT_BYTES.get(setup.config.weight_average, 0)
    return ModelStates(
        tensors=(
            *(narrow.get(tensor.name) or alike[tensor.kind].of(tensor) for tensor in own),
            *beside,
            *(alike_added[tensor.kind].of(tensor) for tensor in added),
        ),
        weight_bytes=sum(t.weight_bytes * t.tensor.count for t in kinds),
        master_bytes=sum(t.master_bytes * t.tensor.count for t in kinds),
        gradient_bytes=sum(t.gradient_bytes * t.tensor.count for t in kinds),
        state_bytes=sum(t.state_bytes * t.tensor.count for t in kinds) + _shared_bytes(setup, kinds),
        host_bytes=sum(t.host_bytes * t.tensor.count for t in kinds),
        average_bytes=sum(average * t.tensor.elements * t.tensor.count for t in kinds if t.trainable),
    )


def _biases_beside_codes(own: Inventory, setup: TrainingSetup) -> dict[str, TensorStates]:
    """Return the states of frozen biases that a product with codes has cast to the compute dtype for good, by name.

    Source:
        ``Linear4bit.forward`` in bitsandbytes/nn/modules.py (0.50.2): ``bias.data = bias.data.to(x.dtype)``, where ``x`` has
        been cast. ``Linear8bitLt.forward`` has it as it comes, which the tape tells (cast_biases.py).
    """
    compute = setup.config.compute_dtype
    floats = setup.format_names["hidden_matrix"] in FLOAT_BYTES or setup.format_names["bias"] == compute
    if (
        floats
        or setup.profile.adapters == "fused"
        or setup.trains_codes
        or setup.stack.projections.codes_result != "input"
        or setup.formats["hidden_matrix"].product == "integers"
    ):
        return {}
    entry = _float(compute)
    cast = replace(
        setup, format_names={**setup.format_names, "bias": compute}, formats={**setup.formats, "bias": entry}
    )
    coded = {
        tensor.name.removesuffix("weight")
        for tensor in own
        if tensor.used and tensor.role == "hidden_matrix" and stored_format(setup, tensor)[0] not in FLOAT_BYTES
    }
    biases = (tensor for tensor in own if tensor.role == "bias" and tensor.name.removesuffix("bias") in coded)
    return {tensor.name: tensor_states(cast, tensor, frozen=True) for tensor in biases}


def _never_updated(own: Inventory, setup: TrainingSetup) -> dict[str, TensorStates]:
    """Return the states of tensors that backward forms gradients of and that no optimizer has, by name."""
    if not setup.stable_embedding:
        return {}
    tensors = {tensor.name: tensor for tensor in own if tensor.name in stable_names(own)}
    trained = {name: tensor_states(setup, tensor, frozen=False) for name, tensor in tensors.items()}
    return {name: replace(entry, stepper=None, state_bytes=0, host_bytes=0) for name, entry in trained.items()}


def _steppers(setup: TrainingSetup, tensors: Iterable[ParameterTensor]) -> dict[str, Stepper]:
    """Return what steps for each optimizer all that it updates at once; nothing where each tensor is updated alone."""
    groups: dict[str, set[Updated]] = {}
    entries: dict[str, Optimizer] = {}
    for tensor in tensors if setup.config.gradients.lifetime == "step" else ():
        name = setup.optimizer_names[tensor.role]
        entries[name] = setup.optimizers[tensor.role]
        groups.setdefault(name, set()).add(updated(setup, tensor))
    return {name: stepper(setup, name, entries[name], group) for name, group in groups.items()}


def _shared_bytes(setup: TrainingSetup, tensors: Iterable[TensorStates]) -> int:
    """Return what optimizers hold once, where any of their tensors needs it; there is one for each tensor updated alone."""
    users = [t for t in tensors if t.stepper is not None and not is_exempt(t.optimizer, t.tensor.shape)]
    if setup.config.gradients.lifetime == "layer":
        return sum(t.optimizer.shared_bytes * t.tensor.count for t in users)
    return sum({t.optimizer_name: t.optimizer.shared_bytes for t in users}.values())


def _adapter_states(setup: TrainingSetup, tensor: ParameterTensor) -> TensorStates:
    """Return the states of an adapter's matrix, which has its own dtype."""
    dtype, width = setup.adapter_dtype, FLOAT_BYTES[setup.adapter_dtype]
    role: Role = "hidden_matrix" if len(tensor.shape) > 1 else "norm"
    name, optimizer = setup.optimizer_names[role], setup.optimizers[role]
    alone = Updated(dtype, setup.config.gradients.dtype or dtype, len(tensor.shape))
    kind = stepper(setup, name, optimizer, [alone])
    device, host = _placed_bytes(setup, optimizer, kind, tensor.shape, width) if tensor.used else (0, 0)
    size = tensor.elements * width
    cast = setup.autocast and dtype != setup.config.compute_dtype
    return TensorStates(
        tensor=tensor,
        format_name=dtype,
        trainable=tensor.used,
        weight_bytes=size,
        master_bytes=0,
        formed_bytes=size if tensor.used else 0,
        gradient_bytes=_gradient_bytes(setup, tensor.elements, width) if tensor.used else 0,
        state_bytes=device,
        host_bytes=host,
        element_bytes=width,
        copy_bytes=tensor.elements * setup.compute_bytes if cast else 0,
        optimizer_name=name,
        optimizer=optimizer,
        gradient_name=alone.gradient,
        stepper=kind,
        coded_as=None,
    )
