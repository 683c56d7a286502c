"""A user's own script on a GPU that is not there: ``memplan.run``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict, Unpack

from memplan.allocator.results import AllocatorResult
from memplan.budget.budget_jobs import Job
from memplan.catalog.catalog import Catalog
from memplan.catalog.hardware.contexts import context_range
from memplan.catalog.hardware.hardware_tables import hardware_tables
from memplan.documents.escaping import json_text
from memplan.documents.opening import is_file, usable_path
from memplan.dryrun.terms.outcome import Outcome, Request
from memplan.errors import CannotAnswerError, InvalidFileError
from memplan.host.this_machine import require_torch
from memplan.library.answers.answer import Answer
from memplan.library.answers.trace_answer import traced_timeline
from memplan.library.answers.traced_step import DEFAULT_CAPABILITY, DEFAULT_GPU, MOST_LISTED, replayed
from memplan.library.argument_kinds import checked
from memplan.library.job_options import FilePath
from memplan.library.lookup import find_device, open_catalog
from memplan.library.runs.dry_run_answer import budgeted_job, dry_run_document, findings
from memplan.library.trainers.written_back import suggested
from memplan.plan.memory_plan import Device, Suggestion
from memplan.report.document import Document
from memplan.report.pictures.step_figure import Limits, step_figure
from memplan.trace.recording.trace_result import Trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from memplan.budget.evaluation import Finding


STEPS, TIMEOUT = 3, 600.0
"""Steps that a script takes, and seconds that it may, where nothing else is asked for."""


class RunOptions(TypedDict, total=False):
    """Keywords of a dry run.

    Attributes:
        gpu: The GPU that the script is to find: catalog name, alias, ``local``, or a device.
        gpu_memory: Memory of one that is in no catalog, in its place.
        module: Whether ``script`` is the name of a module, as ``python -m`` takes it.
        steps: Training steps to take.
        timeout: Seconds that the script may take.
        worst: Masks hold everything and all tokens go to the same experts, where nobody knows.
        allow_writes: Let the script write its files.
        alloc_conf: The allocator's settings, as ``PYTORCH_CUDA_ALLOC_CONF``.
        check: A budget file, one of whose jobs bears the script's name.
        synthetic: Tokens of the rows that data loaders give in the place of their own.
        gpus: Processes of the job, one GPU each, eight a machine; None for a script that joins no group.
        rank: Number of the process that runs.
        largest: Tensors to list at the peak.
        quiet: Drop what the script prints, which else goes to standard error.
        catalog: Your own catalog file or folder, added to ours.
    """

    gpu: str | Device | None
    gpu_memory: str | None
    module: bool
    steps: int
    timeout: float
    worst: bool
    allow_writes: bool
    alloc_conf: str
    check: FilePath | None
    synthetic: int | None
    gpus: int | None
    rank: int
    largest: int
    quiet: bool
    catalog: FilePath | None


_SHELL = "a shell script: name the Python script that it starts, and after -- its arguments"
_NO_SCRIPTS = {
    ".ipynb": "a notebook: jupyter nbconvert --to script writes the script of its cells",
    **dict.fromkeys((".sh", ".bash", ".slurm", ".sbatch"), _SHELL),
}
"""What is no script, though it starts one, by how its name ends."""


@dataclass(frozen=True, repr=False, eq=False)
class DryRun(Answer):
    """What a script needs, run against a GPU that is not there.

    Attributes:
        script: The script, with its arguments.
        device: The GPU.
        outcome: What came of the run.
        to_spare: What the allocator does with memory to spare; on the GPU where the script itself handles its end.
        on_device: What it does on the GPU.
        context_bytes: Memory outside the allocator.
        most_listed: Tensors at the peak to list.
        job: Of the budget file that it is held against.
        suggestions: What to change where it does not fit and its trainer is known.
        unsuggested: Why there are none, where that has a reason.
    """

    script: str
    device: Device
    outcome: Outcome
    to_spare: AllocatorResult
    on_device: AllocatorResult
    context_bytes: int
    most_listed: int
    job: Job | None = None
    suggestions: tuple[Suggestion, ...] = ()
    unsuggested: str = ""

    @property
    def trace(self) -> Trace:
        """The step that needs most."""
        assert self.outcome.trace is not None
        return self.outcome.trace

    @property
    def requested_bytes(self) -> int:
        """Live tensors, and what kernels allocate inside themselves, at the peak."""
        return self.trace.peak_bytes

    @property
    def fits(self) -> bool:
        """Whether the allocator gets by on the GPU."""
        return self.outcome.runs_out is None and self.on_device.survives

    @property
    def over_budget(self) -> tuple[Finding, ...]:
        """What is over the budget of its job, worst first."""
        if self.job is None:
            return ()
        sizes = {str(name): size for name, size in self.trace.peak.components.items()}
        needs, usable = self.to_spare.reserved_peak_bytes + self.context_bytes, self.device.usable_bytes(0)
        return findings(self.job, self.device.name, needs, usable, sizes, fits=self.fits)

    def document(self, unit: str = "", *, strict: bool = False, full: bool = True) -> Document:  # noqa: ARG002
        """Return the answer of ``memplan run``."""
        return dry_run_document(self, unit)

    def timeline(self, form: Literal["svg", "json"] = "svg") -> str:
        """Return what is alive over the step that needs most, as a picture or as JSON."""
        if form == "svg":
            from memplan.report.figures import picture_of

            return picture_of(self.figure(), ".svg").decode()
        from memplan.trace.recording.trace_result import timeline_json

        return json_text(timeline_json(self.trace), indent=1)

    def figure(self) -> Figure:
        """Return memory over that step by component, with what the GPU has."""
        lines = {
            "segments, and context": self.to_spare.reserved_peak_bytes + self.context_bytes,
            "usable": self.device.usable_bytes(0),
        }
        title = f"{self.script}, run without {self.device.name}"
        return step_figure(
            traced_timeline(self.trace), title, self.trace.peak_instant, Limits(self.context_bytes, lines)
        )


@checked
def run(script: FilePath, arguments: Sequence[str] = (), **options: Unpack[RunOptions]) -> DryRun:
    """Run a training script as ``python`` would, on tensors without memory, and return what it would need.

    It runs the script's code, in a process of its own, on this machine's CPU; nothing is fetched, and nothing is
    written where the script would write.

    Args:
        script: Path of the script, or the name of a module.
        arguments: The script's own arguments.
        options: Keywords of :class:`memplan.RunOptions`.

    Raises:
        CannotAnswerError: The script does what cannot be pretended, never trains, or takes too long.
        InvalidFileError: There is no such script, or it fails by a fault of its own.
        MemplanError: An unknown GPU.

    Example:
        >>> import memplan
        >>> memplan.run("train.py", ["--batch-size", "8"], gpu="rtx4090").fits  # doctest: +SKIP
        True
    """
    require_torch()
    from memplan.dryrun.script_process import run_script

    _check(script, options)
    budget = options.get("check")
    job = None if budget is None else budgeted_job(Path(budget), str(script))
    catalog = open_catalog(None if (given := options.get("catalog")) is None else Path(given))
    device = _device(options, catalog)
    context = context_range(device.gpu, hardware_tables(catalog.root)).expected_bytes
    request = _request(str(script), tuple(arguments), options, device, context)
    outcome = run_script(request, quiet=options.get("quiet", False))
    trace = _finished_trace(outcome, str(script))
    on_device = replayed(trace, request.alloc_conf, request.card.capacity_bytes)
    ran = DryRun(
        script=" ".join([str(script), *arguments]),
        device=device,
        outcome=outcome,
        to_spare=on_device if outcome.handled else replayed(trace, request.alloc_conf, None),
        on_device=on_device,
        context_bytes=context,
        most_listed=options.get("largest", MOST_LISTED),
        job=job,
    )
    return ran if ran.fits or request.ranks is not None else _with_suggestions(ran, catalog)


def _with_suggestions(ran: DryRun, catalog: Catalog) -> DryRun:
    """Return an answer with what to change of its job, or why nothing is suggested."""
    if ran.outcome.told is None:
        return ran
    try:
        return replace(ran, suggestions=suggested(ran.outcome.told, ran.requested_bytes, ran.device, catalog))
    except CannotAnswerError as error:
        return replace(ran, unsuggested=str(error))


def _request(
    script: str, arguments: tuple[str, ...], options: RunOptions, device: Device, context_bytes: int
) -> Request:
    """Return what the process that runs the script is told."""
    from memplan.dryrun.terms.outcome import Card, Ranks, Request

    gpu, gpus = device.gpu, options.get("gpus")
    capacity = max(0, device.usable_bytes(0) - context_bytes)
    return Request(
        script=script,
        card=Card(gpu.name, gpu.compute_capability or DEFAULT_CAPABILITY, gpu.cuda_total_bytes, capacity),
        arguments=arguments,
        is_module=options.get("module", False),
        steps=options.get("steps", STEPS),
        timeout=options.get("timeout", TIMEOUT),
        worst=options.get("worst", False),
        allow_writes=options.get("allow_writes", False),
        alloc_conf=options.get("alloc_conf", ""),
        synthetic=options.get("synthetic"),
        ranks=None if gpus is None else Ranks(gpus, options.get("rank", 0)),
    )


def _device(options: RunOptions, catalog: Catalog) -> Device:
    gpu, memory = options.get("gpu"), options.get("gpu_memory")
    if isinstance(gpu, Device):
        return gpu
    return (
        Device(catalog.gpus[DEFAULT_GPU], DEFAULT_GPU)
        if gpu is memory is None
        else find_device(gpu, memory, 1, catalog)
    )


def _check(script: FilePath, options: RunOptions) -> None:
    """Refuse what cannot be run."""
    from memplan.allocator.settings import parse_alloc_conf

    unknown = sorted(options.keys() - RunOptions.__annotations__.keys())
    if unknown:
        raise TypeError(f"memplan.run() takes no {unknown[0]}")
    if not options.get("module", False) and not is_file(usable_path(os.fspath(script))):
        raise InvalidFileError([f"{os.fspath(script)}: no such script"])
    if not options.get("module", False) and (other := _NO_SCRIPTS.get(Path(script).suffix)):
        raise InvalidFileError([f"{os.fspath(script)}: expected a Python script, got {other}"])
    if (options.get("synthetic") or 1) < 1:
        raise InvalidFileError([f"synthetic: expected at least 1, got {options['synthetic']}"])
    if options.get("steps", STEPS) < 1:
        raise InvalidFileError([f"steps: expected at least 1, got {options['steps']}"])
    parse_alloc_conf(options.get("alloc_conf", ""))
    gpus, rank = options.get("gpus"), options.get("rank", 0)
    if gpus is not None and gpus < 1:
        raise InvalidFileError([f"gpus: expected at least 1, got {gpus}"])
    if not 0 <= rank < (gpus or 1):
        raise InvalidFileError([f"rank: expected 0 to {(gpus or 1) - 1}, got {rank}"])


def _finished_trace(outcome: Outcome, script: str) -> Trace:
    """Return what was recorded of a run that took a step to its end."""
    if outcome.ending == "failed":
        raise InvalidFileError([f"{script}: {outcome.message}"])
    if outcome.ending == "refused":
        raise CannotAnswerError(f"{script}: {outcome.message}")
    if outcome.trace is None or not (outcome.steps or outcome.runs_out):
        raise CannotAnswerError(
            f"{script}: it ended without a training step on the GPU: no optimizer was stepped"
            + ("" if outcome.trace is not None else ", and no tensor was on the GPU")
        )
    if not (outcome.trace.peak_bytes or outcome.runs_out):
        raise CannotAnswerError(
            f"{script}: it trains on the CPU: no tensor was on the GPU (optimizer steps: {outcome.steps:,}); have it train on cuda"
        )
    return outcome.trace
