"""What GPUs send each other in a step, at least: gathered weights, reduced gradients, and rows of shared matrices."""

from __future__ import annotations

from collections.abc import Iterable

from memplan.model.inventory import ParameterTensor
from memplan.model.spec import ModelSpec
from memplan.step.states.parallel_shards import is_flat, is_partitioned, unit
from memplan.training.resolved import TrainingSetup


def divided_sent_bytes(setup: TrainingSetup, spec: ModelSpec, tokens: int) -> int:
    """Return the bytes that each rank sends, at least, to those that it shares matrices with, for one forward and backward.

    Formula:
        ``(8 layers + 4) (T - 1) / T`` times the residual stream: of each layer attention and feed-forward part gather rows and
        reduce and scatter sums, or reduce them everywhere, which is as much; backward mirrors it; so do embedding and head.
        With full checkpointing ``12 layers``, whose forward runs twice.

    Source:
        What passes between ranks: :mod:`memplan.step.divided.divided_ends`; ring algorithms as below.
    """
    ranks = setup.config.parallel.tensor
    stream = tokens * spec.hidden_size * setup.residual_bytes
    each = 12 if setup.checkpointing == "full" else 8
    return (each * spec.num_hidden_layers + 4) * stream * (ranks - 1) // ranks


def sent_bytes(setup: TrainingSetup, inventory: Iterable[ParameterTensor], trained_bytes: int) -> int:
    """Return the bytes that each rank sends, and receives, for one forward and backward; see :func:`sent_by_group`."""
    return sum(sent_by_group(setup, inventory, trained_bytes))


def sent_by_group(setup: TrainingSetup, inventory: Iterable[ParameterTensor], trained_bytes: int) -> tuple[int, int]:
    """Return the bytes that each rank sends for one forward and backward, in the group that divides everything and among groups.

    Formula:
        ``(N - 1) / N`` times: sharded, every layer gathered twice, the rest once, and all gradients
        reduced and scattered, their shares twice among groups; replicated, all gradients twice, as a ring reduces them.

    Args:
        trained_bytes: Gradients of the tensors that are trained, where everything is replicated.

    Source:
        Ring algorithms: https://arxiv.org/abs/1802.05799; what is gathered and when: torch's ``fully_shard``.
    """
    parallel = setup.config.parallel
    if parallel.data == 1:
        return 0, 0
    if is_flat(parallel):  # and the weights that each rank has updated
        return 3 * trained_bytes * (parallel.data - 1) // parallel.data, 0
    if parallel.zero_stage == 0:
        return 2 * trained_bytes * (parallel.data - 1) // parallel.data, 0
    if is_partitioned(parallel):  # gathered twice, and pieces of gradients
        weights = sum(tensor.elements * tensor.count for tensor in inventory) * setup.compute_bytes
        return (2 * weights + trained_bytes * parallel.data) * (parallel.data - 1) // parallel.data, 0
    total, reduced, shards, groups = 0, 0, parallel.shards, parallel.replicate
    for tensor in inventory:
        whole = unit((tensor,), setup)
        times = 2 if "{}" in tensor.name else 1
        total += tensor.count * (times * whole.gathered_bytes + whole.reduced_bytes)
        reduced += tensor.count * whole.reduced_bytes // shards
    return total * (shards - 1) // shards, 2 * reduced * (groups - 1) // groups
