"""What the ranks of a grid keep between steps and take in a step, against one GPU."""

from fractions import Fraction
from typing import Literal

from memplan.catalog.hardware.contexts import context_range
from memplan.catalog.hardware.hardware_tables import HardwareTables
from memplan.catalog.shipped_tables import ReserveShare
from memplan.documents.frozen_values import dataclass
from memplan.model.model import Model
from memplan.plan.allowances import communicator_of, library_workspace_bytes
from memplan.plan.memory_plan import Device
from memplan.step.grids.grid import Grid
from memplan.step.grids.megatron_peaks import StepInterval
from memplan.step.grids.megatron_states import RankStates, StageStates

GridVerdict = Literal["fits", "tight", "no", "unknown"]


@dataclass(frozen=True, slots=True)
class Outside:
    """What a process takes of a GPU besides tensors, whatever it trains."""

    workspaces: int  # Workspaces of matrix products
    context: int  # Memory outside the allocator, as expected
    least_context: int  # The same at the lower end
    most_context: int  # The same at the upper end
    communicators: tuple[str, ...]  # Groups that the rank communicates in
    communicator_bytes: int  # Their buffers, as expected
    most_communicator_bytes: int  # The same at the upper end
    reserve: Fraction  # Share of the allocated bytes that the allocator holds besides, as expected
    most_reserve: Fraction  # The same at the upper end


@dataclass(frozen=True, slots=True)
class GridPlan:
    """The answer as a value."""

    model: Model
    device: Device
    grid: Grid
    stages: tuple[StageStates, ...]  # What the ranks of each pipeline stage keep, the first stage first
    steps: tuple[StepInterval, ...]  # What a step takes besides on the ranks of each stage
    usable_bytes: int  # What the GPU has for the job
    outside: Outside  # What is not tensors
    unplanned: tuple[str, ...] = ()  # What of a step is not modelled; with any, ``steps`` say nothing

    @property
    def fullest(self) -> StageStates:
        """The stage whose ranks hold most in a step, as expected."""
        return max(self.stages, key=self.expected_of)

    @property
    def fullest_rank(self) -> int:
        """The first of all ranks that hold most in a step."""
        return self.fullest_of(self.fullest)

    def fullest_of(self, stage: StageStates) -> int:
        """Return the first of a stage's ranks that keep most."""
        return self.grid.rank_at(stage.index, stage.fullest_rank)

    def rank(self, number: int) -> RankStates:
        """Return what one rank keeps.

        Args:
            number: The rank, from 0 to one less than the GPUs.
        """
        stage, position = self.grid.place_of(number)
        return self.stages[stage].rank(position)

    @property
    def persistent_bytes(self) -> int:
        """What the ranks that keep most keep between steps."""
        return max(stage.fullest.total for stage in self.stages)

    def expected_of(self, stage: StageStates) -> int:
        """Return what the fullest rank of a stage is expected to hold in a step."""
        allocated = self._allocated(stage.fullest, self.steps[stage.index].expected)
        return allocated + self.reserved_of(allocated) + self.outside.context + self.outside.communicator_bytes

    def reserved_of(self, allocated_bytes: int) -> int:
        """Return what the allocator is expected to hold besides."""
        return int(allocated_bytes * self.outside.reserve)

    def _allocated(self, states: RankStates, step: int) -> int:
        return states.total + step + self.outside.workspaces

    @property
    def expected_bytes(self) -> int:
        """What the GPU of the fullest rank is expected to hold in a step."""
        return max(map(self.expected_of, self.stages))

    @property
    def fullest_at_least(self) -> int:
        """The first of all ranks that hold most in a step at the lower end."""
        stage = max(self.stages, key=lambda stage: self._allocated(stage.fullest, self.steps[stage.index].least))
        return self.fullest_of(stage)

    @property
    def least_bytes(self) -> int:
        """What the GPU of the rank that is fullest in a step holds then, at least."""
        allocated = (self._allocated(stage.fullest, self.steps[stage.index].least) for stage in self.stages)
        return max(allocated) + self.outside.least_context

    @property
    def upper_bytes(self) -> int:
        """What it holds at most, beside collectives' buffers inside the allocator."""
        outside = self.outside
        between = [4 * stage.parameters for stage in self.stages]
        allocated = max(
            self._allocated(stage.fullest, max(self.steps[stage.index].most, copies))
            for stage, copies in zip(self.stages, between, strict=True)
        )
        return (
            allocated + int(allocated * outside.most_reserve) + outside.most_context + outside.most_communicator_bytes
        )

    @property
    def verdict(self) -> GridVerdict:
        """``fits`` at the upper end, ``tight`` as expected alone, ``no`` where not even the lower end fits; else ``unknown``."""
        usable = self.usable_bytes
        if self.unplanned:
            return "no" if self.least_bytes > usable else "unknown"
        if self.upper_bytes <= usable:
            return "fits"
        return "tight" if self.expected_bytes <= usable else "no" if self.least_bytes > usable else "unknown"


def outside_of(grid: Grid, device: Device, tables: HardwareTables, share: ReserveShare) -> Outside:
    """Return what a rank's process takes besides tensors.

    Args:
        share: What the allocator needs beyond what it hands out.
    """
    groups = communicators(grid)
    figures = [communicator_of(device.gpu, ranks, tables) for ranks in groups.values()]
    context = context_range(device.gpu, tables)
    return Outside(
        workspaces=library_workspace_bytes(device.gpu, tables),
        context=context.expected_bytes,
        least_context=context.least_bytes,
        most_context=context.most_bytes,
        communicators=tuple(groups),
        communicator_bytes=sum(figure.expected_bytes for figure in figures),
        most_communicator_bytes=sum(figure.most_bytes for figure in figures),
        reserve=Fraction(share.expected_per_mille, 1000),
        most_reserve=Fraction(share.upper_per_mille, 1000),
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
