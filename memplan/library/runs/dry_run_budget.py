"""A dry run against a job of a budget file: ``memplan run --check``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from memplan.budget.budget_files import read_budget
from memplan.budget.budget_jobs import Job
from memplan.budget.evaluation import Figures, Finding, evaluated
from memplan.errors import InvalidFileError, UnknownNameError, match_hint
from memplan.plan.memory_plan import Verdict


def budgeted_job(file: Path, script: str) -> Job:
    """Return the job that bears a script's name, or the only one of its file; what it may grow by is not for runs.

    Args:
        script: Path of the script, or the name of a module.

    Raises:
        InvalidFileError: The file is no budget.
        UnknownNameError: It has no job of that name.
    """
    budget = read_budget(file)
    if budget.problems:
        raise InvalidFileError(list(budget.problems))
    name = Path(script).stem if script.endswith(".py") else script.rpartition(".")[2]
    jobs = {job.name: job for job in budget.jobs}
    if name not in jobs and len(jobs) > 1:
        raise UnknownNameError(f"{file}: no job is called {name!r}, as the script is{match_hint(name, jobs)}")
    return replace(jobs.get(name, budget.jobs[0]), increase=None)


def findings(
    job: Job, device: str, device_bytes: int, usable_bytes: int, components: Mapping[str, int], *, fits: bool
) -> tuple[Finding, ...]:
    """Return what of a run is over the budget of a job, worst first.

    Args:
        device_bytes: What the run needs on it, with the context.
        components: Name -> bytes at the peak.
        fits: Whether the allocator gets by.
    """
    verdict: Verdict = "fits" if fits else "no"
    figures = Figures(device, verdict, device_bytes, device_bytes, usable_bytes, components, "", "")
    return evaluated(job, figures, None).findings
