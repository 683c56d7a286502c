"""Model states: weights, master weights, gradients and optimizer states, exact to the byte, and biases that a forward casts for good."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from memplan.catalog.entries import Optimizer
from memplan.catalog.update_classes import STACKED
from memplan.documents.frozen_values import dataclass
from memplan.errors import CannotAnswerError
from memplan.model.inventory import Inventory, Kind, ParameterTensor, merged
from memplan.step.states.parallel_shards import ADAPTER, is_coded, is_sharded, is_whole, rank_tensors, shards_codes
from memplan.step.states.stacked_updates import shared_state_bytes, shared_states
from memplan.step.tensors.tensor_states import (
    TensorStates,
    adapter_states,
    reference_setup,
    stored_format,
    tensor_states,
    updated,
)
from memplan.step.tensors.update_kernels import Stepper, Updated, is_exempt, stepper
from memplan.step.units.host_memory import NOTHING_ON_HOST, HostMemory, HostTensors, host_memory
from memplan.training.adapted_ends import SAVED_ROLES, is_saved, module_of, originals, with_saved_alone
from memplan.training.adapters import (
    TOWER_PARTS,
    libraries_inventory,
    reference_tensors,
    replaced_table,
    stable_names,
)
from memplan.training.resolved import FLOAT_BYTES, TrainingSetup, plain_format
from memplan.training.rules.stack_defaults import format_name
from memplan.units import ceil_div


@dataclass(frozen=True, slots=True)
class ModelStates:
    """States of all tensors, and their sums."""

    tensors: tuple[TensorStates, ...]  # One entry per distinct tensor, base model first, adapters after it
    weight_bytes: int
    master_bytes: int
    gradient_bytes: int
    state_bytes: int
    host_bytes: int  # Bytes of all that lies in host memory, which is in no other sum
    average_bytes: int
    host: HostMemory = NOTHING_ON_HOST  # What that is, where an engine of several GPUs keeps it there
    staged_bytes: int = 0  # A buffer on the device that gradients pass on their way there, which is in no other sum


def model_states(setup: TrainingSetup, inventory: Inventory, adapters: Iterable[ParameterTensor]) -> ModelStates:
    """Return the states that one rank has of a model under a setup; with adapters, its own tensors are frozen.

    Raises:
        CannotAnswerError: The job's stack does what the formula does not follow.
    """
    if setup.unmodelled:
        raise CannotAnswerError(setup.unmodelled[0])
    frozen = setup.config.adapter is not None
    inventory = libraries_inventory(inventory, setup)
    own, added = with_saved_alone(rank_tensors(inventory, setup), setup), rank_tensors(adapters, setup)
    narrow = _biases_beside_codes(own, setup) | _never_updated(own, setup)
    narrow |= _staged_codes(inventory, own, setup) | _never_reached(own, setup)
    kinds_of_own = merged([tensor for tensor in own if _place(tensor) not in narrow] if narrow else own)
    saved = {tensor.kind for tensor in own if is_saved(setup, tensor)} if frozen else set()
    steppers = (
        {} if frozen else _steppers(setup, [tensor for tensor in kinds_of_own if tensor.used and not tensor.frozen])
    )
    alike: dict[Kind, TensorStates] = {}
    for tensor in kinds_of_own:
        together = steppers.get(setup.optimizer_names[tensor.role])
        still = tensor.frozen or not tensor.used or (frozen and tensor.kind not in saved)
        alike[tensor.kind] = tensor_states(setup, tensor, still, together)
    alike_added = {tensor.kind: adapter_states(setup, tensor) for tensor in merged(added)}
    loaded = _loaded_setup(setup)
    beside = [tensor_states(loaded, tensor, frozen=True) for tensor in originals(own, setup)]
    beside += [tensor_states(setup, tensor, frozen=True) for tensor in replaced_table(own, setup)]
    reference = reference_setup(setup)
    beside += [tensor_states(reference, tensor, frozen=True) for tensor in reference_tensors(own, setup)]
    beside += _scales_beside_shards(inventory, setup)
    kinds = [*alike.values(), *narrow.values(), *beside, *alike_added.values()]
    average = FLOAT_BYTES.get(setup.config.weight_average, 0)
    states = ModelStates(
        tensors=(
            *(narrow.get(_place(tensor)) or alike[tensor.kind].of(tensor) for tensor in own),
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
    if any(entry.stepper == STACKED for entry in states.tensors) and (ranks := setup.config.parallel.data) > 1:
        shared = shared_states(states.tensors, ranks)
        return replace(states, tensors=tuple(shared), state_bytes=shared_state_bytes(states.tensors, ranks))
    return _offloaded(setup, states) if is_sharded(setup.config.parallel) and setup.offloads_weights else states


def _loaded_setup(setup: TrainingSetup) -> TrainingSetup:
    """Return the setup of modules whose copies are trained, and cast: they stay as they were loaded, or made ready for adapters."""
    # Source: ``_prepare_model_for_quantization`` in axolotl/loaders/model.py (0.21.0), which casts back what has other
    # names.
    coded = setup.format_names["hidden_matrix"] not in FLOAT_BYTES
    if setup.scores and coded and setup.stack.kbit_floats == "fp32-but-ends":
        return setup.with_floats({"head": "fp32"})
    if setup.stack.saved_modules == "weights":
        return setup
    return setup.with_floats({role: format_name(setup.config, role) for role in SAVED_ROLES})


def _offloaded(setup: TrainingSetup, states: ModelStates) -> ModelStates:
    """Return states whose shards, with their gradients and what the optimizer keeps of them, lie in host memory.

    FSDP2 has a pinned tensor for each shard, and one for its gradient from backward to the step; FSDP1 two for each unit, be
    it frozen or not, for good. Optimizers' states are not pinned. Codes that are whole on every rank, and their scales, stay.
    """
    # Source: ``_init_sharded_param`` in torch/distributed/fsdp/_fully_shard/_fsdp_param.py and ``foreach_reduce`` in
    # _fsdp_collectives.py; ``init_flat_param_attributes`` in torch/distributed/fsdp/_flat_param.py (v2.13.0).
    flat = setup.config.parallel.engine == "fsdp1"
    whole = [is_whole(entry.tensor, setup) for entry in states.tensors]
    moved = [entry for entry, stays in zip(states.tensors, whole, strict=True) if not stays]
    shards = _flat_shards(moved) if flat else [(e.weight_bytes, e.gradient_bytes, e.tensor.count) for e in moved]
    host = host_memory(
        HostTensors(component, size, count, pinned=True)
        for weight, gradient, count in shards
        for component, size in (("weights", weight), ("gradients", gradient))
    )
    own = HostMemory((*host.tensors, HostTensors("optimizer_states", states.state_bytes + states.host_bytes, 1, False)))
    return replace(
        states,
        tensors=tuple([e if stays else _without_device(e) for e, stays in zip(states.tensors, whole, strict=True)]),
        weight_bytes=states.weight_bytes - sum(entry.weight_bytes * entry.tensor.count for entry in moved),
        gradient_bytes=0,
        state_bytes=0,
        host_bytes=own.bytes,
        host=own,
    )


def _flat_shards(moved: Iterable[TensorStates]) -> list[tuple[int, int, int]]:
    """Return the bytes of a unit's piece, those of what its gradient is copied into, and how many units are alike."""
    units: dict[tuple[str, int], tuple[int, int]] = {}
    for entry in moved:
        tensor = entry.tensor
        unit = tensor.name if ADAPTER in tensor.name else "layer" if "{}" in tensor.name else ""
        before, count = units.get((unit, tensor.first), (0, tensor.count))
        units[unit, tensor.first] = before + entry.weight_bytes, count
    return [(size, size, count) for size, count in units.values()]


