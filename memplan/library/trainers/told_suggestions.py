"""What to change where a script does not fit: asked of the plan of the same job, where its stack is known."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from memplan.catalog.catalog import Catalog
from memplan.errors import CannotAnswerError, MemplanError
from memplan.library.answers.planned_job import plan
from memplan.library.trainers.imported_file import import_file
from memplan.plan.memory_plan import Device, Suggestion

if TYPE_CHECKING:
    from memplan.dryrun.terms.outcome import ToldJob

WITHIN = 100
"""A plan is of the same job where its requested peak differs by less than one part in so many."""


def suggested(told: ToldJob, requested_bytes: int, device: Device, catalog: Catalog) -> tuple[Suggestion, ...]:
    """Return what to change of a job that does not fit, each with what it saves.

    Raises:
        CannotAnswerError: The job has no plan, or its plan has another peak, so that what it suggests is of another job.
    """
    with TemporaryDirectory(prefix="memplan-run-") as folder:
        (Path(folder) / "config.json").write_text(told.model, encoding="utf-8")
        words = [*told.words, "--model_name_or_path", folder]
        try:
            training = import_file(words).to_dict()["training"]
            config = {"description": "what the script runs", **training, "sequence_length": told.tokens}
            planned = plan(folder, config=config, gpu=device, catalog=catalog)
        except MemplanError as error:
            raise CannotAnswerError(f"this job has no plan ({str(error).splitlines()[0]})") from None
    own = planned.memory.requested_bytes
    if abs(own - requested_bytes) * WITHIN > requested_bytes:
        raise CannotAnswerError(
            f"the plan of what its trainer was given peaks at {own:,} bytes, and the script at {requested_bytes:,}"
        )
    return planned.suggestions
