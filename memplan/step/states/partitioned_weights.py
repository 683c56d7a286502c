"""What one rank keeps under DeepSpeed's ZeRO 3: an equal piece of every parameter, and small parameters whole besides.

Source:
    deepspeed/runtime/zero/partition_parameters.py (0.19.8), ``_padding_size``; parameter_offload.py,
    ``mark_persistent_parameters``; stage3.py, ``_setup_for_real_optimizer``, ``_create_fp32_partitions`` and
    ``_create_fp16_sub_groups``.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from memplan.documents.frozen_values import dataclass
from memplan.model.inventory import Inventory, ParameterTensor
from memplan.step.states.flat_partitions import (
    flat_scratch,
    partition_states,
    rank_states,
    stepped_tensors,
    trained_groups,
)
from memplan.step.states.model_states import ModelStates, model_states
from memplan.step.states.parallel_shards import is_partitioned, reduced_elements
from memplan.step.units.host_memory import NOTHING_ON_HOST, HostMemory, pieces_host_memory
from memplan.training.adapters import REFERENCE
from memplan.training.resolved import TrainingSetup
from memplan.units import ceil_div

PREFETCHED, PERSISTENT = 50_000_000, 100_000
"""Elements that DeepSpeed gathers ahead, and that stay gathered, where nobody says it (deepspeed/runtime/zero/config.py, 0.19.8)."""


@dataclass(frozen=True, slots=True)
class Partitions:
    """What each rank keeps between steps, and the sizes that it gathers and reduces by."""

    ranks: int  # Ranks
    width: int  # Bytes of an element of weights and gradients
    threshold: int  # Elements up to which a parameter stays gathered
    bucket: int  # Elements of gradients that are reduced together
    ahead: int  # Elements that are gathered ahead at once
    live: int  # Elements that are gathered before nothing is gathered ahead
    distance: int  # Elements among which a module that needs a parameter again keeps it
    copies: bool  # Whether gradients are interleaved in a tensor of their own before they are reduced
    weight_bytes: int  # Pieces of all parameters, and those that stay gathered
    whole_bytes: int  # The latter alone, but for a reference model's
    master_bytes: int  # Pieces of trained ones in fp32
    gradient_bytes: int  # Their gradients, which are there always
    state_bytes: int  # The optimizer's states of them
    host: HostMemory  # What lies in host memory
    offloads: bool  # Whether gradients go there, and all that is stepped
    moved: bool  # Whether pieces of weights come from there to be gathered
    step_bytes: int  # Most that the step takes besides, once all parameters have been let go of


def partitions(setup: TrainingSetup, states: ModelStates, hidden_size: int) -> Partitions:
    """Return what each rank keeps of a model.

    Args:
        setup: The training setup, with ``zero_stage: 3``.
        hidden_size: What ``auto`` values are multiples of.

    Formula:
        ``ceil(n / ranks)`` elements of each parameter, and that times the ranks where ``n`` is at most the threshold of persistence.
        A step takes a norm's copy of the largest piece in fp64, or for one group after the other its gradients joined and
        their cast to fp32, then the update's scratch.

    Source:
        ``get_grad_norm_direct``, ``_prepare_fp32_grad_for_sub_group`` and ``_create_fp16_sub_groups``;
        transformers/integrations/deepspeed.py (5.23.0) for ``auto``.
    """
    parallel, width = setup.config.parallel, setup.compute_bytes
    zero, ranks = parallel.deepspeed, parallel.data
    threshold = 10 * hidden_size if zero.persistence_threshold == "auto" else zero.persistence_threshold
    ahead = int(0.9 * hidden_size * hidden_size) if zero.prefetch_bucket_size == "auto" else zero.prefetch_bucket_size
    tensors = [entry.tensor for entry in states.tensors]
    pieces = sum(ceil_div(tensor.elements, ranks) * tensor.count for tensor in tensors)
    small = [t for t in tensors if t.elements <= threshold and not t.name.startswith(REFERENCE)]
    whole = sum(ranks * ceil_div(tensor.elements, ranks) * tensor.count for tensor in small)
    referred = sum(t.elements * t.count for t in tensors if _stays_referred(setup, t))
    groups = subgroups(setup, states)
    stepped = [partition_states(setup, sum(part)) for part in groups]
    retained = Partitions(
        ranks=ranks,
        width=width,
        threshold=threshold,
        bucket=reduced_elements(parallel, hidden_size),
        ahead=ahead,
        live=zero.max_live_parameters,
        distance=zero.max_reuse_distance,
        copies=zero.reduce_scatter,
        weight_bytes=width * (pieces + whole + referred),
        whole_bytes=width * whole,
        master_bytes=sum(part.weight_bytes for part in stepped),
        gradient_bytes=width * sum(map(sum, groups)),
        state_bytes=sum(part.state_bytes for part in stepped),
        host=NOTHING_ON_HOST,
        offloads=False,
        moved=False,
        step_bytes=max(8 * max(map(max, groups)), *(_step_bytes(setup, part) for part in groups)),
    )
    return _offloaded(setup, states, retained, [sum(part) for part in groups]) if setup.steps_on_host else retained


def reference_threshold(setup: TrainingSetup) -> int:
    """Return the elements up to which a parameter of a reference model stays gathered: ``auto`` is DeepSpeed's own default there."""
    threshold = setup.config.parallel.deepspeed.persistence_threshold
    return PERSISTENT if threshold == "auto" else threshold


