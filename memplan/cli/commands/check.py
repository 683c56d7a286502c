"""``memplan check`` and ``memplan diff``: are the jobs of a repository within their budgets, and what moved?"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from memplan.budget.baseline import Baseline, baseline_text, read_baseline
from memplan.budget.budget_files import BudgetFile, read_budget
from memplan.budget.budget_schema import DEFAULT_FILE
from memplan.budget.evaluation import Result, worst_first
from memplan.catalog.catalog import Catalog
from memplan.cli import option_groups as o
from memplan.cli.output import deliver, emit, unit_text
from memplan.documents.opening import path_kind
from memplan.documents.writing import append_file, say, write_file
from memplan.errors import CannotAnswerError, InvalidFileError

SUMMARY = "GITHUB_STEP_SUMMARY"

FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="Budget file, or -.", show_default=True)]
UpdateOption = Annotated[
    bool, typer.Option("--update-baseline", help="Write what every job needs now to the baseline.")
]
BaselineOption = Annotated[
    Path | None,
    typer.Option("--baseline", metavar="FILE", help="The baseline, instead of the one that the budget names."),
]
SummaryOption = Annotated[bool, typer.Option("--summary", help=f"Append Markdown to the file named by ${SUMMARY}.")]
DiffArgument = Annotated[Path, typer.Argument(help="A baseline, or a saved answer of memplan check --json.")]


def check_command(
    file: FileArgument = Path(DEFAULT_FILE),
    update: UpdateOption = False,
    baseline: BaselineOption = None,
    summary: SummaryOption = False,
    as_json: o.JsonOption = False,
    form: o.CheckFormatOption = o.CheckFormat.table,
    output: o.OutputOption = None,
    units: o.UnitsOption = None,
    quiet: o.QuietOption = False,
    catalog_path: o.CatalogOption = None,
) -> None:
    """Does every job of a budget file still fit its budget? All jobs, the worst first.

    Exit code 0: all within; 1: one over; 2: bad input; 3: one that cannot be evaluated, and none over.
    """
    from memplan.library.lookup import open_catalog

    catalog = open_catalog(catalog_path)
    path = summary_path() if summary else None
    chosen = o.CheckFormat.json if as_json else form
    try:
        results, name = checked(_from_here(file), baseline, update, catalog)
    except InvalidFileError as error:
        _annotate(error, chosen, output)
        raise
    code = _emit(results, name, chosen, output, unit_text(units), quiet, catalog)
    if path is not None:
        append_summary(path, results)
    raise typer.Exit(code)


def diff_command(
    base: DiffArgument,
    head: DiffArgument,
    as_json: o.JsonOption = False,
    form: o.FormatOption = o.OutputFormat.table,
    output: o.OutputOption = None,
    units: o.UnitsOption = None,
    quiet: o.QuietOption = False,
) -> None:
    """What moved between two baselines, and did your config move it, or memplan's own figures?"""
    from memplan.report.checks.difference_answer import diff_document, diff_markdown

    sides = read_baseline(base), read_baseline(head)
    if form == "md" and not as_json and not quiet:
        deliver(diff_markdown(*sides), output)
        raise typer.Exit(0)
    raise typer.Exit(emit(diff_document(*sides, unit_text(units)), form, as_json, output, quiet))


def checked(file: Path, baseline: Path | None, update: bool, catalog: Catalog) -> tuple[list[Result], str]:
    """Return the results of a budget file, worst first, and its name; the baseline is written where asked.

    Raises:
        InvalidFileError: Bad input of any job.
        CannotAnswerError: A baseline was to be written, but a job could not be evaluated.
    """
    from memplan.library.budget_plans import Workshop

    budget = read_budget(file)
    path = baseline or budget.baseline
    workshop = Workshop(catalog)
    before = None if update else _before(budget, path, given=baseline is not None)
    results = workshop.results(budget, before)
    if update:
        now = _update(results, path, catalog)
        results = workshop.results(budget, now)
    return worst_first(results), budget.name


def _from_here(path: Path) -> Path:
    """Return a path as a repository names it, which is relative, where it lies below the working directory."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_absolute() and path.is_relative_to(here) else path


def _annotate(error: InvalidFileError, form: o.CheckFormat, output: Path | None) -> None:
    """Annotate the mistakes of a budget as GitHub shows them; all else is told on standard error alone."""
    if form == o.CheckFormat.github:
        from memplan.report.checks.github import problems_text

        deliver(problems_text(error.problems), output)


def _before(budget: BudgetFile, path: Path, given: bool) -> Baseline | None:
    """Return the baseline where it is needed or was given; a missing one is no mistake before it was first written."""
    wanted = given or any(job.increase is not None for job in budget.jobs)
    return read_baseline(path) if given or (wanted and path_kind(path) != "nothing") else None


def _update(results: Sequence[Result], path: Path, catalog: Catalog) -> Baseline:
    from memplan.budget.evaluation import baseline_of

    missing = [result for result in results if result.figures is None]
    if missing:
        lines = (f"baseline not written: {r.label}: {f.message}" for r in missing for f in r.findings)
        raise CannotAnswerError("\n".join(lines))
    now = baseline_of(results, catalog.hash)
    write_file(path, baseline_text(now))
    say(f"baseline written: {path}")
    return now


def _emit(
    results: Sequence[Result],
    name: str,
    form: o.CheckFormat,
    output: Path | None,
    unit: str,
    quiet: bool,
    catalog: Catalog,
) -> int:
    """Write the answer in its format and return the exit code."""
    from memplan.report.checks.check_answer import check_document

    wants_hash = form == o.CheckFormat.json
    document = check_document(results, name, catalog.hash if wants_hash else "", unit)
    if form.value in o.OutputFormat.__members__ and (quiet or form != o.CheckFormat.md):
        return emit(document, o.OutputFormat(form.value), False, output, quiet)
    deliver(_renderer(form)(results), output)
    return document.exit_code


def _renderer(form: o.CheckFormat) -> Callable[[Sequence[Result]], str]:
    """Return what writes a format that only checks have; it alone is imported."""
    from importlib import import_module

    module = "markdown" if form == o.CheckFormat.md else form.value
    render: Callable[[Sequence[Result]], str] = getattr(
        import_module(f"memplan.report.checks.{module}"), f"{module}_text"
    )
    return render


def summary_path() -> Path:
    """Return the file that a GitHub step's summary goes to.

    Raises:
        InvalidFileError: There is none.
    """
    name = os.environ.get(SUMMARY)
    if not name:
        raise InvalidFileError([f"--summary: {SUMMARY} is not set; it names the file to append to"])
    return Path(name)


def append_summary(path: Path, results: Sequence[Result]) -> None:
    """Append Markdown to a step's summary."""
    from memplan.report.checks.markdown import markdown_text

    append_file(path, markdown_text(results))
