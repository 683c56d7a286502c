"""What one rank keeps between steps, and the ranks of a stage."""

from __future__ import annotations

from memplan.documents.frozen_values import dataclass


@dataclass(frozen=True, slots=True)
class RankStates:
    """Bytes that a rank keeps between steps."""

    weights: int  # What products read, paddings of buffers included
    gradients: int  # What gradients are summed in, paddings included; 0 where they are freed between steps
    master_weights: int  # What the optimizer keeps of weights besides them
    optimizer_states: int  # Moments
    buffers: int = 0  # What is neither: numbers that steer the choice of experts

    @property
    def total(self) -> int:
        """All of it."""
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
