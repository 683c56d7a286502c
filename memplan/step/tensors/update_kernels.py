"""Which code updates a group of tensors, what it keeps for each of them, slot by slot, and what nothing updates.

The formula and the trace both ask here, so that they plan and run the same update, and refuse in the same words.
"""

from collections.abc import Collection, Iterable
from dataclasses import replace
from functools import lru_cache
from math import prod

from memplan.catalog.entries import Optimizer, StateSlot
from memplan.catalog.update_classes import (
    BUNDLED,
    NO_UPDATE,
    STACKED,
    TORCH_ADAMW,
    TORCH_MUON,
    UNTRACED,
    UPDATE_CLASSES,
    is_known,
    optimizer_problems,
)
from memplan.documents.frozen_values import dataclass
from memplan.errors import CannotAnswerError
from memplan.model.inventory import ParameterTensor
from memplan.training.resolved import FLOAT_BYTES, TrainingSetup
from memplan.units import ceil_div

Stepper = str
"""Path of the class that steps, or ``untraced`` or ``none`` as an entry says."""

STORED_GRADIENTS = ("fp32", "bf16", "fp8-e4m3", "fp8-e5m2")
"""Dtypes in which the bundled optimizer stores gradients (memplan/muon/stores/gradient_stores.py)."""


@dataclass(frozen=True, slots=True)
class Updated:
    """A tensor as an update is given it."""

    format_name: str  # How it is stored
    gradient: str  # Dtype of its gradient as it is kept
    dimensions: int  # How many it has
    coded: bool = False  # Whether it is stored as codes
    codec: str | None = None  # What codes it again; None where nothing does


def stepper(setup: TrainingSetup, name: str, entry: Optimizer, group: Collection[Updated]) -> Stepper:
    """Return the class that updates a group of tensors.

    Args:
        name: Catalog name of the optimizer, for messages.
        group: What its tensors are, each kind once.

    Raises:
        CannotAnswerError: No implementation takes them, or none is known.
    """
    if entry.implementation == NO_UPDATE:
        return NO_UPDATE
    _refuse_what_is_not_modelled(setup, name, entry)
    _refuse_formats(setup, group)
    if setup.config.master_weights != "none":
        group = _masters(setup, group)
    kind = _kind(setup, entry, group)
    if kind == BUNDLED:
        _refuse_gradients(setup, group)
    elif not _plain(setup, group):
        raise CannotAnswerError(_not_plain(setup, name, kind, group))
    elif kind == TORCH_MUON:
        _refuse_torch_muon(setup, name, entry, group)
    return kind


def slots_of_class(kind: Stepper, slots: Iterable[StateSlot]) -> tuple[StateSlot, ...]:
    """Return the slots of an entry that a class keeps: ``torch.optim.Muon`` counts no steps, say."""
    known = UPDATE_CLASSES.get(kind)
    return tuple(slots) if known is None else tuple(slot for slot in slots if slot.name in known.keeps)


def has_fused_kernel(entry: Optimizer, kind: Stepper) -> bool:
    """Tell whether a class that an entry is stepped by has a fused kernel, by its own code or as the entry says."""
    return UPDATE_CLASSES[kind].fused if kind in UPDATE_CLASSES else entry.step == "torch"


def unproven_updates(steps: Iterable[tuple[str, Optimizer, Stepper | None]]) -> list[str]:
    """Return what no trace of ours stands behind, one sentence for each optimizer: (name, entry, class)."""
    texts = set()
    for name, entry, kind in steps:
        if kind is None or is_known(kind):
            continue
        if entry.scratch.form == "untraced":
            texts.add(f"temporaries of the {name} update, which is untraced")
        elif kind == entry.implementation:
            by = "no class is named to trace it" if kind == UNTRACED else f"memplan trace runs {kind}"
            texts.add(f"temporaries of the {name} update but for what its entry states ({by})")
    return sorted(texts)


