"""What GPUs send each other in a step, at least: gathered weights, reduced gradients, and rows of shared matrices."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

from memplan.model.inventory import ParameterTensor
from memplan.model.spec import Attention, MixtureOfExperts, ModelSpec
from memplan.step.collectives.gathered_units import unit
from memplan.step.states.parallel_shards import cut, is_flat, is_partitioned
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


def exchanged_bytes(setup: TrainingSetup, spec: ModelSpec, tokens: int) -> int:
    """Return the bytes that each rank sends to those that it shares experts with, for one forward and backward of evenly routed rows.

    Formula:
        ``4 K (E - 1) / E`` times the tokens as experts read them: rows go to their experts and come back, and so do gradients;
        with full checkpointing ``6 K``, whose forward runs twice; selective keeps what has arrived.

    Source:
        ``AllToAllTokenDispatcher`` in torchtitan/models/common/token_dispatcher.py, ``_get_default_save_ops`` in
        distributed/activation_checkpoint.py (0.3.0).
    """
    ranks, total = setup.config.parallel.expert, 0
    for run in spec.runs:
        if isinstance(part := run.layer.feed_forward, MixtureOfExperts):
            times = 6 if setup.checkpointing == "full" else 4
            total += run.count * times * part.experts_per_token * tokens * spec.hidden_size * setup.compute_bytes
    return total * (ranks - 1) // ranks


def gathered_keys_bytes(setup: TrainingSetup, spec: ModelSpec, tokens: int) -> int:
    """Return the bytes of keys and values that each rank sends to those that it shares sequences with, for one forward and backward.

    Formula:
        ``2 (C - 1) / C`` times all keys and values, which a ring gathers and whose gradients it reduces; with checkpointing of
        either kind ``3``, whose forward runs twice.

    Args:
        tokens: Of the whole sequences.

    Source:
        ``flex_cp_allgather`` in torch/distributed/tensor/experimental/_context_parallel/_cp_custom_ops.py (v2.13.0).
    """
    parallel, total = setup.config.parallel, 0
    times = 2 if setup.checkpointing == "none" else 3
    for run in spec.runs:
        if isinstance(heads := run.layer.attention, Attention):
            total += run.count * 2 * heads.key_value_size * tokens * setup.compute_bytes // parallel.tensor
    return times * total * (parallel.context - 1) // parallel.context


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
    if parallel.data * parallel.context == 1:
        return 0, 0
    if is_flat(parallel):  # and the weights that each rank has updated
        return 3 * trained_bytes * (parallel.data - 1) // parallel.data, 0
    if parallel.zero_stage == 0:
        return 2 * trained_bytes * (parallel.data - 1) // parallel.data, 0
    if is_partitioned(parallel):  # gathered twice, and pieces of gradients
        weights = sum(tensor.elements * tensor.count for tensor in inventory) * setup.compute_bytes
        return (2 * weights + trained_bytes * parallel.data) * (parallel.data - 1) // parallel.data, 0
    sent, reduced, groups = Fraction(0), 0, parallel.replicate
    for tensor in inventory:
        whole, (shards, _) = unit((tensor,), setup), cut(tensor, parallel)
        times = 2 if "{}" in tensor.name else 1
        sent += Fraction(tensor.count * (times * whole.gathered_bytes + whole.reduced_bytes) * (shards - 1), shards)
        reduced += tensor.count * whole.reduced_bytes // shards
    return int(sent), 2 * reduced * (groups - 1) // groups
