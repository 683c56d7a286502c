"""``memplan check`` and ``memplan diff``: are the jobs of a repository within their budgets, and what moved?"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, get_args

import typer

import memplan
from memplan.budget.baseline import read_baseline
from memplan.budget.budget_jobs import DEFAULT_FILE
from memplan.cli.grouped_command import command, without
from memplan.cli.option_groups import OUTPUT, OutputOptions, option
from memplan.cli.output import deliver, emit, emit_as
from memplan.documents.frozen_values import dataclass
from memplan.documents.writing import append_file, say
from memplan.errors import InvalidFileError
from memplan.report.document import Format

if TYPE_CHECKING:
    from memplan import Check
    from memplan.budget.evaluation import Result

SUMMARY = "GITHUB_STEP_SUMMARY"
_BUDGET = "Budget"


def _side(name: str) -> Any:
    return typer.Argument(
        metavar=name, help="A baseline, or a saved answer of memplan check --json.", rich_help_panel=_BUDGET
    )


CheckFormat = Literal[Format, "github", "gitlab", "junit", "sarif"]
"""How the answer of a check is written: as any other, or for a forge or a test report."""


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """The budget, and what is written besides the answer."""

    budget: Annotated[
        Path,
        typer.Argument(metavar="FILE", help=f"Budget file, or -; {DEFAULT_FILE} by default.", rich_help_panel=_BUDGET),
    ] = Path(DEFAULT_FILE)
    update: Annotated[bool, option(_BUDGET, "--update-baseline", "Write what every job needs now to the baseline.")] = (
        False
    )
    baseline: Annotated[
        Path | None, option(_BUDGET, "--baseline FILE", "The baseline, instead of the one that the budget names.")
    ] = None
    summary: Annotated[bool, option(OUTPUT, "--summary", f"Append Markdown to the file named by ${SUMMARY}.")] = False
    form: Annotated[
        CheckFormat | None,
        option(OUTPUT, "--format -f FORMAT", f"{', '.join(get_args(CheckFormat))}; a table by default."),
    ] = None


@command(example="memplan check --format github")
def check_command(check: CheckOptions, output: Annotated[OutputOptions, without("form")]) -> int:
    """Does every job of a budget file still fit its budget? All jobs, the worst first.

    Exit code 0: all within; 1: one over; 2: bad input; 3: one that cannot be evaluated, and none over.
    """
    chosen = output.format_name(check.form)
    path = summary_path() if check.summary else None
    try:
        answer = memplan.check(
            check.budget, baseline=check.baseline, update_baseline=check.update, catalog=output.catalog()
        )
    except InvalidFileError as error:
        if chosen == "github":
            from memplan.report.checks.forge_texts import problems_text

            deliver(problems_text(error.problems), output.file)
        raise
    if check.update:
        say(f"baseline written: {answer.baseline}")
    code = _emit(answer, chosen, output)
    if path is not None:
        append_summary(path, answer.results)
    return code


@command(example="memplan diff base.json memplan-baseline.json")
def diff_command(
    base: Annotated[Path, _side("BASE")],
    head: Annotated[Path, _side("HEAD")],
    output: Annotated[OutputOptions, without("catalog_path")],
) -> int:
    """What moved between two baselines, and why? Your config, or memplan's own figures."""
    from memplan.report.checks.difference_answer import diff_document, diff_markdown

    both = read_baseline(base), read_baseline(head)
    if output.form == "md" and not output.quiet:
        deliver(diff_markdown(*both), output.file)
        return 0
    return emit(diff_document(*both, output.unit), output)


def _emit(answer: Check, form: str, output: OutputOptions) -> int:
    """Write the answer in its format and return the exit code."""
    document = answer.document(output.unit, full=form == "json")
    if form in get_args(Format) and (output.quiet or form != "md"):
        return emit_as(document, cast("Format", form), output)
    deliver(_renderer(form)(answer.results), output.file)
    return document.exit_code


def _renderer(form: str) -> Callable[[Sequence[Result]], str]:
    """Return what writes a format that only checks have."""
    from memplan.report.checks import forge_texts

    name = "markdown" if form == "md" else form
    render: Callable[[Sequence[Result]], str] = getattr(forge_texts, f"{name}_text")
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
    from memplan.report.checks.forge_texts import markdown_text

    append_file(path, markdown_text(results))