def _stays_referred(setup: TrainingSetup, tensor: ParameterTensor) -> bool:
    """Tell whether a parameter of a reference model stays gathered, from when its forward first asks for it on."""
    return tensor.name.startswith(REFERENCE) and tensor.used and tensor.elements <= reference_threshold(setup)


def _offloaded(setup: TrainingSetup, states: ModelStates, retained: Partitions, subgroups: Sequence[int]) -> Partitions:
    """Return what a rank keeps on the device where it steps on the host: pieces of weights, or nothing but those that stay gathered."""
    zero, moved, ranks = setup.config.parallel.deepspeed, setup.offloads_weights, retained.ranks
    stepped = stepped_tensors(setup, states) if moved else []
    trained, names = trained_groups(stepped), {name for name, _ in stepped}
    frozen = [
        entry.tensor for entry in states.tensors if moved and not names.intersection(entry.tensor.expanded_names())
    ]
    host = pieces_host_memory(
        subgroups,
        [sum(ceil_div(tensor.elements, ranks) for _, tensor in group) for group in trained],
        [ceil_div(tensor.elements, ranks) for tensor in frozen for _ in range(tensor.count)],
        retained.width,
        pinned=zero.pinned_optimizer,
        pinned_frozen=zero.pinned_weights,
    )
    return replace(
        retained,
        weight_bytes=retained.whole_bytes if moved else retained.weight_bytes,
        master_bytes=0,
        gradient_bytes=0,
        state_bytes=0,
        host=host,
        offloads=True,
        moved=moved,
        step_bytes=retained.whole_bytes + retained.whole_bytes // ranks if moved else 0,
    )


def _step_bytes(setup: TrainingSetup, part: Sequence[int]) -> int:
    """Return what stepping parameters takes, given the elements of a rank's piece of each."""
    width, elements = setup.compute_bytes, sum(part)
    joined = width * elements if len(part) > 1 else 0
    cast = 4 * elements if width < 4 else 0
    return max(joined + cast, (cast or joined) + flat_scratch(setup, elements).bytes)


def subgroups(setup: TrainingSetup, states: ModelStates) -> list[list[int]]:
    """Return the elements of a rank's piece of each trained parameter, in lists of those that are stepped together."""
    parallel = setup.config.parallel
    return [
        part
        for group in trained_groups(stepped_tensors(setup, states))
        for part in _parts(
            [ceil_div(tensor.elements, parallel.data) for _, tensor in group], parallel.deepspeed.sub_group_size
        )
    ]


def _parts(sizes: Sequence[int], most: int) -> list[list[int]]:
    """Return elements of the parameters that are stepped together, the last of which fills their group."""
    parts: list[list[int]] = [[]]
    for size in sizes:
        parts[-1].append(size)
        if sum(parts[-1]) >= most:
            parts.append([])
    return [part for part in parts if part]


def rank_model_states(
    setup: TrainingSetup, inventory: Inventory, adapters: Iterable[ParameterTensor], hidden_size: int
) -> ModelStates:
    """Return the states that one rank has of a model under any engine; its tensors are whole where an engine cuts them up.

    Raises:
        CannotAnswerError: The job's stack does what the formula does not follow.
    """
    parallel = setup.config.parallel
    if not is_partitioned(parallel):
        return rank_states(setup, inventory, adapters)
    states = model_states(setup, inventory, adapters)
    retained = partitions(setup, states, hidden_size)
    return replace(
        states,
        weight_bytes=retained.weight_bytes,
        master_bytes=retained.master_bytes,
        gradient_bytes=retained.gradient_bytes,
        state_bytes=retained.state_bytes,
        host_bytes=retained.host.bytes,
        host=retained.host,
    )
