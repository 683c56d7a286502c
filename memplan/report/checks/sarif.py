"""SARIF 2.1.0, as code scanning services read it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import memplan
from memplan.budget.evaluation import Finding, Result, Rule, exit_code
from memplan.documents.escaping import json_text
from memplan.report.checks.check_answer import fingerprint

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"

RULES: dict[Rule, str] = {
    "limit": "The job needs more memory on the device than its limit.",
    "component": "A component of the job needs more memory than its limit.",
    "increase": "The job needs more memory than its baseline and the increase allowed over it.",
    "cannot-evaluate": "memplan cannot tell whether the job is within its budget.",
}


def sarif_text(results: Sequence[Result]) -> str:
    """Return the log, worst first.

    Source:
        https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/sarif-v2.1.0-errata01-os-complete.html
    """
    findings = [_result(result, finding) for result in results for finding in result.findings]
    driver = {
        "name": "memplan",
        "version": memplan.__version__,
        "rules": [{"id": f"memplan/{rule}", "shortDescription": {"text": text}} for rule, text in RULES.items()],
    }
    invocation = {"executionSuccessful": exit_code(results) != 3, "exitCode": exit_code(results)}
    run = {
        "tool": {"driver": driver},
        "invocations": [invocation],
        "columnKind": "unicodeCodePoints",
        "results": findings,
    }
    log = {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}
    return json_text(log)


def _result(result: Result, finding: Finding) -> dict[str, Any]:
    place = result.job.place
    location = {
        "artifactLocation": {"uri": quote(os.fsencode(place.file), safe="/~.-_")},
        "region": {"startLine": place.line},
    }
    return {
        "ruleId": f"memplan/{finding.rule}",
        "ruleIndex": list(RULES).index(finding.rule),
        "level": "warning" if result.status == "warn" else "error",
        "message": {"text": f"{result.label} {finding.message}"},
        "locations": [{"physicalLocation": location}],
        "partialFingerprints": {"memplan/1": fingerprint(result, finding)},
    }