def _without_device(entry: TensorStates) -> TensorStates:
    """Return a tensor of which nothing stays on the device."""
    host = entry.weight_bytes + entry.gradient_bytes + entry.state_bytes + entry.host_bytes
    return replace(entry, weight_bytes=0, gradient_bytes=0, state_bytes=0, host_bytes=host)


def _scales_beside_shards(inventory: Inventory, setup: TrainingSetup) -> list[TensorStates]:
    """Return the scales of codes that are sharded: attributes of modules, whole on every rank."""
    parallel = setup.config.parallel
    if not is_sharded(parallel) or not (parallel.engine == "fsdp1" or shards_codes(setup)):
        return []
    coded = [tensor for tensor in inventory if is_coded(tensor, setup)]
    whole = ((tensor, tensor_states(setup, replace(tensor, used=False), frozen=True)) for tensor in coded)
    return [
        replace(
            entry,
            tensor=replace(tensor, name=f"{tensor.name}.quant_state", used=False),
            weight_bytes=entry.weight_bytes - ceil_div(tensor.elements, 2),
        )
        for tensor, entry in whole
    ]


Place = tuple[str, int]
"""A tensor by its name and the first of its layers: runs of layers have tensors of one name."""


def _place(tensor: ParameterTensor) -> Place:
    return tensor.name, tensor.first


def _staged_codes(inventory: Inventory, own: Inventory, setup: TrainingSetup) -> dict[Place, TensorStates]:
    """Return the states of codes whose shards are told in bytes, by place."""
    if not (is_sharded(setup.config.parallel) and setup.config.parallel.staged_codes):
        return {}
    coded = {tensor.name for tensor in inventory if is_coded(tensor, setup)}
    shards = (tensor for tensor in own if tensor.name in coded)
    return {_place(t): replace(tensor_states(setup, t, frozen=True), weight_bytes=t.elements) for t in shards}


