"""The ranks of a pipeline side by side."""

from __future__ import annotations

from memplan.catalog.config_keys.parallel_keys import Parallel
from memplan.documents.frozen_values import dataclass
from memplan.step.pipelines.pipeline_schedules import stages_of
from memplan.step.pipelines.rank_timeline import most_pairs
from memplan.step.pipelines.stage_layers import layers_of_stages


@dataclass(frozen=True, slots=True)
class RankRow:
    """One rank of a pipeline."""

    rank: int  # From 0
    stages: tuple[int, ...]  # Of the pipeline that it has
    layers: tuple[int, ...]  # Of each of these
    embedding: bool  # Whether it has the embedding
    head: bool  # Whether it has final norm and head
    pairs: int  # Most micro-batches in flight at a time, counted for each of its stages
    persistent_bytes: int  # What it keeps between steps
    instant: str  # When it needs most
    requested_bytes: int  # What it requests then
    device_bytes: int  # What its GPU holds then


def rank_row(
    rank: int, parallel: Parallel, layers: int, persistent_bytes: int, instant: str, requested: int, device: int
) -> RankRow:
    """Return the row of a rank.

    Args:
        rank: From 0.
        persistent_bytes: What it keeps between steps.
        instant: When it needs most.
        requested: Bytes that it requests then.
        device: Bytes that its GPU holds then.
    """
    sizes, own = layers_of_stages(layers, parallel), stages_of(rank, parallel)
    resident, pairs = tuple(sizes[stage] for stage in own), most_pairs(rank, parallel)
    ends = 0 in own, len(sizes) - 1 in own
    return RankRow(rank, own, resident, *ends, pairs, persistent_bytes, instant, requested, device)
