"""The answer of ``memplan run``: what a script needs, and where it would run out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import memplan
from memplan.budget.budget_files import read_budget
from memplan.budget.budget_jobs import Job
from memplan.budget.evaluation import Figures, Finding, evaluated
from memplan.errors import InvalidFileError, UnknownNameError, match_hint
from memplan.library.answers.trace_answer import largest_table, tensor_data, totals_table
from memplan.plan.components import COMPONENTS
from memplan.plan.memory_plan import Verdict
from memplan.report.document import Block, Document, Table
from memplan.report.plans.plan_answer import suggestions_table
from memplan.units import format_bytes

if TYPE_CHECKING:
    from memplan.library.runs.dry_run import DryRun


MOST_ANSWERS = 10
"""Values asked for that the tables list; the JSON has all."""


def dry_run_document(run: DryRun, unit: str) -> Document:
    """Return the answer of ``memplan run``."""
    blocks: list[Block] = [
        _heading(run),
        _component_table(run, unit),
        _instant_table(run, unit),
        totals_table(run.trace, run.to_spare, run.context_bytes, unit),
    ]
    if run.most_listed:
        blocks.append(largest_table(run.trace, run.most_listed, unit, str))
    if run.outcome.answers:
        blocks.append(_answer_table(run))
    if run.outcome.skipped:
        blocks.append(_written(run, unit))
    blocks += [f"Note: {note}." for note in run.outcome.notes]
    blocks += [f"No suggestions: {run.unsuggested}."] if run.unsuggested else []
    if run.suggestions:
        blocks.append(suggestions_table(run.suggestions, run.device.usable_bytes(0), unit))
    blocks.append(_sentence(run))
    blocks += [f"Over the budget of {run.job.name}: {finding.message}." for finding in run.over_budget if run.job]
    return Document(_data(run), tuple(blocks), 1 if run.over_budget or not run.fits else 0)


def _heading(run: DryRun) -> tuple[str, str]:
    device, outcome = run.device, run.outcome
    needs, usable = run.to_spare.reserved_peak_bytes + run.context_bytes, device.usable_bytes(0)
    if run.fits and needs > usable:
        room = (
            f"runs in {format_bytes(usable)} on {device.name}; with memory to spare it reserves {format_bytes(needs)}"
        )
    else:
        room = f"needs {format_bytes(needs)} of {format_bytes(usable)} on {device.name}"
    return (
        f"{'FITS' if run.fits else 'NO'}: {run.script} {room}",
        f"{outcome.model or 'no module'}, {outcome.steps} steps run on tensors without memory in {outcome.seconds:.1f} s",
    )


def _component_table(run: DryRun, unit: str) -> Table:
    sizes = {str(name): size for name, size in run.trace.peak.components.items()}
    rows = [(name, format_bytes(sizes[name], unit)) for name in COMPONENTS if name in sizes]
    rows.append(("requested", format_bytes(run.trace.peak_bytes, unit)))
    return Table(("component", ">bytes"), tuple(rows), f"At the peak: {_where(run)} ({run.trace.peak.operation})")


def _where(run: DryRun) -> str:
    number = run.outcome.reported_step
    return f"step {number}, {run.trace.peak_instant}" if number else "before the first step"


def _instant_table(run: DryRun, unit: str) -> Table:
    rows = [
        (name, format_bytes(moment.bytes, unit), moment.operation)
        for name, moment in run.trace.instants.items()
        if not name.startswith("layer") or name == run.trace.peak_instant
    ]
    return Table(("instant", ">bytes", "operation"), tuple(rows))


def _answer_table(run: DryRun) -> Table:
    answers = run.outcome.answers[:MOST_ANSWERS]
    more = len(run.outcome.answers) - len(answers)
    title = "Values that the script asked for and was told" + (f" ({more} more)" if more else "")
    return Table(("line", "asked", "told first"), tuple((a.line, a.question, a.value) for a in answers), title)


def _written(run: DryRun, unit: str) -> str:
    saved = [format_bytes(size, unit) for _, size in run.outcome.skipped if size]
    among = f", checkpoints of {', '.join(saved[:3])} among them" if saved else ""
    return f"Not written: {len(run.outcome.skipped):,} files and folders{among} (see: --allow-writes)."


def _sentence(run: DryRun) -> str:
    runs_out = run.outcome.runs_out
    text = f"It peaks at {format_bytes(run.trace.peak_bytes)} in {_where(run)}"
    if runs_out is None:
        return (
            f"{text}; {run.device.name} would hold it."
            if run.on_device.survives
            else f"{text}; {run.device.name} would not."
        )
    step = f"in step {runs_out.step}, {runs_out.instant}" if runs_out.step else "before the first step"
    line = f" at {runs_out.line}" if runs_out.line else ""
    return f"{text}. It would run out of memory {step}, {runs_out.operation}{line}: {runs_out.message}"


def _data(run: DryRun) -> dict[str, Any]:
    """Return the JSON: a plan's components, instants, peak and persistent bytes."""
    trace, outcome = run.trace, run.outcome
    sizes = {str(name): size for name, size in trace.peak.components.items()}
    return {
        "schema": "memplan/run/1",
        "memplan_version": memplan.__version__,
        "script": run.script,
        "model": outcome.model,
        "gpu": {"name": run.device.name, "usable_bytes": run.device.usable_bytes(0)},
        "verdict": "fits" if run.fits else "no",
        "answer": _sentence(run),
        "components": [{"name": name, "bytes": sizes[name]} for name in COMPONENTS if name in sizes],
        "instants": [
            {"name": name, "requested_bytes": m.bytes, "operation": m.operation} for name, m in trace.instants.items()
        ],
        "peak": {
            "step": outcome.reported_step,
            "instant": trace.peak_instant,
            "operation": trace.peak.operation,
            "requested_bytes": trace.peak_bytes,
            "allocated_bytes": run.to_spare.allocated_peak_bytes,
            "reserved_bytes": run.to_spare.reserved_peak_bytes,
            "device_bytes": run.to_spare.reserved_peak_bytes + run.context_bytes,
        },
        "persistent_bytes": outcome.persistent_bytes,
        "steps": outcome.steps,
        "step_peaks": list(outcome.peaks),
        "events": len(trace.events),
        "survives": run.fits,
        "runs_out": None if outcome.runs_out is None else asdict(outcome.runs_out),
        "suggestions": [asdict(suggestion) for suggestion in run.suggestions],
        "over_budget": [asdict(finding) for finding in run.over_budget],
        "largest": [tensor_data(one) for one in trace.largest_at_peak(run.most_listed)],
        "answers": [asdict(answer) for answer in outcome.answers],
        "notes": list(outcome.notes),
        "not_written": [{"file": name, "bytes": size} for name, size in outcome.skipped],
    }


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
    figures = Figures(
        device=device,
        verdict=verdict,
        device_bytes=device_bytes,
        upper_bytes=device_bytes,
        needed_bytes=device_bytes,
        usable_bytes=usable_bytes,
        by_share=False,
        components=components,
        asked="",
        inputs="",
    )
    return evaluated(job, figures, None).findings
