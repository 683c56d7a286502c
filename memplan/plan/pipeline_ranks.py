"""The ranks of a pipeline side by side, and the fullest of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from memplan.step.pipelines.pipeline_schedules import stages_of
from memplan.step.pipelines.rank_timeline import most_pairs
from memplan.step.pipelines.stage_layers import layers_of_stages
from memplan.values import dataclass

if TYPE_CHECKING:
    from memplan.plan.memory_plan import MemoryPlan
    from memplan.training.resolved import TrainingSetup


@dataclass(frozen=True, slots=True)
class RankRow:
    """One rank of a pipeline.

    Attributes:
        rank: From 0.
        stages: Of the pipeline that it has.
        layers: Of each of these.
        embedding: Whether it has the embedding.
        head: Whether it has final norm and head.
        pairs: Most micro-batches in flight at a time, counted for each of its stages.
        persistent_bytes: What it keeps between steps.
        instant: When it needs most.
        requested_bytes: What it requests then.
        device_bytes: What its GPU holds then.
    """

    rank: int
    stages: tuple[int, ...]
    layers: tuple[int, ...]
    embedding: bool
    head: bool
    pairs: int
    persistent_bytes: int
    instant: str
    requested_bytes: int
    device_bytes: int


def fullest_rank(plans: Sequence[MemoryPlan], setup: TrainingSetup) -> MemoryPlan:
    """Return the plan of the rank whose GPU holds most, the first of equals, with a row for each.

    Args:
        plans: Of every rank, in order.
        setup: Of the job, which names no rank.
    """
    rows = tuple(_row(number, plan) for number, plan in enumerate(plans))
    return replace(max(plans, key=lambda plan: plan.device_bytes), setup=setup, ranks=rows)


def _row(rank: int, plan: MemoryPlan) -> RankRow:
    parallel = plan.setup.config.parallel
    sizes, own = layers_of_stages(plan.model.spec.num_hidden_layers, parallel), stages_of(rank, parallel)
    return RankRow(
        rank,
        own,
        tuple(sizes[stage] for stage in own),
        0 in own,
        len(sizes) - 1 in own,
        most_pairs(rank, parallel),
        plan.persistent_bytes,
        plan.peak.name,
        plan.requested_bytes,
        plan.device_bytes,
    )
