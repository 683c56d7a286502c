"""What the ranks of a job hold that several GPUs share: ``memplan.plan_ranks``."""

from dataclasses import dataclass
from typing import Unpack

from memplan.errors import CannotAnswerError, InvalidFileError
from memplan.library.answers.answer import Answer
from memplan.library.argument_kinds import checked
from memplan.library.job_options import JobOptions, ModelGiven, job_inputs
from memplan.plan.grids.distinct_ranks import RankRow, rank_rows
from memplan.plan.memory_plan import MemoryPlan, Verdict
from memplan.plan.planner import CompiledPlan
from memplan.plan.reserve.simulation import simulated
from memplan.report.document import Document


@dataclass(frozen=True, repr=False, eq=False)
class Ranks(Answer):
    """What the ranks of a job hold.

    Attributes:
        rows: Ranks that hold the same, the first rank first.
        memory: The first rank's plan.
    """

    rows: tuple[RankRow, ...]
    memory: MemoryPlan

    @property
    def verdict(self) -> Verdict:
        """The verdict of the fullest rank."""
        return max(self.rows, key=lambda row: row.upper_bytes).verdict

    def document(self, unit: str = "", *, strict: bool = False, full: bool = True) -> Document:  # noqa: ARG002
        """Return the answer of ``memplan fit --rank``."""
        from memplan.report.layouts.layouts_answer import ranks_document

        return ranks_document(self.rows, self.memory, unit, strict=strict)


@checked
def plan_ranks(model: ModelGiven = None, *, rank: str = "all", **options: Unpack[JobOptions]) -> Ranks:
    """Return what the ranks of a job hold.

    Args:
        model: As :func:`memplan.plan` takes it.
        rank: ``all``, or the number of one.
        options: Keywords of :class:`memplan.JobOptions`.

    Raises:
        InvalidFileError: A rank that the job does not have.
        CannotAnswerError: DeepSpeed runs it, or ranks that share matrices have uneven parts of the vocabulary.
        MemplanError: As :func:`memplan.plan` raises it.

    Example:
        >>> import memplan
        >>> answer = memplan.plan_ranks("llama-3.2-1b", gpu="rtx4090", config="bf16-adamw", gpus=12)
        >>> [(row.first, row.last) for row in answer.rows]
        [(0, 10), (11, 11)]
    """
    inputs = job_inputs("plan_ranks", model, options)
    known, device = inputs.model(), inputs.device()
    compiled = CompiledPlan(known, inputs.setup(known, gpus=inputs.gpus))
    parallel = compiled.setup.config.parallel
    if parallel.pipeline > 1:
        raise InvalidFileError(
            [
                "--rank does not apply to a pipeline, all of whose ranks are planned and listed (but for --stack megatron): "
                "leave it out, or plan one of them with --set parallel.stage=N"
            ]
        )
    if known.spec.vocab_size % parallel.tensor:
        raise CannotAnswerError(
            f"--rank: {parallel.tensor} GPUs do not share a vocabulary of {known.spec.vocab_size:,} evenly; only the first rank, which has most, is planned"
        )
    plan = simulated(compiled.evaluate(device))
    rows = rank_rows(compiled, plan)
    if rank != "all":
        rows = (_row_of(rank, rows, compiled),)
    return Ranks(rows, plan)


def _row_of(rank: str, rows: tuple[RankRow, ...], compiled: CompiledPlan) -> RankRow:
    """Return the row that a rank is in: ranks that share matrices are neighbours, then those of a group."""
    parallel = compiled.setup.config.parallel
    if not (rank.isascii() and rank.isdigit() and int(rank) < parallel.gpus):
        raise InvalidFileError(
            [f"--rank: expected worst, all or a number from 0 to {parallel.gpus - 1:,}, got {rank!r}"]
        )
    place = int(rank) // parallel.tensor % (rows[-1].last + 1)
    return next(row for row in rows if row.first <= place <= row.last)
