"""Weights, gradients and optimizer states that each rank of a Megatron-LM job keeps between steps, exact to the byte.

Source:
    megatron-core 0.16.1: core/distributed/param_and_grad_buffer.py, core/optimizer/distrib_optimizer.py
    (``_build_model_and_main_param_groups``), core/optimizer/optimizer.py (``Float16OptimizerWithFloat16Params``),
    core/optimizer/optimizer_config.py (lines 187 to 207); that gradients of bf16 weights are kept in fp32 unless said
    otherwise: megatron/training/arguments.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from math import lcm
from operator import add

from memplan.documents.frozen_values import dataclass
from memplan.errors import CannotAnswerError, InvalidFileError
from memplan.model.spec import ModelSpec
from memplan.step.grids.grid import Grid
from memplan.step.grids.megatron_tensors import MegatronBuild, RankTensor, chunk_tensors, expert_bias_bytes
from memplan.step.grids.muon_shares import MOMENTUM_BYTES, Updates, muon_updates
from memplan.step.grids.pipeline_stages import Chunk, StageSplit, chunks_of
from memplan.units import round_up


@dataclass(frozen=True, slots=True)
class RankStates:
    """Bytes that a rank keeps between steps."""

    weights: int  # What products read, paddings of buffers included
    gradients: int  # What gradients are summed in, paddings included; 0 where they are freed between steps
    master_weights: int  # What the optimizer keeps of weights besides them
    optimizer_states: int  # Moments
    buffers: int = 0  # What is neither: numbers that steer the choice of experts
    host: int = 0  # What of the optimizer is in host memory

    @property
    def components(self) -> dict[str, int]:
        """What of it is on the GPU, by name."""
        return {name: size for name, size in asdict(self).items() if name != "host"}

    @property
    def total(self) -> int:
        """All of it that is on the GPU."""
        return self.weights + self.gradients + self.master_weights + self.optimizer_states + self.buffers


@dataclass(frozen=True, slots=True)
class StageStates:
    """A pipeline stage and what its ranks keep."""

    index: int  # The stage, from 0
    layers: int  # How many layers it has
    embeds: bool  # It has the embedding
    ends: bool  # It has the final norm and the head
    # Elements of parameters that each of its ranks has, before they are divided among data parallel ranks.
    parameters: int
    states: tuple[RankStates, ...]  # What its ranks keep, each amount once, the least first
    places: tuple[int, ...]  # For each of its ranks, which of ``states`` it keeps

    @property
    def fullest(self) -> RankStates:
        """What the rank keeps that keeps most."""
        return self.states[-1]

    @property
    def fullest_rank(self) -> int:
        """The first of its ranks that keep most, counted within the stage."""
        return self.places.index(len(self.states) - 1)

    def rank(self, position: int) -> RankStates:
        """Return what one of its ranks keeps.

        Args:
            position: The rank, counted within the stage.
        """
        return self.states[self.places[position]]


LEAST_BUCKET, BUCKET_PER_RANK = 40_000_000, 1_000_000
"""Elements of a bucket where gradients are reduced during backward, and of each data and context rank (``get_model`` in megatron/training/training.py)."""


@dataclass(frozen=True, slots=True)
class MegatronPrecision:
    """Bytes of one element of what is kept."""

    weight_bytes: int = 2  # Weights, 2 or 4
    gradient_bytes: int = 4  # The buffer that gradients are summed in, 2 or 4
    # What the optimizer keeps of a weight: 4, 2 where it keeps only the half that a bf16 weight lacks, 0 where weights
    # are fp32.
    master_bytes: int = 4
    state_bytes: int = 8  # Both moments of Adam together
    host_bytes: int = 0  # Copies, gradients and moments in host memory (``--optimizer-cpu-offload``)


@dataclass(frozen=True, slots=True)
class MegatronSettings:
    """What is told beyond degrees."""

    split: StageSplit = StageSplit()  # Which layers stages have
    build: MegatronBuild = MegatronBuild()  # How the model is built
    precision: MegatronPrecision = MegatronPrecision()  # Bytes of what is kept
    overlap: bool = False  # ``--overlap-grad-reduce``: buffers are cut into buckets
    busy: bool = False  # ``--ddp-pad-buckets-for-high-nccl-busbw``
    bucket_elements: int = 0  # ``--ddp-bucket-size``; 0 for its default
    # ``--ddp-num-buckets``, which divides a rank's parameters for that size; 0 where it is not given
    buckets: int = 0
    # ``whole`` and ``shared``: matrices have Muon, on every rank or on the one that they are given to
    muon: str = "none"

    def __post_init__(self) -> None:
        """Refuse two sizes of buckets.

        Raises:
            InvalidFileError: Both are given, which Megatron-LM refuses too.
        """
        if self.bucket_elements and self.buckets:
            text = "buckets and bucket_elements both say how large buckets are; give one"
            raise InvalidFileError([f"parallel.megatron: {text}"])


def megatron_states(spec: ModelSpec, grid: Grid, settings: MegatronSettings) -> tuple[StageStates, ...]:
    """Return what the ranks of every stage keep, the first stage first.

    Args:
        grid: Degrees of parallelism; stage 1 is the distributed optimizer.

    Raises:
        CannotAnswerError: Megatron-LM has no such model or division, or it is not modelled.
        InvalidFileError: A degree does not divide what it has to.
    """
    if grid.zero_stage > 1:
        raise CannotAnswerError(
            f"parallel.zero_stage: {grid.zero_stage} under Megatron-LM is another engine (Megatron-FSDP or torch's), which is not modelled; "
            "use 1, its distributed optimizer, or 0"
        )
    if grid.replicate > 1 and not grid.zero_stage:
        raise InvalidFileError(["parallel.replicate: without --zero 1 nothing is divided that could be replicated"])
    stages = chunks_of(spec.num_hidden_layers, grid, settings.split)
    return tuple(_stage(spec, grid, settings, index, chunks) for index, chunks in enumerate(stages))


def _stage(spec: ModelSpec, grid: Grid, settings: MegatronSettings, index: int, chunks: Sequence[Chunk]) -> StageStates:
    """Return what the ranks of one stage keep: the sum over its chunks, whose buffers are apart.

    Ranks count the tensor degree fastest, then context and data (``tp-cp-ep-dp-pp``, the default order); those of experts
    their own tensor degree, then the expert degree.
    """
    parts = [chunk_tensors(spec, grid, chunk, settings.build) for chunk in chunks]
    parameters = sum(tensor.elements for tensors in parts for tensor in tensors)
    biases = sum(expert_bias_bytes(spec, chunk, settings.build.predicted) for chunk in chunks)
    size = _bucket_elements(grid, settings, parameters) if index == 0 and settings.overlap else 0
    buffers = [_buffers(tensors, grid, settings, 0 if virtual else size) for virtual, tensors in enumerate(parts)]
    resident = sum(buffer.elements for pair in buffers for buffer in pair)
    dense, experts = _updates(parts, grid, settings, buffers)
    apart, precision = grid.expert_tensor * grid.expert, settings.precision
    updated = [
        tuple(map(add, dense[rank // grid.tensor % grid.shards], experts[rank // apart % grid.expert_shards]))
        for rank in range(grid.world // grid.pipeline)
    ]
    weights = (resident if grid.zero_stage else parameters) * precision.weight_bytes
    own = {
        (elements, orthogonal): RankStates(
            weights,
            resident * precision.gradient_bytes,
            elements * precision.master_bytes,
            (elements - orthogonal) * precision.state_bytes + orthogonal * MOMENTUM_BYTES,
            biases,
            elements * precision.host_bytes,
        )
        for elements, orthogonal in sorted(set(updated))
    }
    states = tuple(sorted(own.values(), key=lambda state: (state.total, state.host)))
    layers = sum(chunk.count for chunk in chunks)
    ends = chunks[0].embeds, chunks[-1].ends
    places = {count: states.index(state) for count, state in own.items()}
    return StageStates(index, layers, *ends, parameters, states, tuple(places[count] for count in updated))


def _updates(
    parts: Sequence[Sequence[RankTensor]],
    grid: Grid,
    settings: MegatronSettings,
    buffers: Sequence[tuple[FlatBuffer, FlatBuffer]],
) -> tuple[Updates, Updates]:
    """Return what each rank updates of what is no expert, and of experts."""
    if settings.muon == "none":
        dense, experts = (
            tuple((sum(rank), 0) for rank in zip(*(buffer.updated for buffer in group), strict=True))
            for group in zip(*buffers, strict=True)
        )
        return dense, experts
    shared, tensors = settings.muon == "shared", [tensor for part in parts for tensor in part]
    return (
        muon_updates([tensor for tensor in tensors if not tensor.expert], grid.shards, shared=shared),
        muon_updates([tensor for tensor in tensors if tensor.expert], grid.expert_shards, shared=shared),
    )


def _bucket_elements(grid: Grid, settings: MegatronSettings, parameters: int) -> int:
    """Return the elements from which on a bucket of a rank with so many parameters is full (``get_model`` in megatron/training/training.py)."""
    if settings.buckets:
        return max(parameters // settings.buckets, 1)
    return settings.bucket_elements or max(LEAST_BUCKET, BUCKET_PER_RANK * grid.data * grid.context)


def _buffers(
    tensors: Sequence[RankTensor], grid: Grid, settings: MegatronSettings, size: int
) -> tuple[FlatBuffer, FlatBuffer]:
    """Return the buffers of what is no expert and of experts, whose buckets are full from ``size`` elements on; 0 is one bucket."""
    sharded, busy = grid.zero_stage == 1, settings.busy
    dense = Bucketing(grid.shards, sharded, size, busy)
    expert = Bucketing(grid.expert_shards, sharded, size, busy)
    return (
        flat_buffer([tensor for tensor in tensors if not tensor.expert], dense),
        flat_buffer([tensor for tensor in tensors if tensor.expert], expert),
    )


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
