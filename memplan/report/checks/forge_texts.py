"""What forges and test reports read of a check: annotations, code quality, JUnit's XML, SARIF."""

import os
import re
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree

import memplan
from memplan.budget.evaluation import Finding, Result, Rule, exit_code
from memplan.documents.escaping import json_text, markdown, workflow_data, workflow_property
from memplan.errors import escaped
from memplan.report.checks.check_answer import WORDS, answer, cells, fingerprint, sentence
from memplan.units import format_bytes

MOST_BYTES = 59_000
"""A comment may hold 64 KB; this leaves room for what others put around it."""

MARKER = "<!-- memplan:{} -->"
"""First line by which a later run finds the comment that it is to replace."""

LONGEST_MESSAGE = 2_000
MOST_DETAILS = 20


def markdown_text(results: Sequence[Result]) -> str:
    """Return the answer, a table, and details of what is not within its budget.

    Args:
        results: Worst first, so that what does not fit into the text is the least interesting.
    """
    headers = ("budget", "job", "GPU", "needs", "limit", "headroom", "basis", "fits")
    rows = [row(cells(result)) for result in results]
    head = [MARKER.format("check"), "### memplan check", "", cell(answer(results), LONGEST_MESSAGE), ""]
    details = [line for r in results[:MOST_DETAILS] if r.status != "within" for line in _details(r)]
    table = [row(headers), row(("---", "---", "---", "---:", "---:", "---:", "---", "---"))]
    return trimmed([*head, *table], rows, details)


def trimmed(head: Sequence[str], rows: Sequence[str], tail: Sequence[str]) -> str:
    """Return lines as one text of at most :data:`MOST_BYTES`, leaving out the last rows, then the tail.

    Args:
        rows: As many as fit; a line says how many do not.
        tail: Kept as far as half of the room goes.
    """
    room = MOST_BYTES - _size(head) - 200
    shown_tail = list(_fitting(["", *tail], room // 2)) if tail else []
    shown = list(_fitting(rows, room - _size(shown_tail)))
    lines = [*head, *shown]
    if len(shown) < len(rows):
        lines += ["", f"... and {len(rows) - len(shown):,} more rows that would make this text too long."]
    if len(shown_tail) < len(tail):
        shown_tail += ["", "... and further details."]
    return "\n".join([*lines, *shown_tail]) + "\n"


def _fitting(lines: Iterable[str], room: int) -> Iterable[str]:
    for line in lines:
        room -= len(line.encode()) + 1
        if room < 0:
            return
        yield line


def _size(lines: Iterable[str]) -> int:
    return sum(len(line.encode()) + 1 for line in lines)


def row(texts: Sequence[str]) -> str:
    """Return a row of a table."""
    return "| " + " | ".join(cell(text) for text in texts) + " |"


def cell(text: str, longest: int = 100) -> str:
    """Return text that nothing in it can turn into something else, on one line and not too long."""
    short = text if len(text) <= longest else f"{text[: longest - 3]}..."
    return markdown(escaped(" ".join(short.split())))


def _details(result: Result) -> list[str]:
    """Return what is wrong with a job, and its components: one line of HTML, so that it is cut nowhere."""
    lines = [f"<details><summary>{WORDS[result.status]}: {cell(sentence(result), LONGEST_MESSAGE)}</summary>"]
    if result.figures is not None:
        sizes = sorted(result.figures.components.items(), key=lambda item: (-item[1], item[0]))
        body = "".join(f"<tr><td>{name}</td><td>{format_bytes(size)}</td></tr>" for name, size in sizes)
        lines.append(f"<table>{body}</table>")
    return ["".join([*lines, "</details>"])]


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


def junit_text(results: Sequence[Result]) -> str:
    """Return one suite for each budget file; a job over budget fails, one that only warns passes with output.

    Source:
        The schema of the Jenkins xUnit plugin, junit-10.xsd. Times are left out, so that two runs are equal.
    """
    by_file: dict[str, list[Result]] = {}
    for result in results:
        by_file.setdefault(result.job.place.file, []).append(result)
    root = ElementTree.Element("testsuites", {"name": "memplan check", **_counts(results)})
    for file in sorted(by_file):
        suite = ElementTree.SubElement(root, "testsuite", {"name": escaped(file), **_counts(by_file[file])})
        for result in by_file[file]:
            _case(suite, result)
    ElementTree.indent(root)
    text = ElementTree.tostring(root, encoding="us-ascii", xml_declaration=False).decode("ascii")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{text}\n'


def _counts(results: Iterable[Result]) -> dict[str, str]:
    statuses = [result.status for result in results]
    return {
        "tests": str(len(statuses)),
        "failures": str(statuses.count("over")),
        "errors": str(statuses.count("cannot")),
    }


def _case(suite: ElementTree.Element, result: Result) -> None:
    case = ElementTree.SubElement(suite, "testcase", name=escaped(result.label), classname="memplan.budget")
    if result.status == "within":
        return
    if result.status == "warn":
        ElementTree.SubElement(case, "system-out").text = escaped(f"warning: {sentence(result)}")
        return
    tag = "failure" if result.status == "over" else "error"
    worst = result.findings[0]
    element = ElementTree.SubElement(case, tag, type=f"memplan-{worst.rule}", message=escaped(worst.message))
    place = result.job.place
    lines = [f"{place.file}:{place.line}: {result.label}", *(finding.message for finding in result.findings)]
    element.text = "\n".join(map(escaped, lines))


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
