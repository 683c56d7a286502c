"""Megatron-LM's flat buffers: where each parameter's gradient lies, and which part of it a data parallel rank updates.

Parameters are laid out from the last to the first. With the distributed optimizer each starts at a multiple of 64
elements, a bucket ends at a multiple of 128 and of the ranks, and every rank has an equal piece of every bucket, cut
anywhere; paddings have no states, so that ranks differ by what of them falls into their pieces.

Source:
    ``_ParamAndGradBuffer`` in megatron/core/distributed/param_and_grad_buffer.py, ``DistributedDataParallel`` in
    distributed_data_parallel.py, ``DistributedOptimizer._build_gbuf_range_map`` in core/optimizer/distrib_optimizer.py (0.16.1)
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm

from memplan.step.grids.megatron_tensors import RankTensor
from memplan.units import round_up
from memplan.values import dataclass

START_MULTIPLE, BUCKET_MULTIPLE, BUSY_MULTIPLE = 64, 128, 2**16
"""Elements that a parameter starts at a multiple of, that a bucket ends at one of, and with ``pad_buckets_for_high_nccl_busbw``."""


@dataclass(frozen=True, slots=True)
class Bucketing:
    """How buffers are cut."""

    ranks: int  # Data parallel ranks among which each bucket is divided
    sharded: bool  # With the distributed optimizer; else gradients lie one after the other without gaps
    bucket_elements: int = 0  # Elements from which on a bucket is full; 0 for a single bucket
    busy: bool = False  # Buckets end at a multiple of 2**16 elements too


@dataclass(frozen=True, slots=True)
class FlatBuffer:
    """A buffer as it is laid out."""

    elements: int  # Its size, gaps included
    updated: tuple[int, ...]  # Elements of parameters that each rank updates, from the first rank to the last


def flat_buffer(tensors: Sequence[RankTensor], bucketing: Bucketing) -> FlatBuffer:
    """Return the layout of the parameters of one chunk that one group reduces.

    Args:
        tensors: The parameters in the order of the model.
    """
    if not bucketing.sharded:
        size = sum(tensor.elements for tensor in tensors)
        return FlatBuffer(size, (size,) * bucketing.ranks)
    multiple = lcm(bucketing.ranks, BUCKET_MULTIPLE, *((BUSY_MULTIPLE,) if bucketing.busy else ()))
    updated = [0] * bucketing.ranks
    start = position = 0
    spans: list[tuple[int, int]] = []
    for tensor in reversed(tensors):
        position = round_up(position, START_MULTIPLE)
        if tensor.shared and spans:
            start = position = _close(spans, start, round_up(position, multiple), updated)
        end = position + tensor.elements
        spans.append((position, end))
        position = end
        if tensor.shared or 0 < bucketing.bucket_elements <= end - start:
            start = position = _close(spans, start, round_up(end, multiple), updated)
    if spans:
        position = _close(spans, start, round_up(position, multiple), updated)
    return FlatBuffer(position, tuple(updated))


def _close(spans: list[tuple[int, int]], start: int, end: int, updated: list[int]) -> int:
    """End a bucket: add what of its parameters each rank's piece has, forget them, and return the end."""
    piece = (end - start) // len(updated)
    for low, high in spans:
        for rank in range((low - start) // piece, -(-(high - start) // piece)):
            begin = start + rank * piece
            updated[rank] += min(high, begin + piece) - max(low, begin)
    spans.clear()
    return end
