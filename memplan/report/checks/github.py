"""Workflow commands of GitHub Actions, which annotate the lines of a pull request."""

from __future__ import annotations

import re
from collections.abc import Sequence

from memplan.budget.evaluation import Result
from memplan.documents.escaping import workflow_data, workflow_property
from memplan.errors import escaped
from memplan.report.checks.check_answer import answer, sentence

MOST_ANNOTATIONS = 10
"""GitHub shows no more of a kind for one step."""


def github_text(results: Sequence[Result]) -> str:
    """Return one annotation for each job that is not within its budget, and the answer.

    Args:
        results: Worst first.

    Source:
        https://docs.github.com/en/actions/reference/workflow-commands-for-github-actions; the escapes
        are those of its toolkit (packages/core/src/command.ts).
    """
    failing = [result for result in results if result.status != "within"]
    lines = [_annotation(result) for result in failing[:MOST_ANNOTATIONS]]
    left = len(failing) - len(lines)
    if left:
        lines.append(f"... and {left} more that are not annotated")
    return "\n".join([*lines, escaped(answer(results))]) + "\n"


def problems_text(problems: Sequence[str]) -> str:
    """Return one annotation for each problem of a budget file, at the line that it names.

    Example:
        >>> print(problems_text(["budget.yaml:3: budgets.0.gpu: unknown GPU 'rtx490'"]), end="")
        ::error file=budget.yaml,line=3::budgets.0.gpu: unknown GPU 'rtx490'
    """
    lines = []
    for problem in problems[:MOST_ANNOTATIONS]:
        match = _PLACE.fullmatch(problem)
        at = f" file={workflow_property(match[1])},line={match[2]}" if match else ""
        lines.append(f"::error{at}::{workflow_data(match[3] if match else problem)}\n")
    return "".join(lines)


_PLACE = re.compile(r"(.+?):([0-9]+): (.*)", re.DOTALL)


def _annotation(result: Result) -> str:
    command = "warning" if result.status == "warn" else "error"
    place = result.job.place
    return f"::{command} file={workflow_property(place.file)},line={place.line}::{workflow_data(sentence(result))}"
