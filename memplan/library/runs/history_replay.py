"""How far the simulated allocator follows a real run: ``memplan.replay``."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from memplan.allocator.history_comparison import HistoryComparison, compare_history
from memplan.allocator.memory_history import load_history
from memplan.allocator.settings import parse_alloc_conf
from memplan.library.answers.answer import Answer
from memplan.library.argument_kinds import checked
from memplan.library.job_options import FilePath
from memplan.report.document import Document, Table
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
