"""Bytes per parameter: the uniform figure of a training setup, by component."""

from fractions import Fraction

from memplan.catalog.config_keys.parallel_keys import Parallel
from memplan.catalog.training_config import ALL_TRAIN
from memplan.documents.frozen_values import dataclass
from memplan.model.inventory import ROLES, Role
from memplan.step.states.parallel_shards import share
from memplan.step.tensors.update_kernels import is_on_device, slot_bytes
from memplan.training.resolved import FLOAT_BYTES, TrainingSetup

MATRIX_SIDE = 2**14
"""Side of the matrix that states are counted on: large enough that every block is whole."""


@dataclass(frozen=True, slots=True)
class BytesPerParameter:
    """Exact bytes per parameter of a hidden matrix, by component."""

    weights: Fraction
    master_weights: Fraction
    gradients: Fraction
    optimizer_states: Fraction

    @property
    def total(self) -> Fraction:
        """Sum of the components."""
        return self.weights + self.master_weights + self.gradients + self.optimizer_states


def bytes_per_parameter(
    setup: TrainingSetup, role: Role = "hidden_matrix", *, exempt: bool = False
) -> BytesPerParameter:
    """Return the exact bytes per parameter of a large matrix of a role under a setup.

    The uniform figure that the notes' tables use: every parameter is charged as a hidden matrix,
    whole blocks only, without what a tensor has once.

    Args:
        exempt: Whether it keeps its optimizer's exempt slots.
    """
    layout = setup.formats[role]
    if setup.config.adapter is not None or setup.config.freeze != ALL_TRAIN:
        return BytesPerParameter(layout.bytes_per_element, Fraction(0), Fraction(0), Fraction(0))
    own = FLOAT_BYTES.get(setup.format_names[role], setup.compute_bytes)
    gradient = setup.gradient.element_bytes if setup.gradient else own
    accumulates = setup.config.gradients.lifetime == "step"
    part = share(setup.config.parallel)
    return BytesPerParameter(
        part * layout.bytes_per_element,
        part * FLOAT_BYTES.get(setup.config.master_weights, 0),
        part * (gradient if accumulates else 0),
        part * _state_bytes(setup, role, own, exempt=exempt),
    )


def least_bytes_per_parameter(setup: TrainingSetup) -> tuple[Fraction, Fraction]:
    """Return what each parameter that trains takes at least on one GPU that has them all, with its gradient and without.

    The least of any role, exempt from its optimizer's slots or not; 0 where weights may be elsewhere.
    """
    if setup.config.parallel != Parallel() or setup.offloads_weights:
        return Fraction(0), Fraction(0)
    sizes = [
        bytes_per_parameter(setup, role, exempt=exempt)
        for role in ROLES
        for exempt in {False, bool(setup.optimizers[role].exempt_slots)}
    ]
    return min(size.total for size in sizes), min(size.total - size.gradients for size in sizes)


def _state_bytes(setup: TrainingSetup, role: Role, own: int, *, exempt: bool) -> Fraction:
    """Return the bytes of optimizer states on the device for each element of a role's matrix."""
    shape = MATRIX_SIDE, MATRIX_SIDE
    optimizer = setup.optimizers[role]
    slots = () if setup.offloads_states else optimizer.exempt_slots if exempt else optimizer.slots
    sizes = (
        slot_bytes(slot, shape, own) - slot.tensor_bytes
        for slot in slots
        if slot.dimensions != "one" and slot.layout == "elementwise" and is_on_device(slot, shape, fused=False)
    )
    return Fraction(sum(sizes), MATRIX_SIDE**2)
