"""A grid of batch and sequence length: ``memplan.frontier``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Unpack

from memplan.catalog.catalog import Catalog
from memplan.errors import CannotAnswerError, InvalidFileError
from memplan.library.answers.answer import Answer
from memplan.library.argument_kinds import checked
from memplan.library.job_options import JobOptions, ModelGiven, is_whole, job_inputs, refuse_set
from memplan.plan.memory_plan import Verdict
from memplan.report.document import Document
from memplan.solver.batch_frontier import Frontier

if TYPE_CHECKING:  # each question imports what it alone needs
    from matplotlib.figure import Figure


MOST_CELLS = 100
"""Batches, or lengths, of a grid at most."""
MOST_NUMBERS = 10_000
"""The same with those that are given several times; what is gone through may have no end."""


@dataclass(frozen=True, repr=False, eq=False)
class Grid(Answer):
    """Batch against sequence length on one GPU, and the line between what fits and what does not.

    Attributes:
        frontier: Cells, and the largest batch and longest sequence along each edge.
        catalog: What names were looked up in.
    """

    frontier: Frontier
    catalog: Catalog

    @property
    def verdicts(self) -> dict[tuple[int, int], Verdict]:
        """The verdict of every cell, by micro-batch size and sequence length."""
        return {(cell.batch, cell.length): cell.verdict for row in self.frontier.cells for cell in row}

    @property
    def largest_batches(self) -> dict[int, int]:
        """The largest micro-batch that fits, by sequence length; 0 where none does."""
        return {edge.at: edge.fits.value for edge in self.frontier.by_length}

    @property
    def longest_sequences(self) -> dict[int, int]:
        """The longest sequence that fits, by micro-batch size; 0 where none does."""
        return {edge.at: edge.fits.value for edge in self.frontier.by_batch}

    def document(self, unit: str = "", *, strict: bool = False, full: bool = True, tidy: bool = False) -> Document:
        """Return the answer of ``memplan frontier``.

        Args:
            tidy: Whether each cell is a row of its own, as CSV has it.
        """
        from memplan.report.plans.frontier_answer import frontier_document

        return frontier_document(self.frontier, self.catalog.hash if full else "", unit, strict=strict, tidy=tidy)

    def figure(self) -> Figure:
        """Return the grid as a heat map."""
        from memplan.report.pictures.frontier_map import frontier_map

        return frontier_map(self.frontier)


@checked
def frontier(
    model: ModelGiven = None, *, batches: Iterable[int] = (), lengths: Iterable[int] = (), **options: Unpack[JobOptions]
) -> Grid:
    """Return a grid of batch and sequence length, and the exact line between what fits and what does not.

    Args:
        model: As :func:`memplan.plan` takes it.
        batches: Micro-batches of the grid; powers of two up to 64 where none are given.
        lengths: Sequence lengths of the grid; powers of two from 512 to 32768, as far as the model goes.
        options: Keywords of :class:`memplan.JobOptions`.

    Raises:
        MemplanError: As :func:`memplan.plan` raises it, and for a grid out of range.

    Example:
        >>> import memplan
        >>> grid = memplan.frontier("llama-3.2-1b", gpu="rtx4090", config="lora", batches=[1, 4], lengths=[1024])
        >>> grid.verdicts
        {(1, 1024): 'fits', (4, 1024): 'fits'}
    """
    axes = {"micro_batch_size": "batches are an axis of the grid", "sequence_length": "lengths are an axis of the grid"}
    inputs = job_inputs("frontier", model, options, refused=axes)
    refuse_set(inputs, axes)
    from memplan.plan.planner import CompiledPlan
    from memplan.solver.batch_frontier import DEFAULT_BATCHES, DEFAULT_LENGTHS
    from memplan.solver.batch_frontier import frontier as grid_of

    known = inputs.model()
    device = inputs.device()
    plan = CompiledPlan(known, inputs.setup(known, gpus=inputs.gpus))
    if plan.setup.config.parallel.pipeline > 1:
        raise CannotAnswerError(
            "parallel.pipeline: a grid of batches is not planned over pipelines yet; memplan fit plans one job"
        )
    limit = known.spec.learned_positions or known.spec.max_position_embeddings
    default = tuple(length for length in DEFAULT_LENGTHS if not limit or length <= limit)
    chosen_batches = _numbers("batches", batches, 2**24) or DEFAULT_BATCHES
    chosen_lengths = _numbers("lengths", lengths, 2**30) or default or (limit,)
    return Grid(grid_of(plan, device, chosen_batches, chosen_lengths), inputs.catalog)


def _numbers(name: str, values: Iterable[int], most: int) -> tuple[int, ...]:
    """Return whole numbers, ascending, each once."""
    numbers = list(islice(values, MOST_NUMBERS + 1))
    wrong = not all(is_whole(number, most) for number in numbers) or len(set(numbers)) > MOST_CELLS
    if wrong or len(numbers) > MOST_NUMBERS:
        raise InvalidFileError([f"{name}: expected at most {MOST_CELLS} whole numbers from 1 to {most:,}"])
    return tuple(sorted(set(numbers)))
