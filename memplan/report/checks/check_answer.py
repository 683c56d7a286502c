"""The answers of ``memplan check``: JSON, tables, and the sentences that every other format shares."""

import hashlib
from collections.abc import Sequence
from typing import Any

import memplan
from memplan.budget.evaluation import WORST_FIRST, Finding, Result, exit_code
from memplan.report.document import Document, Table
from memplan.report.plans.plan_answer import BY_SHARE
from memplan.units import format_bytes

WORDS = {"over": "OVER", "cannot": "UNKNOWN", "warn": "WARN", "within": "WITHIN"}
VERDICTS = {0: "within", 1: "over", 3: "cannot"}
MOST_NAMED = 3


def check_document(results: Sequence[Result], file: str, catalog_hash: str, unit: str) -> Document:
    """Return the answer about a budget file.

    Args:
        results: Worst first.
    """
    reasons = tuple(f"{WORDS[r.status]}: {sentence(r)}" for r in results if r.status != "within")
    by_share = any(result.figures is not None and result.figures.by_share for result in results)
    notes = (BY_SHARE,) if by_share else ()
    blocks = (results_table(results, unit), reasons, *notes, answer(results))
    return Document(check_data(results, file, catalog_hash), blocks, exit_code(results))


def check_data(results: Sequence[Result], file: str, catalog_hash: str) -> dict[str, Any]:
    """Return the JSON of schema ``memplan/check/1``."""
    counts = {status: sum(r.status == status for r in results) for status in WORST_FIRST}
    return {
        "schema": "memplan/check/1",
        "memplan_version": memplan.__version__,
        "catalog_hash": catalog_hash,
        "budget": file,
        "verdict": VERDICTS[exit_code(results)],
        "exit_code": exit_code(results),
        "answer": answer(results),
        "counts": {"checked": len(results), **counts},
        "rows": [_row(result) for result in results],
    }


def _row(result: Result) -> dict[str, Any]:
    job, figures = result.job, result.figures
    row: dict[str, Any] = {
        "name": job.name,
        "gpu": result.gpu,
        "model": job.model,
        "config": job.config,
        "status": result.status,
        "level": job.level,
        "basis": job.basis,
        "file": job.place.file,
        "line": job.place.line,
    }
    if figures is not None:
        row |= {
            "verdict": figures.verdict,
            "device_bytes": figures.device_bytes,
            "upper_bytes": figures.upper_bytes,
            "needed_bytes": figures.needed(job.basis),
            "usable_bytes": figures.usable_bytes,
            "limit_bytes": result.limit_bytes,
            "headroom_bytes": result.limit_bytes - figures.needed(job.basis),
            "asked": figures.asked,
            "inputs": figures.inputs,
            "components": dict(figures.components),
        }
    if result.before is not None:
        row["baseline"] = {"device_bytes": result.before.device_bytes, "upper_bytes": result.before.upper_bytes}
    row["findings"] = [_finding(finding) for finding in result.findings]
    return row


def _finding(finding: Finding) -> dict[str, Any]:
    if finding.rule == "cannot-evaluate":
        return {"rule": finding.rule, "message": finding.message}
    return {
        "rule": finding.rule,
        "component": finding.component,
        "bytes": finding.bytes,
        "limit_bytes": finding.limit_bytes,
        "over_bytes": finding.bytes - finding.limit_bytes,
        "message": finding.message,
    }


# ------------------------------------------------------------------ sentences
def sentence(result: Result) -> str:
    """Return what is wrong with a job, all of it in one line."""
    return f"{result.label} " + "; ".join(finding.message for finding in result.findings)


def answer(results: Sequence[Result]) -> str:
    """Return the answer in one sentence, with the first jobs that are not within their budget."""
    over = [result for result in results if result.status == "over"]
    unknown = [r for r in results if any(f.rule == "cannot-evaluate" for f in r.findings)]
    warned = [result for result in results if result.status == "warn"]
    total = f"{len(results)} check{'' if len(results) == 1 else 's'}"
    parts = [
        f"{len(group)} {what}: {_named(group, component=group is not unknown)}"
        for group, what in (
            (over, "over budget"),
            (unknown, "cannot be evaluated"),
            (warned, "over, but only warned about"),
        )
        if group
    ]
    word = "OVER" if over else "UNKNOWN" if unknown else "WITHIN"
    return f"{word}: {total}, {'; '.join(parts) if parts else 'all within budget'}."


def _named(results: Sequence[Result], component: bool = False) -> str:
    names = [f"{r.label}{_component(r) if component else ''}" for r in results[:MOST_NAMED]]
    more = len(results) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")


def _component(result: Result) -> str:
    component = next((finding.component for finding in result.findings if finding.component), "")
    return f" ({component})" if component else ""


def fingerprint(result: Result, finding: Finding) -> str:
    """Return what identifies a finding from run to run, whatever its figures and its line."""
    key = "\0".join((finding.rule, result.job.place.file, result.job.name, result.gpu, finding.component))
    if finding.rule in ("limit", "increase"):  # the component is only an explanation there
        key = "\0".join((finding.rule, result.job.place.file, result.job.name, result.gpu))
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


# ------------------------------------------------------------------ tables
def results_table(results: Sequence[Result], unit: str) -> Table:
    """Return a row for every result."""
    headers = ("budget", "job", "gpu", ">needs", ">limit", ">headroom", "basis", "fits")
    return Table(headers, tuple(cells(result, unit) for result in results))


def cells(result: Result, unit: str = "") -> tuple[str, ...]:
    """Return the row of a result; its limits on components and growth are told in its sentence."""
    job, figures = result.job, result.figures
    first = (WORDS[result.status], job.name, result.gpu)
    if figures is None:
        return (*first, "?", "?", "?", job.basis, "?")
    needed = figures.needed(job.basis)
    sizes = (needed, result.limit_bytes, result.limit_bytes - needed)
    return (*first, *(format_bytes(size, unit) for size in sizes), job.basis, figures.verdict)
