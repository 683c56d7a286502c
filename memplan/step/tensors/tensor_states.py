"""What training keeps for one parameter tensor, exact to the byte."""

from __future__ import annotations

from dataclasses import replace

from memplan.catalog.entries import Optimizer, StorageFormat
from memplan.catalog.update_classes import TORCH_ADAMW
from memplan.documents.frozen_values import dataclass
from memplan.model.inventory import ParameterTensor, Role
from memplan.step.tensors.update_kernels import Stepper, Updated, first_placed_bytes, stepper
from memplan.training.resolved import FLOAT_BYTES, TrainingSetup, plain_format
from memplan.training.rules.stack_rules import casts_trained


@dataclass(frozen=True, slots=True)
class TensorStates:
    """What training keeps for one parameter tensor; times ``tensor.count`` for all layers."""

    tensor: ParameterTensor
    format_name: str  # How its weight is stored
    trainable: bool  # Whether it has a gradient
    weight_bytes: int  # Stored weight
    master_bytes: int  # Second copy that the optimizer updates
    formed_bytes: int  # Gradient as backward forms it
    gradient_bytes: int  # Gradient as it is kept
    state_bytes: int  # Optimizer states on the device
    host_bytes: int  # Optimizer states on the host: step counters, and all where they are offloaded
    element_bytes: int  # Bytes of an element as operations read it: its own, or decoded
    copy_bytes: int  # Copy of the weight in the compute dtype that a product needs; 0 for none
    optimizer_name: str  # Optimizer that takes it
    optimizer: Optimizer
    gradient_name: str  # Dtype of its gradient as it is kept
    stepper: Stepper | None  # The class that updates it; None where it is frozen, or no optimizer has it
    # Format whose codec codes its weight again; None for floats, and for codes that stay.
    coded_as: StorageFormat | None

    def of(self, tensor: ParameterTensor) -> TensorStates:
        """Return the states of another tensor of the same role and shape; ``replace`` takes four times as long."""
        return TensorStates(
            tensor=tensor,
            format_name=self.format_name,
            trainable=self.trainable,
            weight_bytes=self.weight_bytes,
            master_bytes=self.master_bytes,
            formed_bytes=self.formed_bytes,
            gradient_bytes=self.gradient_bytes,
            state_bytes=self.state_bytes,
            host_bytes=self.host_bytes,
            element_bytes=self.element_bytes,
            copy_bytes=self.copy_bytes,
            optimizer_name=self.optimizer_name,
            optimizer=self.optimizer,
            gradient_name=self.gradient_name,
            stepper=self.stepper,
            coded_as=self.coded_as,
        )

    @property
    def quantized(self) -> bool:
        """Whether a product decodes the weight first."""
        return self.format_name not in FLOAT_BYTES


def stored_format(setup: TrainingSetup, tensor: ParameterTensor) -> tuple[str, StorageFormat]:
    """Return the format of a tensor: that of its role, where its rows divide into blocks.

    Rows that do not divide, and tensors of one dimension, stay in the compute dtype.
    """
    name, chosen = _loaded_name(setup, tensor), setup.formats[tensor.role]
    chosen = chosen if name == setup.format_names[tensor.role] else plain_format(name)
    fits = chosen.block_elements == 1 or (
        len(tensor.shape) > 1 and (chosen.blocking == "tensor" or tensor.shape[-1] % chosen.block_elements == 0)
    )
    if fits:
        return name, chosen
    compute = setup.config.compute_dtype
    return compute, plain_format(compute)


