"""Whether the jobs of a repository are within their budgets: ``memplan.check``."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from memplan.budget.baseline import Baseline, baseline_text, read_baseline
from memplan.budget.budget_files import BudgetFile, read_budget
from memplan.budget.budget_jobs import DEFAULT_FILE
from memplan.budget.evaluation import Result, baseline_of, exit_code, worst_first
from memplan.catalog.catalog import Catalog
from memplan.documents.opening import path_kind, shown_path, whole_path
from memplan.documents.writing import write_file
from memplan.errors import CannotAnswerError, InvalidFileError
from memplan.library.answers.answer import Answer
from memplan.library.argument_kinds import checked
from memplan.library.budget_plans import Workshop
from memplan.library.job_options import FilePath, catalog_of
from memplan.report.checks.check_answer import VERDICTS, check_document
from memplan.report.document import Document


@dataclass(frozen=True, repr=False, eq=False)
class Check(Answer):
    """The jobs of a budget file against their budgets.

    Attributes:
        results: One for each job on each GPU of it, the worst first.
        file: The budget file.
        baseline: The file of the baseline, which need not be there.
        catalog: What names were looked up in.
    """

    results: tuple[Result, ...]
    file: str
    baseline: Path
    catalog: Catalog

    @property
    def verdict(self) -> str:
        """``within`` where all are, ``over`` where one is not, else ``cannot`` where one cannot be evaluated."""
        return VERDICTS[exit_code(self.results)]

    def document(self, unit: str = "", *, strict: bool = False, full: bool = True) -> Document:  # noqa: ARG002
        """Return the answer of ``memplan check``."""
        return check_document(self.results, self.file, self.catalog.hash if full else "", unit)


@checked
def check(
    file: FilePath = DEFAULT_FILE,
    *,
    baseline: FilePath | None = None,
    update_baseline: bool = False,
    catalog: FilePath | Catalog | None = None,
) -> Check:
    """Return whether every job of a budget file is within its budget.

    Args:
        baseline: The baseline, instead of the one that the budget names.
        update_baseline: Whether what every job needs now is written to the baseline.
        catalog: Your own catalog file or folder, added to ours; or a catalog that was opened before.

    Raises:
        InvalidFileError: Every problem of the budget, every unknown name and unreadable file of every job.
        CannotAnswerError: A baseline was to be written, but a job could not be evaluated.

    Example:
        >>> import memplan
        >>> memplan.check("memplan-budget.yaml").verdict  # doctest: +SKIP
        'within'
    """
    known = catalog_of(catalog)
    known.check_own_entries()
    given = _from_here(Path(file))
    if os.fspath(file) != "-" and path_kind(given) == "nothing":
        raise InvalidFileError([f"{shown_path(given)}: no such file; a first one may say {FIRST} (docs/ci.md)"])
    budget = read_budget(given)
    path = budget.baseline if baseline is None else Path(baseline)
    workshop = Workshop(known)
    before = None if update_baseline else _before(budget, path, given=baseline is not None)
    results = workshop.results(budget, before)
    if update_baseline:
        results = workshop.results(budget, _updated(results, path, known))
    return Check(tuple(worst_first(results)), budget.name, path, known)


FIRST = "{version: 1, budgets: [{name: tune, model: llama-3.1-8b, config: qlora, gpus: [rtx4090], limit: 20 GiB}]}"


def _from_here(path: Path) -> Path:
    """Return a path as a repository names it, which is relative, where it lies below the working directory."""
    here = whole_path(Path())
    return path.relative_to(here) if path.is_absolute() and path.is_relative_to(here) else path


def _before(budget: BudgetFile, path: Path, given: bool) -> Baseline | None:
    """Return the baseline where it is needed or was given; a missing one is no mistake before it was first written."""
    wanted = given or any(job.increase is not None for job in budget.jobs)
    return read_baseline(path) if given or (wanted and path_kind(path) != "nothing") else None


def _updated(results: Sequence[Result], path: Path, catalog: Catalog) -> Baseline:
    """Return the baseline that results make, written to its file."""
    missing = [result for result in results if result.figures is None]
    if missing:
        lines = (f"baseline not written: {r.label}: {f.message}" for r in missing for f in r.findings)
        raise CannotAnswerError("\n".join(lines))
    now = baseline_of(results, catalog.hash)
    write_file(path, baseline_text(now))
    return now