def _kind(setup: TrainingSetup, entry: Optimizer, group: Collection[Updated]) -> Stepper:
    """Return the entry's own class, or what takes its place: the bundled AdamW where torch's cannot step."""
    if entry.implementation == BUNDLED and entry.orthogonalises and setup.profile.newton_schulz == "torch":
        return TORCH_MUON
    same = _state_widths(entry) == {FLOAT_BYTES.get(item.format_name) for item in group}
    if entry.implementation == TORCH_ADAMW and entry.bundled and not (same and _plain(setup, group)):
        return BUNDLED
    return entry.implementation


def _plain(setup: TrainingSetup, group: Iterable[Updated]) -> bool:
    """Whether torch's optimizers can take a group: floats with gradients of their own dtype, states beside them."""
    own = all(not item.coded and item.gradient == item.format_name for item in group)
    return own and not setup.offloads_states


def _state_widths(entry: Optimizer) -> set[int]:
    return {slot.block_bytes for slot in entry.slots if slot.layout == "elementwise" and slot.block_elements == 1}


def _masters(setup: TrainingSetup, group: Iterable[Updated]) -> list[Updated]:
    """Return the master weights of a group, whose gradients are cast to their dtype."""
    dtype = setup.config.master_weights
    if any(item.coded for item in group):
        raise CannotAnswerError(
            f"{setup.name}: master_weights: {dtype} beside coded weights is not modelled: nothing codes the weights "
            "again from their masters; use master_weights: none"
        )
    return [Updated(dtype, dtype, item.dimensions) for item in group]


# ------------------------------------------------------------------ what is refused
def _refuse_what_is_not_modelled(setup: TrainingSetup, name: str, entry: Optimizer) -> None:
    for path, text in optimizer_problems(entry):
        raise CannotAnswerError(f"{setup.name}: optimizer {name}: {'.'.join(map(str, path))}: {text}")
    if entry.implementation == STACKED and not setup.stack.shares_states:
        raise CannotAnswerError(f"{setup.name}: optimizer {name} is nanochat's own, which --stack nanochat alone runs")
    by_profile = entry.step == "torch" and entry.scratch.form == "copies"
    if by_profile and setup.profile.optimizer != "foreach":
        raise CannotAnswerError(
            f"{setup.name}: kernels.optimizer: {setup.profile.optimizer} is not supported with {name}, whose entry states "
            "the scratch memory of foreach; use kernels.optimizer: foreach"
        )


def _refuse_formats(setup: TrainingSetup, group: Iterable[Updated]) -> None:
    """Refuse codes that nothing forms again after an update."""
    for item in sorted(group, key=str):
        if item.coded and item.codec is None:
            raise CannotAnswerError(
                f"{setup.name}: weights in {item.format_name} cannot be trained: nothing codes them again after an "
                f"update; use {', '.join(FLOAT_BYTES)} or a format that is trained as codes (memplan list formats), or freeze them "
                "beside adapters"
            )


def _refuse_gradients(setup: TrainingSetup, group: Iterable[Updated]) -> None:
    """Refuse gradients that the bundled optimizer neither takes as they are nor stores."""
    for item in sorted(group, key=str):
        able = [name for name in STORED_GRADIENTS if {name, item.format_name} != {"bf16", "fp16"}]
        if item.gradient not in able and (item.coded or item.gradient != item.format_name):
            raise CannotAnswerError(
                f"{setup.name}: gradients of {item.format_name} weights in {item.gradient} are not supported: the "
                f"bundled optimizer stores them in {', '.join(able)}; set gradients.dtype to one of them"
            )


def _not_plain(setup: TrainingSetup, name: str, kind: Stepper, group: Iterable[Updated]) -> str:
    coded = [item.format_name for item in sorted(group, key=str) if item.coded]
    other = [item.gradient for item in sorted(group, key=str) if item.gradient != item.format_name]
    what = (
        f"weights in {coded[0]}"
        if coded
        else f"gradients in {other[0]} beside weights in another dtype"
        if other
        else "states in host memory"
    )
    return (
        f"{setup.name}: {name} does not take {what}, which the bundled optimizer alone does ({kind} runs here); "
        "use one of muon-* or adamw-fp32, adamw-bf16, adamw-int8"
    )