def _loaded_name(setup: TrainingSetup, tensor: ParameterTensor) -> str:
    """Return the name of a tensor's format: that of its role, but what is frozen stays as it was loaded where what trains is cast."""
    # Source: ``fsdp2_prepare_model`` in accelerate/utils/fsdp_utils.py (1.15.0), which casts parameters that need a
    # gradient.
    name = setup.format_names[tensor.role]
    if tensor.stays_float and name not in FLOAT_BYTES:
        wide = setup.kbit_floats and setup.stack.kbit_floats == "fp32"  # with all else that has no codes
        return "fp32" if wide else setup.loaded_float
    if (tensor.frozen or not tensor.used) and setup.stack.vision == "frozen-as-loaded" and setup.autocast:
        return min(name, setup.config.compute_dtype, key=lambda dtype: FLOAT_BYTES.get(dtype, 0))
    if tensor.frozen and name in FLOAT_BYTES and casts_trained(setup.config, setup.stack):
        return setup.loaded_float
    return name


def reference_setup(setup: TrainingSetup) -> TrainingSetup:
    """Return the setup of a resident reference model, which LLaMA-Factory leaves in the checkpoint's dtype, taken to be that of products.

    Source:
        ``load_model`` in llamafactory/model/loader.py (0.9.5).
    """
    narrow = setup.config.compute_dtype
    wide: dict[Role, str] = {role: narrow for role, name in setup.format_names.items() if name == "fp32" != narrow}
    return setup.with_floats(wide) if wide and setup.stack.loop.metrics == "softmax" else setup


def tensor_states(
    setup: TrainingSetup, tensor: ParameterTensor, frozen: bool, together: Stepper | None = None
) -> TensorStates:
    """Return the bytes that training keeps for one tensor.

    Args:
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
    device, host = first_placed_bytes(setup, optimizer, kind, tensor, master_bytes or own_bytes) if kind else (0, 0)
    exact = setup.stack.projections.codes_result == "input"
    stored_bytes = layout.level_bytes(elements) if exact else layout.tensor_storage_bytes(elements)
    return TensorStates(
        tensor=tensor,
        format_name=name,
        trainable=not frozen,
        weight_bytes=stored_bytes + layout.row_bytes * tensor.shape[-1 if tensor.transposed else 0],
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
    """Tell whether a tensor of stacked experts, a matrix or a bias, is read in its own dtype, under autocast too."""
    # Source: ``_grouped_mm`` in transformers/integrations/moe.py (5.23.0).
    stacked = tensor.role == "expert_matrix" or (tensor.role == "bias" and len(tensor.shape) > 1)
    return name in FLOAT_BYTES and stacked and not tensor.batched and setup.stack.model_code == "transformers"


def _stored_alike(optimizer: Optimizer, width: int) -> Optimizer:
    """Return torch's AdamW with its states in the dtype of a parameter of so many bytes, as it keeps them."""
    # Source: ``_init_group`` in torch/optim/adamw.py and adam.py (v2.13.0).
    if optimizer.implementation != TORCH_ADAMW:
        return optimizer
    floats = (slot.layout == "elementwise" and slot.block_elements == 1 for slot in optimizer.slots)
    slots = [
        replace(slot, block_bytes=width) if own else slot for slot, own in zip(optimizer.slots, floats, strict=True)
    ]
    return replace(optimizer, slots=tuple(slots))


def adapter_states(setup: TrainingSetup, tensor: ParameterTensor) -> TensorStates:
    """Return the states of an adapter's matrix, which has its own dtype, or of a head of values, made in torch's."""
    dtype = "fp32" if setup.has_value_head and tensor.role in ("head", "bias") else setup.adapter_dtype
    width = FLOAT_BYTES[dtype]
    role: Role = "hidden_matrix" if len(tensor.shape) > 1 else "norm"
    name, optimizer = setup.optimizer_names[role], setup.optimizers[role]
    optimizer = _stored_alike(optimizer, width) if setup.has_value_head else optimizer
    alone = Updated(dtype, setup.config.gradients.dtype or dtype, len(tensor.shape))
    kind = stepper(setup, name, optimizer, [alone])
    device, host = first_placed_bytes(setup, optimizer, kind, tensor, width) if tensor.used else (0, 0)
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
        stepper=kind if tensor.used else None,
        coded_as=None,
    )