def _biases_beside_codes(own: Inventory, setup: TrainingSetup) -> dict[Place, TensorStates]:
    """Return the states of frozen biases that a product with codes has cast to the compute dtype for good, by place."""
    # Source: ``Linear4bit.forward`` in bitsandbytes/nn/modules.py (0.50.2): ``bias.data = bias.data.to(x.dtype)``,
    # where ``x`` has been cast. ``Linear8bitLt.forward`` has it as it comes, which the tape tells (cast_biases.py).
    compute = setup.config.compute_dtype
    floats = setup.format_names["hidden_matrix"] in FLOAT_BYTES or setup.format_names["bias"] == compute
    if (
        floats
        or setup.trains_codes
        or setup.config.parallel.staged_codes
        or setup.stack.projections.codes_result != "input"
        or setup.formats["hidden_matrix"].product == "integers"
    ):
        return {}
    entry = plain_format(compute)
    cast = replace(
        setup, format_names={**setup.format_names, "bias": compute}, formats={**setup.formats, "bias": entry}
    )
    fused = "qkv" in setup.profile.fused_adapters  # functions of their own, which no tower has
    coded = {
        tensor.name.removesuffix("weight")
        for tensor in own
        if tensor.used
        and (not fused or tensor.name.startswith(TOWER_PARTS))
        and tensor.role == "hidden_matrix"
        and stored_format(setup, tensor)[0] not in FLOAT_BYTES
    }
    biases = (tensor for tensor in own if tensor.role == "bias" and tensor.name.removesuffix("bias") in coded)
    return {_place(tensor): tensor_states(cast, tensor, frozen=True) for tensor in biases}


def _never_updated(own: Inventory, setup: TrainingSetup) -> dict[Place, TensorStates]:
    """Return the states of tensors that backward forms gradients of and that no optimizer has, by place.

    Raises:
        CannotAnswerError: Gradients go layer by layer, as updates use them up.
    """
    if not setup.stable_embedding:
        return {}
    if setup.config.gradients.lifetime == "layer":
        raise CannotAnswerError(
            f"gradients.lifetime: layer is not modelled for {setup.stack.label} with codes, whose embedding no optimizer updates; use step"
        )
    tensors = [tensor for tensor in own if tensor.name in stable_names(own)]
    trained = {_place(tensor): tensor_states(setup, tensor, frozen=False) for tensor in tensors}
    return {place: replace(entry, stepper=None, state_bytes=0, host_bytes=0) for place, entry in trained.items()}


def _never_reached(own: Inventory, setup: TrainingSetup) -> dict[Place, TensorStates]:
    """Return the states of the model's own head beside one of values, to which no gradient comes, and which no optimizer updates."""
    if not setup.has_value_head:
        return {}
    heads = {module_of(tensor) for tensor in own if tensor.role == "head"}
    return {_place(tensor): tensor_states(setup, tensor, frozen=True) for tensor in own if module_of(tensor) in heads}


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


CastBias = tuple[str, int, int, int]
"""A bias of several layers: its name, the first layer, how many there are, and the bytes of an element afterwards."""


def with_cast_biases(states: ModelStates, casts: Iterable[CastBias], narrow: str) -> ModelStates:
    """Return states with biases as they are once forward has run; one whose layers differ is told run by run.

    Args:
        states: Those of a model as it is loaded.
        narrow: Name of the dtype of 16 bits.

    Source:
        ``Linear8bitLt.forward`` in bitsandbytes/nn/modules.py (0.50.2): ``self.bias.data = self.bias.data.to(x.dtype)``.
    """
    by_name: dict[str, list[CastBias]] = {}
    for cast in casts:
        by_name.setdefault(cast[0], []).append(cast)
    tensors = [one for entry in states.tensors for one in _runs(entry, by_name.get(entry.tensor.name, []), narrow)]
    before, after = (sum(e.weight_bytes * e.tensor.count for e in kinds) for kinds in (states.tensors, tensors))
    return replace(states, tensors=tuple(tensors), weight_bytes=states.weight_bytes + after - before)


def _runs(entry: TensorStates, casts: Iterable[CastBias], narrow: str) -> Iterator[TensorStates]:
    """Yield a tensor's states, apart for each run of layers that is cast alike."""
    tensor = entry.tensor
    own = [cast for cast in casts if tensor.first <= cast[1] < tensor.first + tensor.count]
    if {cast[3] for cast in own} <= {entry.element_bytes}:
        yield entry
        return
    for _, first, count, width in own:
        yield replace(
            entry,
            tensor=replace(tensor, first=first, count=count),
            format_name="fp32" if width == 4 else narrow,
            weight_bytes=tensor.elements * width,
            element_bytes=width,
        )
