"""nanochat's optimizer: matrices of one shape are stacked and updated together, and GPUs that all have the weights share out states.

Source:
    ``MuonAdamW`` and ``DistMuonAdamW`` in nanochat/optim.py of https://github.com/karpathy/nanochat; what ``muon_step_fused`` has
    alive is read from the program that Inductor writes for it (torch 2.13.0), whose buffers are the next iterates in bf16
    that the last update reads, and two Gram matrices.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod

from memplan.errors import CannotAnswerError
from memplan.model.inventory import ParameterTensor
from memplan.step.states.update_algorithms import Scratch
from memplan.step.tensors.tensor_states import TensorStates
from memplan.units import ceil_div

SMALL = 1024
"""Elements below which AdamW's tensors are reduced, and their states kept, whole (``_reduce_adamw``)."""
ITERATES, SQUARE_ITERATES, GRAMS = 5, 6, 2
"""Buffers of a stack's size in bf16 that are there at once, and of its Gram matrices; of square ones these are among the former."""
FP32, BF16 = 4, 2

Shape = tuple[int, ...]


def stack_sizes(entries: Iterable[TensorStates]) -> dict[Shape, int]:
    """Return how many matrices of each shape are updated as one stack."""
    sizes: dict[Shape, int] = {}
    for entry in entries:
        if entry.optimizer.takes == "matrices":
            sizes[entry.tensor.shape] = sizes.get(entry.tensor.shape, 0) + entry.tensor.count
    return sizes


def orthogonalising_bytes(count: int, shape: Shape) -> int:
    """Return what the update of a stack of matrices forms in bf16.

    Formula:
        ``2 k (5 m n + 2 m^2)`` for ``k`` matrices whose smaller side is ``m``; ``12 k m^2`` for square ones.
    """
    m, n = sorted(shape)
    return BF16 * count * (SQUARE_ITERATES * m * m if m == n else ITERATES * m * n + GRAMS * m * m)


def stacked_scratch(entries: Sequence[TensorStates], ranks: int) -> Scratch:
    """Return the scratch memory of a step, and how it comes about.

    On one GPU a stack of gradients and one of weights. Of several, a rank first has stacks of all gradients, and its part of them
    and of AdamW's gradients, which stay; then, of one shape after the other, the weights that it updates twice.
    """
    sizes = stack_sizes(entries)
    if ranks == 1:
        alone = [2 * FP32 * count * prod(shape) + orthogonalising_bytes(count, shape) for shape, count in sizes.items()]
        return max(alone, default=0), "gradients and weights of one shape stacked, and what orthogonalises them in bf16"
    slices = sum(
        _slice_bytes(entry.tensor, entry.gradient_bytes, ranks) * entry.tensor.count
        for entry in entries
        if entry.optimizer.takes == "all" and entry.tensor.elements >= SMALL
    )
    most, standing = 0, slices
    chunks = {shape: ceil_div(count, ranks) for shape, count in sizes.items()}
    for shape in sorted(sizes):
        stacked = FP32 * chunks[shape] * ranks * prod(shape)
        most = max(most, standing + stacked + FP32 * sizes[shape] * prod(shape))
        standing += stacked + FP32 * chunks[shape] * prod(shape)
    updates = [2 * FP32 * count * prod(shape) + orthogonalising_bytes(count, shape) for shape, count in chunks.items()]
    text = f"gradients of all matrices stacked, the part of rank 0 of {ranks}, and the update of one shape's"
    return max(most, standing + max(updates, default=0)), text


def _slice_bytes(tensor: ParameterTensor, size: int, ranks: int) -> int:
    """Return a rank's rows of what belongs to a tensor.

    Raises:
        CannotAnswerError: They do not divide, at which nanochat stops.
    """
    if tensor.shape[0] % ranks:
        raise CannotAnswerError(
            f"parallel.data: {ranks} GPUs do not share the {tensor.shape[0]:,} rows of {tensor.name}, at which nanochat's optimizer stops"
        )
    return size // ranks


def shared_states(entries: Sequence[TensorStates], ranks: int) -> list[TensorStates]:
    """Return the states that the first rank keeps: those of its rows of AdamW's tensors, and of its part of each stack."""
    sizes = stack_sizes(entries)

    def own(entry: TensorStates) -> int:
        if entry.optimizer.takes == "all":
            small = entry.tensor.elements < SMALL
            return entry.state_bytes if small else _slice_bytes(entry.tensor, entry.state_bytes, ranks)
        count = sizes[entry.tensor.shape]
        return entry.state_bytes * ceil_div(count, ranks) // count

    return [replace(entry, state_bytes=own(entry)) for entry in entries]


def shared_state_bytes(entries: Sequence[TensorStates], ranks: int) -> int:
    """Return the bytes of :func:`shared_states`, in which a stack's part is of whole matrices."""
    states = {entry.tensor.shape: entry.state_bytes for entry in entries if entry.optimizer.takes == "matrices"}
    stacked = sum(ceil_div(count, ranks) * states[shape] for shape, count in stack_sizes(entries).items())
    rows = [entry for entry in shared_states(entries, ranks) if entry.optimizer.takes == "all"]
    return stacked + sum(entry.state_bytes * entry.tensor.count for entry in rows)
