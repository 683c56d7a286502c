"""What the ranks of a grid keep between steps against one GPU, and what is left for a step."""

from __future__ import annotations

from typing import Literal

from memplan.hardware.contexts import context_range
from memplan.hardware.hardware_tables import HardwareTables
from memplan.model.model import Model
from memplan.plan.allowances import communicator_of, library_workspace_bytes
from memplan.plan.memory_plan import Device
from memplan.step.grids.grid import Grid
from memplan.step.grids.rank_states import RankStates, StageStates
from memplan.values import dataclass

GridVerdict = Literal["no", "unknown"]


@dataclass(frozen=True, slots=True)
class Outside:
    """What a process takes of a GPU besides tensors, whatever it trains.

    Attributes:
        workspaces: Workspaces of matrix products.
        context: Memory outside the allocator, as expected.
        least_context: The same at the lower end.
        communicators: Groups that the rank communicates in.
        communicator_bytes: Their buffers, as expected.
        most_communicator_bytes: The same at the upper end.
    """

    workspaces: int
    context: int
    least_context: int
    communicators: tuple[str, ...]
    communicator_bytes: int
    most_communicator_bytes: int


@dataclass(frozen=True, slots=True)
class GridPlan:
    """The answer as a value.

    Attributes:
        stages: What the ranks of each pipeline stage keep, the first stage first.
        activations: What forward leaves for backward on the ranks of each stage at once, and logits, at least.
        usable_bytes: What the GPU has for the job.
        outside: What is not tensors.
    """

    model: Model
    device: Device
    grid: Grid
    stages: tuple[StageStates, ...]
    activations: tuple[int, ...]
    usable_bytes: int
    outside: Outside

    @property
    def fullest(self) -> StageStates:
        """The stage whose ranks keep most."""
        return max(self.stages, key=lambda stage: stage.fullest.total)

    @property
    def fullest_rank(self) -> int:
        """The first of all ranks that keep most."""
        return self.first_rank(self.fullest) + self.fullest.fullest_rank

    def first_rank(self, stage: StageStates) -> int:
        """Return the first rank of a stage; ranks of a stage follow each other."""
        return stage.index * (self.grid.world // self.grid.pipeline)

    def rank(self, number: int) -> RankStates:
        """Return what one rank keeps.

        Args:
            number: The rank, from 0 to one less than the GPUs.
        """
        stage, position = divmod(number, self.grid.world // self.grid.pipeline)
        return self.stages[stage].rank(position)

    @property
    def fullest_in_step(self) -> StageStates:
        """The stage whose ranks keep most together with their activations, at least."""
        return max(self.stages, key=lambda stage: stage.fullest.total + self.activations[stage.index])

    @property
    def least_bytes(self) -> int:
        """What the GPU of the rank that is fullest in a step holds then, at least."""
        stage = self.fullest_in_step
        states = stage.fullest.total + self.activations[stage.index]
        return states + self.outside.workspaces + self.outside.least_context

    @property
    def expected_bytes(self) -> int:
        """What it is expected to hold then."""
        outside = self.outside
        return self.fullest.fullest.total + outside.workspaces + outside.context + outside.communicator_bytes

    @property
    def verdict(self) -> GridVerdict:
        """``no`` where not even what is kept between steps and activations fit; what a step takes besides is not modelled."""
        return "no" if self.least_bytes > self.usable_bytes else "unknown"


def outside_of(grid: Grid, device: Device, tables: HardwareTables) -> Outside:
    """Return what a rank's process takes besides tensors.

    Args:
        grid: Degrees of parallelism.
        device: The GPU.
        tables: What is taken on cards.
    """
    groups = communicators(grid)
    figures = [communicator_of(device.gpu, ranks, tables) for ranks in groups.values()]
    context = context_range(device.gpu, tables)
    return Outside(
        library_workspace_bytes(device.gpu, tables),
        context.expected_bytes,
        context.least_bytes,
        tuple(groups),
        sum(figure.expected_bytes for figure in figures),
        sum(figure.most_bytes for figure in figures),
    )


def communicators(grid: Grid) -> dict[str, int]:
    """Return the groups that a rank communicates in, each with its ranks: those of more than one.

    Source:
        megatron/core/parallel_state.py (0.16.1): groups are declared for every degree, and NCCL makes what carries traffic
    """
    groups = {
        "tensor": grid.tensor,
        "pipeline": grid.pipeline,
        "context": grid.context,
        "data": grid.shards * grid.replicate,
        "expert": grid.expert * grid.expert_tensor if grid.expert > 1 else 1,
        "expert data": grid.expert_shards * grid.replicate if grid.expert > 1 else 1,
    }
    return {name: ranks for name, ranks in groups.items() if ranks > 1}
