"""What one rank keeps under DeepSpeed's ZeRO 3: an equal piece of every parameter, and small parameters whole besides.

Source:
    deepspeed/runtime/zero/partition_parameters.py (0.19.8), ``_padding_size``; parameter_offload.py,
    ``mark_persistent_parameters``; stage3.py, ``_setup_for_real_optimizer``, ``_create_fp32_partitions`` and
    ``_create_fp16_sub_groups``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from memplan.errors import CannotAnswerError
from memplan.model.inventory import Inventory, ParameterTensor
from memplan.step.states.flat_partitions import partition_states, rank_states, trained_groups, trained_tensors
from memplan.step.states.model_states import ModelStates, model_states
from memplan.training.resolved import TrainingSetup
from memplan.units import ceil_div, format_bytes
from memplan.values import dataclass


@dataclass(frozen=True, slots=True)
class PartitionedStates:
    """Bytes that each rank keeps between steps.

    Attributes:
        weight_bytes: Pieces of all parameters, and those that stay gathered.
        master_bytes: Pieces of trained ones in fp32.
        gradient_bytes: Their gradients, which are there always.
        state_bytes: The optimizer's states of them.
        bucket_bytes: What gradients are reduced in, which is there always.
    """

    weight_bytes: int
    master_bytes: int
    gradient_bytes: int
    state_bytes: int
    bucket_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.weight_bytes + self.master_bytes + self.gradient_bytes + self.state_bytes + self.bucket_bytes


def partitioned_states(
    setup: TrainingSetup, inventory: Inventory, adapters: Iterable[ParameterTensor], hidden_size: int
) -> PartitionedStates:
    """Return what each rank keeps of a model.

    Args:
        setup: The training setup, with ``zero_stage: 3``.
        inventory: The whole tensors.
        adapters: Those of adapters.
        hidden_size: What ``auto`` values are multiples of.

    Formula:
        ``ceil(n / ranks)`` elements of each parameter, and that times the ranks where ``n`` is at most the threshold of persistence.
    """
    parallel, width = setup.config.parallel, setup.compute_bytes
    zero, ranks = parallel.deepspeed, parallel.data
    whole = replace(setup, config=replace(setup.config, parallel=replace(parallel, zero_stage=2)))
    states = model_states(whole, inventory, adapters)
    threshold = 10 * hidden_size if zero.persistence_threshold == "auto" else zero.persistence_threshold
    size = hidden_size**2 if zero.reduce_bucket_size == "auto" else zero.reduce_bucket_size
    tensors = [entry.tensor for entry in states.tensors]
    pieces = sum(ceil_div(tensor.elements, ranks) * tensor.count for tensor in tensors)
    small = [tensor for tensor in tensors if tensor.elements <= threshold]
    persistent = sum(ranks * ceil_div(tensor.elements, ranks) * tensor.count for tensor in small)
    groups = [
        part
        for group in trained_groups(trained_tensors(states))
        for part in _parts([ceil_div(tensor.elements, ranks) for _, tensor in group], zero.sub_group_size)
    ]
    stepped = [partition_states(setup, part) for part in groups]
    return PartitionedStates(
        weight_bytes=width * (pieces + persistent),
        master_bytes=sum(part.weight_bytes for part in stepped),
        gradient_bytes=width * sum(groups),
        state_bytes=sum(part.state_bytes for part in stepped),
        bucket_bytes=width * size,
    )


def _parts(sizes: Sequence[int], most: int) -> list[int]:
    """Return elements of the parts that a group is stepped in, each of which ends with the parameter that fills it."""
    parts, part = [], 0
    for size in sizes:
        part += size
        if part >= most:
            parts.append(part)
            part = 0
    return [*parts, part] if part else parts


def held_states(
    setup: TrainingSetup, inventory: Inventory, adapters: Iterable[ParameterTensor], hidden_size: int
) -> ModelStates:
    """Return the states that one rank has of a model under any engine whose step is modelled.

    Raises:
        CannotAnswerError: DeepSpeed's stage 3, of which that alone is known; it stands in the message.
    """
    parallel = setup.config.parallel
    if parallel.engine != "deepspeed" or parallel.zero_stage < 3:
        return rank_states(setup, inventory, adapters)
    kept = partitioned_states(setup, inventory, adapters, hidden_size)
    optimizer = format_bytes(kept.master_bytes + kept.state_bytes)
    raise CannotAnswerError(
        f"{setup.name}: parallel.zero_stage: 3 under DeepSpeed: between steps each of {parallel.data} ranks keeps "
        f"{format_bytes(kept.total_bytes)} (weights {format_bytes(kept.weight_bytes)}, gradients "
        f"{format_bytes(kept.gradient_bytes)}, fp32 weights and states {optimizer}, bucket {format_bytes(kept.bucket_bytes)}); "
        "what a step gathers besides is not modelled, so whether it fits is unknown; stages 1 and 2 are planned"
    )
