"""JUnit XML: a test case for each job on each GPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from xml.etree import ElementTree

from memplan.budget.evaluation import Result
from memplan.errors import escaped
from memplan.report.checks.check_answer import sentence


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
