"""Of real runs: why one was out of memory (``memplan.why``), and how far the simulated allocator follows one (``memplan.replay``)."""

import os
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Unpack

from memplan.allocator.history_comparison import HistoryComparison, compare_history
from memplan.allocator.memory_history import load_history
from memplan.allocator.settings import parse_alloc_conf
from memplan.catalog.catalog import Catalog
from memplan.documents.opening import read_bytes, shown_path, usable_path
from memplan.failure.out_of_memory_message import MAXIMUM_TEXT, Cause, Diagnosis, capacity_text, diagnose, read_message
from memplan.library.answers.answer import Answer
from memplan.library.answers.planned_job import plan
from memplan.library.argument_kinds import checked
from memplan.library.job_options import FilePath, JobOptions, ModelGiven
from memplan.plan.suggested.suggestions import with_suggestions
from memplan.report.document import Document, Table
from memplan.report.plans.why_answer import why_document
from memplan.units import format_bytes


@dataclass(frozen=True, repr=False, eq=False)
class Replay(Answer):
    """A real run's memory history beside the simulated allocator.

    Attributes:
        history: Its file.
        comparison: What differs, and the figures at the peak and at the end.
    """

    history: Path
    comparison: HistoryComparison

    @property
    def agrees(self) -> bool:
        """Whether every event is the same."""
        return self.comparison.differences == 0

    def document(self, unit: str = "", *, strict: bool = False, full: bool = True) -> Document:  # noqa: ARG002
        """Return the answer of ``memplan trace --history``."""
        result = self.comparison
        rows = (
            ("reserved peak", result.measured_reserved_peak_bytes, result.simulated.reserved_peak_bytes),
            ("reserved at the end", result.measured_reserved_bytes, result.simulated_reserved_bytes),
            ("allocated at the end", result.measured_allocated_bytes, result.simulated_allocated_bytes),
        )
        table = Table(
            ("figure", ">measured", ">simulated", ">difference"),
            tuple(
                (n, format_bytes(m, unit), format_bytes(s, unit), f"{s - m:+,} B" if s != m else "0")
                for n, m, s in rows
            ),
        )
        data = {"schema": "memplan/history/1", **asdict(result), "agrees": self.agrees}
        return Document(data, (f"Memory history {self.history}", table, self._text), 0 if self.agrees else 1)

    @property
    def _text(self) -> str:
        result, first = self.comparison, self.comparison.first_difference
        text = f"{result.allocations:,} allocations replayed, {result.differences:,} events differ"
        if first is not None:
            text += f"; the first is event {first.index} ({first.event}): measured {first.measured}, simulated {first.simulated}"
        return text + "."


@checked
def replay(history: FilePath, *, alloc_conf: str = "") -> Replay:
    """Return how far the simulated allocator follows a real run's memory history.

    Args:
        history: A memory history exported as JSON.
        alloc_conf: The allocator's settings, as ``PYTORCH_CUDA_ALLOC_CONF``; else the run's own.

    Raises:
        InvalidFileError: The file is no memory history, or the settings are unknown.

    Example:
        >>> import memplan
        >>> memplan.replay("history.json").agrees  # doctest: +SKIP
        True
    """
    run = load_history(Path(history))
    return Replay(Path(history), compare_history(run, parse_alloc_conf(alloc_conf or run.alloc_conf)))


@dataclass(frozen=True, repr=False, eq=False)
class Why(Answer):
    """Why a run was out of memory, and what to change.

    Attributes:
        diagnosis: What the message says, and what the plan of the job says to it.
        catalog: What names were looked up in, or None where no job was named.
    """

    diagnosis: Diagnosis
    catalog: Catalog | None

    @property
    def cause(self) -> Cause:
        """What kept the allocation from succeeding."""
        return self.diagnosis.cause

    def document(self, unit: str = "", *, strict: bool = False, full: bool = True) -> Document:  # noqa: ARG002
        """Return the answer of ``memplan why``."""
        return why_document(self.diagnosis, unit)


@checked
def why(
    model: ModelGiven = None, *, message: str | None = None, file: FilePath = "-", **options: Unpack[JobOptions]
) -> Why:
    """Return why a run was out of memory.

    Args:
        model: As :func:`memplan.plan` takes it; None to read the message alone.
        message: Torch's message, or a log that has it; the last one counts.
        file: Where to read it instead; ``-`` is standard input.
        options: Keywords of :class:`memplan.JobOptions`; without a GPU, the capacity that the message names.

    Raises:
        InvalidFileError: No out-of-memory message of torch, or one that is cut off.
        MemplanError: As :func:`memplan.plan` raises it.

    Example:
        >>> import memplan
        >>> log = (
        ...     "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.65 GiB of which 1.02 GiB is "
        ...     "free. Including non-PyTorch memory, this process has 22.61 GiB memory in use. Of the allocated memory 20.10 GiB "
        ...     "is allocated by PyTorch, and 2.05 GiB is reserved by PyTorch but unallocated."
        ... )
        >>> memplan.why(message=log).cause
        'fragmentation'
    """
    path = usable_path(os.fspath(file))
    text = message if message is not None else _log(path)
    said = read_message(text, "the message" if message is not None else shown_path(path))
    shapes = options.get("shapes")
    if model is None and (shapes is None or not shapes.given()) and options.get("config") is None:
        return Why(diagnose(said, None), None)
    if options.get("gpu") is None and options.get("gpu_memory") is None:
        options["gpu_memory"] = capacity_text(said)
    planned = plan(model, **options)
    memory = planned.memory if planned.verdict == "fits" else with_suggestions(planned.memory, planned.catalog)
    return Why(diagnose(said, memory), planned.catalog)


def _log(path: Path) -> str:
    """Return the text of a log, which may have bytes of any kind in it; what PowerShell redirects is UTF-16 with a mark."""
    log = read_bytes(path, MAXIMUM_TEXT, "give a log, or the message", "give its end")
    wide = log.startswith((BOM_UTF16_LE, BOM_UTF16_BE)) and b"\0" in log
    return log.decode("utf-16" if wide else "utf-8", "replace")
