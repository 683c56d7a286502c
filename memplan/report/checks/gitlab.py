"""GitLab's code quality report: a finding for each thing that is not as the budget wants it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memplan.budget.evaluation import Finding, Result
from memplan.documents.escaping import json_text
from memplan.report.checks.check_answer import fingerprint


def gitlab_text(results: Sequence[Result]) -> str:
    """Return the report, worst first.

    Source:
        https://docs.gitlab.com/ci/testing/code_quality/#code-quality-report-format
    """
    rows = [_row(result, finding) for result in results for finding in result.findings]
    return json_text(rows)


def _row(result: Result, finding: Finding) -> dict[str, Any]:
    place = result.job.place
    return {
        "description": f"{result.label} {finding.message}",
        "check_name": f"memplan-{finding.rule}",
        "fingerprint": fingerprint(result, finding),
        "severity": "minor" if result.status == "warn" else "major",
        "location": {"path": place.file, "lines": {"begin": place.line}},
    }