def _refuse_torch_muon(setup: TrainingSetup, name: str, entry: Optimizer, group: Iterable[Updated]) -> None:
    """Refuse what ``torch.optim.Muon`` does not do: batches, stacks of matrices, and momentum in another dtype."""
    if setup.profile.muon_batch_bytes or setup.config.parallel.shared_muon:
        key = "kernels.muon_batch_bytes" if setup.profile.muon_batch_bytes else "parallel.shared_muon"
        raise CannotAnswerError(
            f"{setup.name}: {key} is the bundled optimizer's, and kernels.newton_schulz: torch runs "
            "torch.optim.Muon; use min or fast, or leave it out"
        )
    momentum = next(slot for slot in entry.slots if slot.layout == "elementwise")
    for item in sorted(group, key=str):
        if item.dimensions != 2:
            why = "takes matrices, not stacks of them"
        elif (momentum.block_elements, momentum.block_bytes) != (1, FLOAT_BYTES[item.format_name]):
            why = f"keeps momentum in the gradient's dtype, {item.gradient}, which {name} does not"
        else:
            continue
        raise CannotAnswerError(
            f"{setup.name}: kernels.newton_schulz: torch runs torch.optim.Muon, which {why}; use min or fast"
        )


PAGED_FROM = 100_000
"""Elements of a tensor whose states bitsandbytes' paged optimizers page (``get_state_buffer`` in bitsandbytes/optim/optimizer.py, 0.50.2)."""


def is_on_device(slot: StateSlot, shape: tuple[int, ...], fused: bool) -> bool:
    """Tell whether a tensor's state is in the allocator's memory: counters of fused kernels are, and what is paged is not."""
    on_device = {"device": True, "device-if-fused": fused, "paged": prod(shape) < PAGED_FROM, "host": False}
    return on_device[slot.device]


@lru_cache(maxsize=65536)
def _slots_bytes(slots: tuple[StateSlot, ...], shape: tuple[int, ...], own_bytes: int, fused: bool) -> tuple[int, int]:
    device = host = 0
    for slot in slots:
        if slot.dimensions == ("more" if len(shape) < 2 else "one"):
            continue
        size = slot_bytes(slot, shape, own_bytes)
        if is_on_device(slot, shape, fused):
            device += size
        else:
            host += size
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


def first_placed_bytes(
    setup: TrainingSetup, optimizer: Optimizer, kind: Stepper, tensor: ParameterTensor, own_bytes: int
) -> tuple[int, int]:
    """Return the state bytes of the first rank's part of a tensor, or of all of it: (on the device, on the host).

    Raises:
        CannotAnswerError: The rank with fewer rows keeps more, in full, where the first one's are coded.
    """
    placed = placed_bytes(setup, optimizer, kind, tensor, own_bytes)
    fewer = tensor.divided[0] % tensor.shape[0] if optimizer.steps_shards and tensor.divided else 0
    if fewer:
        last = replace(tensor, shape=(fewer, *tensor.shape[1:]))
        if placed_bytes(setup, optimizer, kind, last, own_bytes) > placed:
            text = (
                f"parallel.data: states of {tensor.shape[0]} of {tensor.divided[0]} rows, as most ranks have of a tensor, are "
                f"coded, and those of the last {fewer} are not; that rank is not planned: use GPUs that divide the rows"
            )
            raise CannotAnswerError(text)
    return placed


def placed_bytes(
    setup: TrainingSetup, optimizer: Optimizer, kind: Stepper, tensor: ParameterTensor, own_bytes: int
) -> tuple[int, int]:
    """Return the state bytes of one tensor under a setup: (on the device, on the host)."""
    fused = setup.profile.optimizer == "fused" and has_fused_kernel(optimizer, kind)
    whole = () if optimizer.steps_shards else tensor.divided
    device, host = state_bytes(optimizer, kind, tensor.shape, own_bytes, fused, whole)
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
    elif slot.layout == "longer":
        elements //= min(shape)
    elif slot.layout == "scalar":
        elements = 1
    elif slot.layout != "elementwise":
        raise CannotAnswerError(f"state {slot.name}: a layout by {slot.layout} is not known")
    if slot.as_parameter:
        return elements * own_bytes
    return ceil_div(elements, slot.block_elements) * slot.block_bytes + slot.tensor_bytes
