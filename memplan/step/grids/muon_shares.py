"""What each data parallel rank of a Megatron-LM job updates where matrices have Muon: everything, or whole tensors of its own.

Source:
    megatron-core 0.16.1: core/optimizer/muon.py (``get_megatron_muon_optimizer``: matrices but the embedding's and the head's have Muon,
    the rest has Adam), core/optimizer/layer_wise_optimizer.py (``shard_params``); NVIDIA-NeMo/Emerging-Optimizers,
    emerging_optimizers/orthogonalized_optimizers/orthogonalized_optimizer.py: a momentum like the fp32 gradient.
"""

from collections.abc import Sequence

from memplan.step.grids.megatron_tensors import RankTensor

MOMENTUM_BYTES = 4
"""``momentum_buffer`` of an element, in fp32."""
Updates = tuple[tuple[int, int], ...]
"""For each rank the elements that it updates, and how many of them by Muon."""
_ENDS = ("embedding.word_embeddings.weight", "output_layer.weight")
"""What ``is_embedding_or_output_parameter`` is set on (core/models/common/language_module/language_module.py); learned positions are not."""


def muon_updates(tensors: Sequence[RankTensor], ranks: int, *, shared: bool) -> Updates:
    """Return what each rank of a group updates.

    Args:
        tensors: The parameters of a stage that the group has in common.
        shared: Whether each tensor is updated by one rank alone: the least go first, to the ranks in turn, there and back.
    """
    sizes = [(tensor.elements, tensor.elements * _orthogonal(tensor)) for tensor in tensors]
    if not shared:
        return ((sum(size for size, _ in sizes), sum(size for _, size in sizes)),) * ranks
    own = [[0, 0] for _ in range(ranks)]
    turn = [*range(ranks), *reversed(range(ranks))]
    sizes.sort(key=lambda each: (each[0], -each[1]))
    for position, each in enumerate(sizes):
        rank = own[turn[position % len(turn)]]
        rank[0] += each[0]
        rank[1] += each[1]
    return tuple((size, orthogonal) for size, orthogonal in own)


def _orthogonal(tensor: RankTensor) -> bool:
    return len(tensor.shape) == 2 and tensor.name not in _ENDS
